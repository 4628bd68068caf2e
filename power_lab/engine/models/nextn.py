"""Layers for multi-token prediction (MTP, also NextN) that a checkpoint has behind its own: what they are, not how they draft.

GGUF (llama.cpp): the last `{arch}.nextn_predict_layers` of its `block_count` layers, with tensors `blk.N.nextn.*` beside a layer's own.
Folders state `num_nextn_predict_layers` or `num_mtp_layers`, and have one of the layouts below. Every checkpoint runs without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from power_lab.engine.models.metadata import Metadata
from power_lab.engine.models.names import parts
from power_lab.engine.models.spec import LayerSpec, ModelSpec
from power_lab.engine.weights.renamed import NamedSource
from power_lab.engine.weights.source import FileSource, WeightSource, shown

MOST = 16  # layers; a draft is no longer

PARTS = ("eh_proj", "enorm", "hnorm", "shared_head_norm", "embed_tokens", "shared_head_head")
"""What such a layer has beside a layer of the model, by GGUF's names; the last two only where they are not the model's own."""

_EXPERTS = ("ffn_gate_inp", "_exps", "_shexp", "experts", "mlp.gate.")


@dataclass(frozen=True, slots=True)
class Layout:
    """How folders of a model type lay these layers out.

    Attributes:
        prefix: of the names of layer number {}, counted from the model's number of layers on (`behind`) or from 0.
        names: what folders call PARTS.
        hidden_first: whether `eh_proj` reads the hidden state before the token's embedding, not behind it.
        normed_hidden, normed_chain: whether the first one reads the model's hidden state behind the final norm, and whether each hands on
            what it makes behind its own norm.
    """

    prefix: str = "model.layers.{}."
    behind: bool = True
    names: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType(
            {name: name for name in PARTS}
            | {"shared_head_norm": "shared_head.norm", "shared_head_head": "shared_head.head"}
        )
    )
    hidden_first: bool = False
    normed_hidden: bool = True
    normed_chain: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class NextN:
    """Such layers of one checkpoint.

    Attributes:
        layers: of each the part that is like a layer of the model.
        first: number of the first one: tensors of layer k have the canonical names `blk.{first + k}.*`.
        source: their tensors by canonical names.
        hidden_first, normed_hidden, normed_chain: see `Layout`.
        fault: why Power Lab cannot draft with them, though the model runs; else empty.
        values: in all tensors of theirs.
    """

    layers: tuple[LayerSpec, ...]
    first: int
    source: WeightSource
    hidden_first: bool = False
    normed_hidden: bool = True
    normed_chain: bool = True
    fault: str = ""
    values: int = 0


def of_gguf(
    meta: Metadata, arch: str, whole: ModelSpec, source: FileSource
) -> tuple[ModelSpec, FileSource, NextN | None]:
    """A file's topology and tensors without these layers, and they.

    whole: all layers that the file has. They read as in llama.cpp: the embedding first, hidden states behind norms. Raises ModelFileError
    for a count that leaves the model no layer.
    """
    count = meta.get(f"{arch}.nextn_predict_layers", int, 0, 0, min(MOST, len(whole.layers) - 1))
    if not count:
        return whole, source, None
    first = len(whole.layers) - count
    rest, apart = source.split(f"blk.{first + k}." for k in range(count))
    layers = whole.layers[first:]
    fault = _fault(layers, first, apart.names())
    return (
        replace(whole, layers=whole.layers[:first]),
        rest,
        NextN(layers, first, apart, fault=fault, values=_values(apart)),
    )


def of_folder(
    config: Metadata, layout: Layout, spec: ModelSpec, names: Mapping[str, str], source: FileSource
) -> tuple[FileSource, NextN | None]:
    """A folder's tensors without these layers, and they.

    names: canonical names of the model -> the folder's. Raises ModelFileError for an impossible count.
    """
    key = next((key for key in ("num_nextn_predict_layers", "num_mtp_layers") if config.has(key)), "")
    count = config.require(key, int, 0, MOST) if key else 0
    if not count:
        return source, None
    first = len(spec.layers)
    prefixes = [layout.prefix.format(first + k if layout.behind else k) for k in range(count)]
    rest, apart = source.split(prefixes)
    like, fault = _like(config, spec, count)
    known = {}
    for k, (at, prefix) in enumerate(zip(like, prefixes, strict=True)):
        own, theirs = f"blk.{first + k}", f"blk.{at}."
        for part in parts(spec.layers[at]):
            _, _, stored = names[theirs + part].partition(f".{at}.")
            known[f"{own}.{part}"] = prefix + stored
        known |= {f"{own}.nextn.{part}.weight": f"{prefix}{name}.weight" for part, name in layout.names.items()}
    layers = tuple(spec.layers[at] for at in like)
    renamed = NamedSource(apart, known)
    return rest, NextN(
        layers,
        first,
        renamed,
        config.get("mtp_hidden_states_first", bool, layout.hidden_first),
        layout.normed_hidden,
        layout.normed_chain,
        fault or _fault(layers, first, renamed.names()),
        _values(apart),
    )


def _values(source: FileSource) -> int:
    return sum(source.stored(name).values for name in source.names())


def _like(config: Metadata, spec: ModelSpec, count: int) -> tuple[tuple[int, ...], str]:
    """For each of them the number of a layer of the model that it is like, and why nobody can tell, or nothing.

    Where the model's own differ, `mtp_layer_types` says which see a window only.
    """
    unknown = (0,) * count
    if not config.has("mtp_layer_types"):
        alike = len(set(spec.layers)) == 1
        return (
            unknown,
            "" if alike else "the model's layers differ, and 'mtp_layer_types' does not say which they are like",
        )
    found = []
    for kind in config.require_list("mtp_layer_types", str, count):
        slides = {"sliding_attention": True, "full_attention": False}.get(kind)
        at = next((i for i, layer in enumerate(spec.layers) if bool(layer.attention.window) == slides), None)
        if at is None:
            return unknown, f"one is of the type {kind[:40]!r}, and no layer of the model is"
        found.append(at)
    return tuple(found), ""


def _fault(layers: Iterable[LayerSpec], first: int, stored: list[str]) -> str:
    """Why layers of this kind cannot draft, by what they are and what the file holds of them; else nothing."""
    layers = tuple(layers)
    if not stored:
        return f"{len(layers)} are stated, but no tensor of theirs is there"
    known = {f"blk.{first + k}.{part}" for k, layer in enumerate(layers) for part in parts(layer)}
    known |= {f"blk.{first + k}.nextn.{part}.weight" for k in range(len(layers)) for part in PARTS}
    if strange := [name for name in stored if name not in known]:
        mixed = "they are mixtures of experts" if any(word in name for name in strange for word in _EXPERTS) else ""
        return f"{mixed or 'they are of an unknown kind'}: {shown(strange)}"
    if not all(layer.pre_norms for layer in layers):
        return "they have no norms before their parts"
    if any(layer.attention.temperature is not None for layer in layers):
        return "their attention has a temperature"
    return ""
