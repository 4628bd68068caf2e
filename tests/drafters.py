"""Tiny drafter artifacts with random weights, of every kind, for tiny targets; and any tensors as an artifact's file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.loader import Loaded
from power_lab.engine.speculation.drafters.neural import Trained
from power_lab.engine.speculation.drafters.neural.artifact import SCHEMA, Artifact, Target
from power_lab.engine.speculation.drafters.neural.kinds import bind
from power_lab.engine.weights.quantise import quantise
from power_lab.engine.weights.source import MemorySource
from power_lab.kernels.ops import Ops
from power_lab.kernels.quants import QuantType
from tests import tiny

Tensors = dict[str, np.ndarray]

SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96}
FILTERS: dict[str, Any] = {"conv_taps": 2, "conv_group": 16, "selector_rank": 8, "selector_top_k": 6}
BLOCK: dict[str, Any] = SIZES | {"taps": [0, 1, 2], "block_size": 8, "mask_token": 256, "causal": True, "window": 0}


def write(path: Path, header: Mapping[str, Any], tensors: Mapping[str, np.ndarray], types: Mapping[str, str]) -> Path:
    """An artifact's file: tensors that `types` names are quantised to that block type, others lie as they are."""
    stored = {
        name: quantise(value, QuantType[types[name]]) if name in types else value for name, value in tensors.items()
    }
    kinds = {np.dtype(np.uint8): "U8", np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}
    entries: dict[str, Any] = {"__metadata__": {"power_lab": json.dumps({**header, "types": dict(types)})}}
    at = 0
    for name, value in stored.items():
        entries[name] = {
            "dtype": kinds[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(v.tobytes() for v in stored.values()))
    return path


def header(shape: tiny.Shape, kind: str, serves: list[str], config: Mapping[str, Any]) -> dict[str, Any]:
    spec = tiny.spec(shape)
    target = {"sha256": repr(shape), "vocab": spec.vocab, "width": spec.width, "layers": len(spec.layers)}
    return {"schema": SCHEMA, "kind": kind, "serves": serves, "target": target, "config": dict(config), "name": kind}


class Random:
    """Random tensors of a scale at which a drafter's guesses vary."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.made: Tensors = {}

    def matrix(self, name: str, rows: int, cols: int, scale: float = 1.4) -> None:
        self.made[name] = (self._rng.standard_normal((rows, cols)) * scale / cols**0.5).astype(np.float32)

    def vector(self, name: str, size: int, mean: float = 1.0) -> None:
        self.made[name] = (mean + 0.2 * self._rng.standard_normal(size)).astype(np.float32)

    def layers(self, config: Mapping[str, Any], width: int) -> None:
        """Llama-like layers by the artifact's names."""
        head, q, kv = config["head_dim"], config["heads"] * config["head_dim"], config["kv_heads"] * config["head_dim"]
        sizes = {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q)}
        sizes |= {"gate": (config["ffn"], width), "up": (config["ffn"], width), "down": (width, config["ffn"])}
        for i in range(config["layers"]):
            for name, size in sizes.items():
                self.matrix(f"layers.{i}.{name}.weight", *size)
            for name in ("attn_norm", "ffn_norm"):
                self.vector(f"layers.{i}.{name}.weight", width)
            for name in ("q_norm", "k_norm") if config.get("qk_norm") else ():
                self.vector(f"layers.{i}.{name}.weight", head)

    def ids(self, vocab: int, count: int) -> np.ndarray:
        return np.sort(self._rng.permutation(vocab)[:count]).astype(np.int32)


def dflash(shape: tiny.Shape, config: Mapping[str, Any] = BLOCK, *, said: int = 0, seed: int = 5) -> Tensors:
    """Tensors of a DFlash drafter, with a Markov head where the config has a rank. said: tokens that it can say, 0: all."""
    spec, random = tiny.spec(shape), Random(seed)
    random.matrix("fc.weight", spec.width, len(config["taps"]) * spec.width)
    random.vector("hidden_norm.weight", spec.width)
    random.layers(config, spec.width)
    random.vector("norm.weight", spec.width)
    if rank := config.get("markov_rank", 0):
        random.matrix("markov_w1.weight", spec.vocab, rank)
        random.matrix("markov_w2.weight", said or spec.vocab, rank, 2.0)
        random.vector("conf.weight", spec.width + rank, 0.0)
        random.vector("conf.bias", 1, 0.0)
    if "conv_taps" in config:
        _filters(random, config, spec.width)
        for name, rows in (("predecessor", spec.vocab), ("successor", spec.vocab)):
            random.matrix(f"selector_{name}.weight", rows, config["selector_rank"], 3.0)
        random.matrix("selector_hidden.weight", config["selector_rank"], spec.width)
    if said:
        random.made["draft_ids"] = random.ids(spec.vocab, said)
    return random.made


def _filters(random: Random, config: Mapping[str, Any], width: int) -> None:
    for i in range(config["layers"]):
        for name in ("attn_conv", "ffn_conv"):
            random.matrix(f"layers.{i}.{name}.base", 2 * config["conv_taps"], width, 4.0)
            taps = random.made[f"layers.{i}.{name}.base"]
            random.made[f"layers.{i}.{name}.base"] = taps.reshape(2, config["conv_taps"], width)
            random.matrix(
                f"layers.{i}.{name}.proj.weight", 2 * config["conv_taps"] * width // config["conv_group"], width
            )


def rounded(value: np.ndarray, kind: str) -> np.ndarray:
    """The values that a tensor has once it is stored."""
    return tiny.values((QuantType[kind], quantise(value, QuantType[kind]))) if kind else value


