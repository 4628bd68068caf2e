"""Qwen2 and Qwen2.5: Llama's wiring with biases on the query, key and value projections."""

from __future__ import annotations

from power_lab.engine.models import rope, topology
from power_lab.engine.models.metadata import Metadata
from power_lab.engine.models.names import huggingface as names  # noqa: F401
from power_lab.engine.models.spec import LayerSpec, ModelSpec
from power_lab.engine.weights.source import WeightSource

ARCHITECTURES = ("qwen2",)
MODEL_TYPES = ("qwen2",)


def from_gguf(meta: Metadata, source: WeightSource, vocab: int) -> ModelSpec:
    t = topology.from_gguf(meta, "qwen2", vocab)
    turn, tensors = rope.from_gguf(meta, source, "qwen2", t.rotary_dim, context=t.context)
    layers = (LayerSpec(t.attention(i, turn, bias=True), t.ffn[i]) for i in t.layers)
    return t.model(layers, topology_tensors=tensors)


def from_config(config: Metadata, vocab: int) -> ModelSpec:
    t = topology.from_config(config, vocab)
    turn = rope.from_config(config, t.rotary_dim, context=t.context)
    windows = upper_windows(config, len(t.layers))
    return t.model(LayerSpec(t.attention(i, turn, window=windows[i], bias=True), t.ffn[i]) for i in t.layers)


def upper_windows(config: Metadata, count: int) -> list[int]:
    """Window of each layer: with `use_sliding_window`, the layers from `max_window_layers` on have one."""
    if not config.get("use_sliding_window", bool, False):
        return [0] * count
    first = config.get("max_window_layers", int, 28, 0)
    sliding = topology.sliding_layers(config, count, [i >= first for i in range(count)])
    return [topology.window(config, 4096) if slides else 0 for slides in sliding]
