"""Qwen3: Llama's wiring with RMS norms on every query and key head."""

from __future__ import annotations

from power_lab.engine.models import rope, topology
from power_lab.engine.models.metadata import Metadata
from power_lab.engine.models.names import huggingface as names  # noqa: F401
from power_lab.engine.models.qwen2 import upper_windows
from power_lab.engine.models.spec import LayerSpec, ModelSpec
from power_lab.engine.weights.source import WeightSource

ARCHITECTURES = ("qwen3",)
MODEL_TYPES = ("qwen3",)


def from_gguf(meta: Metadata, source: WeightSource, vocab: int) -> ModelSpec:
    t = topology.from_gguf(meta, "qwen3", vocab)
    turn, tensors = rope.from_gguf(meta, source, "qwen3", t.rotary_dim, context=t.context)
    layers = (LayerSpec(t.attention(i, turn, qk_norm="head"), t.ffn[i]) for i in t.layers)
    return t.model(layers, topology_tensors=tensors)


def from_config(config: Metadata, vocab: int) -> ModelSpec:
    t = topology.from_config(config, vocab)
    turn = rope.from_config(config, t.rotary_dim, theta=10000.0, context=t.context)
    windows, bias = upper_windows(config, len(t.layers)), config.get("attention_bias", bool, False)
    return t.model(
        LayerSpec(t.attention(i, turn, window=windows[i], qk_norm="head", bias=bias, out_bias=bias), t.ffn[i])
        for i in t.layers
    )
