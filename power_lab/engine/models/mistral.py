"""Mistral, Ministral and Ministral 3: Llama's wiring with sliding windows or, in Ministral 3, YaRN and attention temperature."""

from __future__ import annotations

from power_lab.engine.models import rope, topology
from power_lab.engine.models.metadata import Metadata
from power_lab.engine.models.names import huggingface as names  # noqa: F401
from power_lab.engine.models.spec import LayerSpec, ModelSpec
from power_lab.engine.weights.source import WeightSource

ARCHITECTURES = ("mistral3",)
MODEL_TYPES = ("mistral", "ministral", "ministral3")


def from_gguf(meta: Metadata, source: WeightSource, vocab: int) -> ModelSpec:
    """Query and key rows are stored for interleaved rotary pairs."""
    t = topology.from_gguf(meta, "mistral3", vocab)
    turn, tensors = rope.from_gguf(meta, source, "mistral3", t.rotary_dim, interleaved=True, context=t.context)
    beta = meta.get("mistral3.attention.temperature_scale", float, 0.0, 0.0, 1e3)
    original = meta.get("mistral3.rope.scaling.original_context_length", int, t.context, 1, topology.MAX_CONTEXT)
    temperature = (beta, original) if beta else None
    layers = (LayerSpec(t.attention(i, turn, temperature=temperature), t.ffn[i]) for i in t.layers)
    return t.model(layers, topology_tensors=tensors)


def from_config(config: Metadata, vocab: int) -> ModelSpec:
    t = topology.from_config(config, vocab)
    if t.architecture == "ministral3" and not config.has("rope_parameters.type"):
        config.require("rope_parameters.rope_type", str)  # by default they are stretched, not plain
    turn = rope.from_config(config, t.rotary_dim, context=t.context)
    seen = topology.window(config, 0)
    sliding = topology.sliding_layers(config, len(t.layers), [seen > 0] * len(t.layers))
    beta = config.get("rope_parameters.llama_4_scaling_beta", float, 0.0, 0.0, 1e3)
    temperature = None
    if beta:
        original = config.require("rope_parameters.original_max_position_embeddings", int, 1, topology.MAX_CONTEXT)
        temperature = (beta, original)
    return t.model(
        LayerSpec(t.attention(i, turn, window=seen if sliding[i] else 0, temperature=temperature), t.ffn[i])
        for i in t.layers
    )
