"""From an open checkpoint to a topology and its tensors by canonical names, whatever the file format."""

from __future__ import annotations

from dataclasses import dataclass

from power_lab.engine.models import nextn, of_architecture, of_model_type
from power_lab.engine.models.nextn import NextN
from power_lab.engine.models.spec import ModelSpec
from power_lab.engine.models.topology import MAX_VOCAB
from power_lab.engine.weights.checkpoint import Checkpoint
from power_lab.engine.weights.config_json import JsonConfig
from power_lab.engine.weights.renamed import HARMLESS_LEFTOVERS, RenamedSource
from power_lab.engine.weights.source import WeightSource
from power_lab.errors import ModelFileError

WRAPPERS = ("gemma3", "mistral3")
"""Model types of folders that hold a text model, under `text_config`, beside parts that see images."""

OTHER_PARTS = ("vision_tower", "multi_modal_projector")


@dataclass(frozen=True, slots=True)
class Described:
    """What a checkpoint says about itself.

    Attributes:
        spec: topology; source: tensors by canonical names.
        left_out: parts of the checkpoint that a text model does not use.
        nextn: layers for multi-token prediction that it has besides, which the model runs without.
    """

    spec: ModelSpec
    source: WeightSource
    left_out: tuple[str, ...] = ()
    nextn: NextN | None = None


def describe(checkpoint: Checkpoint, vocab: int | None = None) -> Described:
    """Read a checkpoint's topology, for a tokenizer of `vocab` tokens; None takes what the model itself says.

    Raises ModelFileError naming an unknown family, key or tensor.
    """
    metadata, source = checkpoint.metadata, checkpoint.source
    if not isinstance(metadata, JsonConfig):
        known = len(metadata.metadata.get("tokenizer.ggml.tokens", ())) if vocab is None else vocab
        family = of_architecture(checkpoint.architecture)
        whole = family.from_gguf(metadata, source, known)
        spec, rest, behind = nextn.of_gguf(metadata, checkpoint.architecture, whole, source)
        return Described(spec, rest, nextn=behind)
    wrapped = checkpoint.architecture in WRAPPERS
    config = _text_part(metadata) if wrapped else metadata
    for place in (metadata, config):
        _refuse_quantised(place)
    family = of_model_type(config.require("model_type", str))
    spec = family.from_config(config, MAX_VOCAB if vocab is None else vocab)
    names: dict[str, str] = family.names(spec)
    if not wrapped:
        layout = family.nextn(config) if hasattr(family, "nextn") else nextn.Layout()
        rest, behind = nextn.of_folder(config, layout, spec, names, source)
        return Described(spec, RenamedSource(rest, names, bool(spec.tied), HARMLESS_LEFTOVERS), nextn=behind)
    present = frozenset(source.names())
    names = {canonical: _inside(name, present) for canonical, name in names.items()}
    others = [f"{outer}{part}.*" for outer in ("", "model.") for part in OTHER_PARTS]
    renamed = RenamedSource(source, names, bool(spec.tied), [*HARMLESS_LEFTOVERS, *others])
    return Described(spec, renamed, tuple(part for part in OTHER_PARTS if any(f"{part}." in name for name in present)))


def _text_part(config: JsonConfig) -> JsonConfig:
    """The text model's section. Whether its head is the embedding may be said outside."""
    text = config.section("text_config")
    if not text.has("tie_word_embeddings") and config.has("tie_word_embeddings"):
        text.values = {**text.values, "tie_word_embeddings": config.require("tie_word_embeddings", bool)}
    return text


def _refuse_quantised(config: JsonConfig) -> None:
    """What other programs quantise lies in other forms, and weights that they would quantise on loading mean another model."""
    for key in ("quantization_config", "compression_config", "quantization"):
        if config.has(key):
            raise ModelFileError(
                f"{config.path}: {key} is not supported: the folder holds weights that another program quantised.",
                "Fetch the model it was made from, or a GGUF file of it.",
            )


def _inside(name: str, present: frozenset[str]) -> str:
    """A text model's tensor name inside a wrapper: transformers has written these two forms."""
    older, newer = f"language_model.{name}", name.replace("model.", "model.language_model.", 1)
    return newer if newer in present else older