def trained(loaded: Loaded, shape: tiny.Shape, path: Path, *said: Any) -> Trained:
    """An artifact, bound to a tiny model. said: the last arguments of `Target`."""
    source, model = MemorySource(tiny.tensors(shape)), loaded.model
    target = Target(model.spec, model.weights, model.ops, source, loaded.facts.sha256, *said)
    with Artifact.open(path) as artifact:
        return bind(artifact, target, loaded.context)


def equipped(
    loaded: Loaded,
    shape: tiny.Shape,
    kind: str,
    serves: list[str],
    config: Mapping[str, Any],
    tensors: Tensors,
    types: Mapping[str, str] | None = None,
    vocabulary: int = 0,
    ranking: np.ndarray | None = None,
) -> Loaded:
    """A tiny model with a drafter beside it. vocabulary, ranking: see `Target`."""
    with TemporaryDirectory() as folder:
        path = write(Path(folder, f"{kind}.safetensors"), header(shape, kind, serves, config), tensors, types or {})
        return replace(loaded, trained=trained(loaded, shape, path, vocabulary, ranking))


def block_drafter(shape: tiny.Shape, ops: Ops, *, said: int = 0, types: Any = None, **changes: Any) -> Loaded:
    """A tiny model with a DFlash drafter, or a DSpark or DFlash2 one, as a `markov_rank` or `conv_taps` in its config's changes says."""
    config = BLOCK | {"taps": list(range(min(shape.layers, 2) + 1))} | changes
    serves = ["dspark", "dflash"] if config.get("markov_rank") else ["dflash"]
    tensors = dflash(shape, config, said=said)
    kind = "dflash2" if "conv_taps" in config else "dflash"
    serves = [kind] if kind == "dflash2" else serves
    return equipped(tiny.loaded(shape, ops), shape, kind, serves, config, tensors, types)


MTP: dict[str, Any] = SIZES | {"layers": 1, "taps": [2]}


def mtp(shape: tiny.Shape, config: Mapping[str, Any] = MTP, *, said: int = 0, seed: int = 6) -> Tensors:
    """Tensors of an MTP drafter; several layers are as many heads."""
    width, random = tiny.spec(shape).width, Random(seed)
    random.layers(config, width)
    for at in [""] if config["layers"] == 1 else [f"layers.{head}." for head in range(config["layers"])]:
        for name in ("enorm", "hnorm", "norm"):
            random.vector(f"{at}{name}.weight", width)
        for name in ("embed_proj", "hidden_proj"):
            random.matrix(f"{at}{name}.weight", width, width)
    if said:
        random.made["draft_ids"] = random.ids(tiny.spec(shape).vocab, said)
    return random.made


def mtp_drafter(shape: tiny.Shape, ops: Ops, *, said: int = 0, types: Any = None, **changes: Any) -> Loaded:
    """A tiny model with an MTP drafter."""
    config = MTP | {"taps": [shape.layers]} | changes
    return equipped(tiny.loaded(shape, ops), shape, "mtp", ["mtp"], config, mtp(shape, config, said=said), types)


EAGLE: dict[str, Any] = {"width": 48, "heads": 4, "ffn": 80, "target_layers": [0, 1]}


def eagle(shape: tiny.Shape, config: Mapping[str, Any] = EAGLE, *, said: int = 0, seed: int = 7) -> Tensors:
    """Tensors of an assistant that reads the target's keys and values; with a head of its own unless it is as wide as the target."""
    spec, width, ffn, random = tiny.spec(shape), config["width"], config["ffn"], Random(seed)
    for name in ("embed_proj", "hidden_proj"):
        random.matrix(f"{name}.weight", width, spec.width)
    random.matrix("next_hidden.weight", spec.width, width)
    random.vector("norm.weight", width)
    for i, at in enumerate(config["target_layers"]):
        head = spec.layers[at].attention.head_dim
        sizes = {"q": (config["heads"] * head, width), "o": (width, config["heads"] * head)}
        sizes |= {"gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)}
        for name, size in sizes.items():
            random.matrix(f"layers.{i}.{name}.weight", *size)
        posts = ("post_attn_norm", "post_ffn_norm") if config.get("post_norms") else ()
        for name in ("attn_norm", "ffn_norm", *posts):
            random.vector(f"layers.{i}.{name}.weight", width)
        if config.get("qk_norm"):
            random.vector(f"layers.{i}.q_norm.weight", head)
    if width != spec.width:
        random.matrix("head.weight", said or spec.vocab, width)
    if said:
        random.made["draft_ids"] = random.ids(spec.vocab, said)
    return random.made


def eagle_drafter(shape: tiny.Shape, ops: Ops, *, said: int = 0, types: Any = None, **changes: Any) -> Loaded:
    """A tiny model with such an assistant."""
    config = EAGLE | {"target_layers": list(range(shape.layers))} | changes
    return equipped(tiny.loaded(shape, ops), shape, "eagle", ["eagle"], config, eagle(shape, config, said=said), types)


KINDS: dict[str, Callable[[tiny.Shape, Ops], Loaded]] = {
    "dflash": lambda shape, ops: block_drafter(shape, ops),
    "dspark": lambda shape, ops: block_drafter(shape, ops, markov_rank=8, said=120),
    "dflash2": lambda shape, ops: block_drafter(shape, ops, said=120, **FILTERS),
    "mtp": lambda shape, ops: mtp_drafter(shape, ops),
    "eagle": lambda shape, ops: eagle_drafter(shape, ops),
}
"""Name of a drafter -> a tiny model that has it."""


def engine(loaded: Loaded, **settings: Any) -> Engine:
    """A tiny engine that the caller steps."""
    options = {key: settings.pop(key) for key in ("observer", "clock") if key in settings}
    config = EngineConfig(**{"kv_tokens": 2048, "step_tokens": 256, **settings})
    return Engine(config, loaded=loaded, threaded=False, **options)
