"""OLMo 2 and OLMo 3: norms only after each part and over all query and all key heads at once; three layers in four have a window.

Layers with a window keep plain rotary positions where the others stretch them.
"""

from __future__ import annotations

from power_lab.engine.models import rope, topology
from power_lab.engine.models.metadata import Metadata
from power_lab.engine.models.names import sandwich as names  # noqa: F401
from power_lab.engine.models.spec import LayerSpec, ModelSpec
from power_lab.engine.weights.source import WeightSource

ARCHITECTURES = ("olmo2",)
MODEL_TYPES = ("olmo2", "olmo3")

PATTERN = 4  # not every file states it: every fourth layer sees everything
THETA = 500000.0


def from_gguf(meta: Metadata, source: WeightSource, vocab: int) -> ModelSpec:
    """Both generations are `olmo2` files; those of OLMo 3 state a window.

    Their `attn_factor` is config.json's `attention_factor`, YaRN's whole magnitude. llama.cpp multiplies it with the one that it
    derives from `factor`, so its attention is sharper than the model's own.
    """
    t = topology.from_gguf(meta, "olmo2", vocab)
    turn, tensors = rope.from_gguf(meta, source, "olmo2", t.rotary_dim, theta=THETA, context=t.context, whole=True)
    theta = meta.get("olmo2.rope.freq_base", float, THETA, 1.0, 1e12)
    local = rope.plain(t.rotary_dim, meta.get("olmo2.rope.freq_base_swa", float, theta, 1.0, 1e12))
    window = meta.get("olmo2.attention.sliding_window", int, 0, 0, topology.MAX_CONTEXT)
    sliding = [window > 0 and slides for slides in topology.sliding_period(meta, "olmo2", len(t.layers), PATTERN)]
    return _model(t, turn, local, sliding, window, False, topology_tensors=tensors)


def from_config(config: Metadata, vocab: int) -> ModelSpec:
    t = topology.from_config(config, vocab)
    bias = config.get("attention_bias", bool, False)
    if t.architecture == "olmo2":
        turn = rope.from_config(config, t.rotary_dim, theta=THETA, context=t.context)
        return _model(t, turn, turn, [False] * len(t.layers), 0, bias)
    turn = rope.from_config(config, t.rotary_dim, "full_attention", THETA, t.context)
    at = "rope_parameters.sliding_attention"
    topology.expect(config, f"{at}.rope_type", "default")
    theta = config.get("rope_theta", float, THETA, 1.0, 1e12)
    local = rope.plain(t.rotary_dim, config.get(f"{at}.rope_theta", float, theta, 1.0, 1e12))
    sliding = topology.sliding_layers(config, len(t.layers), [(i + 1) % PATTERN != 0 for i in t.layers])
    return _model(t, turn, local, sliding, topology.window(config, 4096), bias)


def _model(
    t: topology.Topology,
    turn: rope.Rope,
    local: rope.Rope,
    sliding: list[bool],
    window: int,
    bias: bool,
    topology_tensors: tuple[str, ...] = (),
) -> ModelSpec:
    def layer(i: int) -> LayerSpec:
        attention = t.attention(
            i,
            local if sliding[i] else turn,
            window=window if sliding[i] else 0,
            qk_norm="width",
            bias=bias,
            out_bias=bias,
        )
        return LayerSpec(attention, t.ffn[i], pre_norms=False, post_norms=True)

    return t.model(map(layer, t.layers), topology_tensors=topology_tensors)
