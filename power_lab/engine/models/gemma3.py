"""Gemma 3 (text): Gemma 2 with query and key norms instead of soft-caps, five layers with a window to one without.

Layers with a window turn by a base of their own, and without the scaling that the others may have.
"""

from __future__ import annotations

from power_lab.engine.models import rope, topology
from power_lab.engine.models.metadata import Metadata
from power_lab.engine.models.names import sandwich as names  # noqa: F401
from power_lab.engine.models.spec import LayerSpec, ModelSpec
from power_lab.engine.weights.source import WeightSource

ARCHITECTURES = ("gemma3",)
MODEL_TYPES = ("gemma3_text",)

PATTERN = 6  # most files do not state it: every sixth layer sees everything
LOCAL_THETA, GLOBAL_THETA = 10000.0, 1000000.0
WIDE_LAYERS = 62  # the 27B model scales scores by width / heads instead of the head size; its files do not say so

DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}
"""What the published folders of 4B and more leave out under `text_config` (source: transformers' Gemma3TextConfig)."""


def from_gguf(meta: Metadata, source: WeightSource, vocab: int) -> ModelSpec:
    t = topology.from_gguf(meta, "gemma3", vocab)
    turn, tensors = rope.from_gguf(meta, source, "gemma3", t.rotary_dim, theta=GLOBAL_THETA, context=t.context)
    local = rope.plain(t.rotary_dim, meta.get("gemma3.rope.freq_base_swa", float, LOCAL_THETA, 1.0, 1e12))
    window = meta.require("gemma3.attention.sliding_window", int, 1, topology.MAX_CONTEXT)
    scalar = t.width // t.heads[0] if len(t.layers) == WIDE_LAYERS else t.head_dim
    logits = meta.get("gemma3.final_logit_softcapping", float, 0.0, 0.0, 1e6)
    sliding = topology.sliding_period(meta, "gemma3", len(t.layers), PATTERN)
    return _model(t, turn, local, sliding, window, scalar, 0.0, logits, topology_tensors=tensors)


def from_config(config: Metadata, vocab: int) -> ModelSpec:
    """Norm weights are stored less 1."""
    t = topology.from_config(config, vocab, tied=True, activation="hidden_activation", defaults=DEFAULTS)
    turn = rope.from_config(config, t.rotary_dim, "full_attention", GLOBAL_THETA, t.context)
    at = "rope_parameters.sliding_attention"
    topology.expect(config, f"{at}.rope_type", "default")
    theta = config.get("rope_local_base_freq", float, LOCAL_THETA, 1.0, 1e12)
    local = rope.plain(t.rotary_dim, config.get(f"{at}.rope_theta", float, theta, 1.0, 1e12))
    pattern = config.get("sliding_window_pattern", int, PATTERN, 1, topology.MAX_LAYERS)
    sliding = topology.sliding_layers(config, len(t.layers), [(i + 1) % pattern != 0 for i in t.layers])
    window = topology.window(config, 4096)
    scalar = config.get("query_pre_attn_scalar", float, 256.0, 1.0, 1e6)
    scores = config.get("attn_logit_softcapping", float, 0.0, 0.0, 1e6)
    logits = config.get("final_logit_softcapping", float, 0.0, 0.0, 1e6)
    return _model(t, turn, local, sliding, window, scalar, scores, logits, norm_offset=1.0)


def _model(
    t: topology.Topology,
    turn: rope.Rope,
    local: rope.Rope,
    sliding: list[bool],
    window: int,
    scalar: float,
    scores: float,
    logits: float,
    norm_offset: float = 0.0,
    topology_tensors: tuple[str, ...] = (),
) -> ModelSpec:
    def layer(i: int) -> LayerSpec:
        attention = t.attention(
            i,
            local if sliding[i] else turn,
            scale=scalar**-0.5,
            window=window if sliding[i] else 0,
            softcap=scores,
            qk_norm="head",
        )
        return LayerSpec(attention, t.ffn[i], activation="gelu_tanh", post_norms=True)

    return t.model(
        map(layer, t.layers),
        embedding_scale=t.width**0.5,
        final_softcap=logits,
        norm_offset=norm_offset,
        topology_tensors=topology_tensors,
    )
