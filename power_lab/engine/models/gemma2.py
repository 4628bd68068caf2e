"""Gemma 2: norms before and after each part, GELU gates, soft-capped scores and logits, every other layer with a window."""

from __future__ import annotations

from power_lab.engine.models import rope, topology
from power_lab.engine.models.metadata import Metadata
from power_lab.engine.models.names import sandwich as names  # noqa: F401
from power_lab.engine.models.spec import LayerSpec, ModelSpec
from power_lab.engine.weights.source import WeightSource

ARCHITECTURES = ("gemma2",)
MODEL_TYPES = ("gemma2",)

WIDE_LAYERS = 46  # the 27B model scales scores by width / heads instead of the head size; its files do not say so


def from_gguf(meta: Metadata, source: WeightSource, vocab: int) -> ModelSpec:
    t = topology.from_gguf(meta, "gemma2", vocab)
    turn, tensors = rope.from_gguf(meta, source, "gemma2", t.rotary_dim, context=t.context)
    window = meta.get("gemma2.attention.sliding_window", int, 4096, 1, topology.MAX_CONTEXT)
    scores = meta.get("gemma2.attn_logit_softcapping", float, 50.0, 0.0, 1e6)
    logits = meta.get("gemma2.final_logit_softcapping", float, 30.0, 0.0, 1e6)
    scalar = t.width // t.heads[0] if len(t.layers) == WIDE_LAYERS else t.head_dim
    windows = [window if slides else 0 for slides in topology.sliding_period(meta, "gemma2", len(t.layers), 2)]
    return _model(t, turn, windows, scalar, scores, logits, topology_tensors=tensors)


def from_config(config: Metadata, vocab: int) -> ModelSpec:
    """Norm weights are stored less 1."""
    t = topology.from_config(config, vocab, tied=True, activation="hidden_activation")
    turn = rope.from_config(config, t.rotary_dim, context=t.context)
    sliding = topology.sliding_layers(config, len(t.layers), [i % 2 == 0 for i in t.layers])
    windows = [topology.window(config, 4096) if slides else 0 for slides in sliding]
    scalar = config.get("query_pre_attn_scalar", float, 256.0, 1.0, 1e6)
    scores = config.require("attn_logit_softcapping", float, 0.0, 1e6)
    logits = config.require("final_logit_softcapping", float, 0.0, 1e6)
    return _model(t, turn, windows, scalar, scores, logits, norm_offset=1.0)


def _model(
    t: topology.Topology,
    turn: rope.Rope,
    windows: list[int],
    scalar: float,
    scores: float,
    logits: float,
    norm_offset: float = 0.0,
    topology_tensors: tuple[str, ...] = (),
) -> ModelSpec:
    layers = (
        LayerSpec(
            t.attention(i, turn, scale=scalar**-0.5, window=windows[i], softcap=scores),
            t.ffn[i],
            activation="gelu_tanh",
            post_norms=True,
        )
        for i in t.layers
    )
    return t.model(
        layers,
        embedding_scale=t.width**0.5,
        final_softcap=logits,
        norm_offset=norm_offset,
        topology_tensors=topology_tensors,
    )
