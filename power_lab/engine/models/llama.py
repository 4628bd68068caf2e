"""Llama (and models that share its wiring: Mistral's GGUF files, SmolLM2): RMS norms, rotary positions, SwiGLU."""

from __future__ import annotations

from power_lab.engine.models import rope, topology
from power_lab.engine.models.metadata import Metadata
from power_lab.engine.models.names import huggingface as names  # noqa: F401
from power_lab.engine.models.spec import LayerSpec, ModelSpec
from power_lab.engine.weights.source import WeightSource

ARCHITECTURES = ("llama",)
MODEL_TYPES = ("llama",)


def from_gguf(meta: Metadata, source: WeightSource, vocab: int) -> ModelSpec:
    """Query and key rows are stored for interleaved rotary pairs."""
    t = topology.from_gguf(meta, "llama", vocab)
    turn, tensors = rope.from_gguf(meta, source, "llama", t.rotary_dim, interleaved=True, context=t.context)
    window = meta.get("llama.attention.sliding_window", int, 0, 0, topology.MAX_CONTEXT)
    layers = (LayerSpec(t.attention(i, turn, window=window), t.ffn[i]) for i in t.layers)
    return t.model(layers, topology_tensors=tensors)


def from_config(config: Metadata, vocab: int) -> ModelSpec:
    t = topology.from_config(config, vocab)
    turn = rope.from_config(config, t.rotary_dim, context=t.context)
    bias = config.get("attention_bias", bool, False)
    return t.model(LayerSpec(t.attention(i, turn, bias=bias, out_bias=bias), t.ffn[i]) for i in t.layers)
