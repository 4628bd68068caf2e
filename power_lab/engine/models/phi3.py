"""Phi-3, Phi-3.5 and Phi-4: Llama's wiring with fused projections, partial rotation and LongRoPE."""

from __future__ import annotations

from power_lab.engine.models import rope, topology
from power_lab.engine.models.metadata import Metadata
from power_lab.engine.models.names import huggingface as names  # noqa: F401
from power_lab.engine.models.spec import LayerSpec, ModelSpec
from power_lab.engine.weights.source import WeightSource

ARCHITECTURES = ("phi3",)
MODEL_TYPES = ("phi3",)


def from_gguf(meta: Metadata, source: WeightSource, vocab: int) -> ModelSpec:
    t = topology.from_gguf(meta, "phi3", vocab)
    turn, tensors = rope.from_gguf(meta, source, "phi3", t.rotary_dim, context=t.context)
    window = meta.get("phi3.attention.sliding_window", int, 0, 0, topology.MAX_CONTEXT)
    return _model(t, turn, window, topology_tensors=tensors)


def from_config(config: Metadata, vocab: int) -> ModelSpec:
    t = topology.from_config(config, vocab)
    return _model(t, rope.from_config(config, t.rotary_dim, context=t.context), topology.window(config, 0))


def _model(t: topology.Topology, turn: rope.Rope, window: int, topology_tensors: tuple[str, ...] = ()) -> ModelSpec:
    layers = (LayerSpec(t.attention(i, turn, window=window), t.ffn[i], fused=True) for i in t.layers)
    return t.model(layers, topology_tensors=topology_tensors)
