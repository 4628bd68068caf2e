"""SmolLM3: Llama's wiring, but every fourth layer has no rotary positions."""

from __future__ import annotations

from power_lab.engine.models import rope, topology
from power_lab.engine.models.metadata import Metadata
from power_lab.engine.models.names import huggingface as names  # noqa: F401
from power_lab.engine.models.spec import LayerSpec, ModelSpec
from power_lab.engine.weights.source import WeightSource

ARCHITECTURES = ("smollm3",)
MODEL_TYPES = ("smollm3",)

INTERVAL = 4  # GGUF files do not state it


def from_gguf(meta: Metadata, source: WeightSource, vocab: int) -> ModelSpec:
    """Query and key rows are stored for interleaved rotary pairs."""
    t = topology.from_gguf(meta, "smollm3", vocab)
    turn, tensors = rope.from_gguf(meta, source, "smollm3", t.rotary_dim, interleaved=True, context=t.context)
    layers = (LayerSpec(t.attention(i, turn if (i + 1) % INTERVAL else None), t.ffn[i]) for i in t.layers)
    return t.model(layers, topology_tensors=tensors)


def from_config(config: Metadata, vocab: int) -> ModelSpec:
    t = topology.from_config(config, vocab, tied=True)
    count = len(t.layers)
    turn = rope.from_config(config, t.rotary_dim, theta=2000000.0, context=t.context)
    interval = config.get("no_rope_layer_interval", int, INTERVAL, 1, topology.MAX_LAYERS)
    turns = [int((i + 1) % interval != 0) for i in t.layers]
    if config.has("no_rope_layers"):  # despite its name, 1 marks a layer that has rotary positions
        turns = config.require_list("no_rope_layers", int, count, 0, 1)
    slides = config.get("use_sliding_window", bool, False) and config.has("sliding_window")
    sliding = topology.sliding_layers(config, count, [not turn for turn in turns]) if slides else [False] * count
    bias = config.get("attention_bias", bool, False)
    return t.model(
        LayerSpec(
            t.attention(
                i,
                turn if turns[i] else None,
                window=topology.window(config) if sliding[i] else 0,
                bias=bias,
                out_bias=bias,
            ),
            t.ffn[i],
        )
        for i in t.layers
    )
