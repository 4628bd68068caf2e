"""From an open checkpoint to a topology and its tensors by canonical names, whatever the file format."""

from __future__ import annotations

from dataclasses import dataclass

from power_lab.engine.models import of_architecture, of_model_type
from power_lab.engine.models.spec import ModelSpec
from power_lab.engine.weights.checkpoint import Checkpoint
from power_lab.engine.weights.config_json import JsonConfig
from power_lab.engine.weights.renamed import HARMLESS_LEFTOVERS, RenamedSource
from power_lab.engine.weights.source import WeightSource

WRAPPERS = ("gemma3", "mistral3")
"""Model types of folders that hold a text model, under `text_config`, beside parts that see images."""

OTHER_PARTS = ("vision_tower", "multi_modal_projector")


@dataclass(frozen=True, slots=True)
class Described:
    """What a checkpoint says about itself.

    Attributes:
        spec: topology; source: tensors by canonical names.
        left_out: parts of the checkpoint that a text model does not use.
    """

    spec: ModelSpec
    source: WeightSource
    left_out: tuple[str, ...] = ()


def describe(checkpoint: Checkpoint, vocab: int | None = None) -> Described:
    """Read a checkpoint's topology, for a tokenizer of `vocab` tokens; None takes what the model itself says.

    Raises ModelFileError naming an unknown family, key or tensor.
    """
    metadata, source = checkpoint.metadata, checkpoint.source
    if not isinstance(metadata, JsonConfig):
        known = len(metadata.metadata.get("tokenizer.ggml.tokens", ())) if vocab is None else vocab
        family = of_architecture(checkpoint.architecture)
        return Described(family.from_gguf(metadata, source, known), source)
    wrapped = checkpoint.architecture in WRAPPERS
    config = metadata.section("text_config") if wrapped else metadata
    family = of_model_type(config.require("model_type", str))
    spec: ModelSpec = family.from_config(config, config.require("vocab_size", int, 1) if vocab is None else vocab)
    names: dict[str, str] = family.names(spec)
    if not wrapped:
        return Described(spec, RenamedSource(source, names, bool(spec.tied), HARMLESS_LEFTOVERS))
    present = frozenset(source.names())
    names = {canonical: _inside(name, present) for canonical, name in names.items()}
    others = [f"{outer}{part}.*" for outer in ("", "model.") for part in OTHER_PARTS]
    renamed = RenamedSource(source, names, bool(spec.tied), [*HARMLESS_LEFTOVERS, *others])
    return Described(spec, renamed, tuple(part for part in OTHER_PARTS if any(f"{part}." in name for name in present)))


def _inside(name: str, present: frozenset[str]) -> str:
    """A text model's tensor name inside a wrapper: transformers has written these two forms."""
    older, newer = f"language_model.{name}", name.replace("model.", "model.language_model.", 1)
    return newer if newer in present else older
