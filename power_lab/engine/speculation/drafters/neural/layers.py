"""Llama-like layers of drafters: their sizes as the artifact states them, their specs, their weights."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from power_lab.engine.models.rope import plain
from power_lab.engine.models.spec import AttentionSpec, LayerSpec, LayerWeights
from power_lab.engine.speculation.drafters.neural.artifact import Artifact, Binder, refused

Size = Annotated[int, Meta(ge=1, le=1 << 16)]
Count = Annotated[int, Meta(ge=1, le=64)]
Theta = Annotated[float, Meta(ge=2.0, le=1e12)]


class LayersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a drafter's layers.

    Attributes:
        layers: how many; heads, kv_heads, head_dim, ffn: of each.
        rope_theta: of rotary positions over whole heads, in halves.
        qk_norm: whether queries and keys are normalised, each head by itself.
        taps: layers of the target whose input is read, ascending; the target's number of layers is what leaves its last one.
    """

    layers: Count
    heads: Size
    kv_heads: Size
    head_dim: Annotated[int, Meta(ge=2, le=512, multiple_of=2)]
    ffn: Size
    rope_theta: Theta = 10000.0
    qk_norm: bool = False
    taps: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 12)], ...], Meta(min_length=1, max_length=32)]


def check(artifact: Artifact, config: LayersConfig) -> None:
    """Raises ConfigError for key `draft` where values do not fit each other or the target."""
    layers = artifact.header.target.layers
    if config.heads % config.kv_heads:
        raise refused(artifact.path, f"'config': {config.heads} heads are no multiple of {config.kv_heads} kv_heads")
    if list(config.taps) != sorted(set(config.taps)) or config.taps[-1] > layers:
        raise refused(artifact.path, f"'config': taps {list(config.taps)} are not ascending layers up to {layers}")


def specs(config: LayersConfig, window: int = 0) -> tuple[LayerSpec, ...]:
    attention = AttentionSpec(
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.head_dim**-0.5,
        plain(config.head_dim, config.rope_theta),
        window,
        qk_norm="head" if config.qk_norm else "",
    )
    return (LayerSpec(attention, config.ffn),) * config.layers


def bind(binder: Binder, layers: tuple[LayerSpec, ...], width: int) -> tuple[LayerWeights, ...]:
    """Their weights, by the artifact's names."""
    return tuple(_layer(binder, f"layers.{i}", layer, width) for i, layer in enumerate(layers))


def _layer(binder: Binder, prefix: str, layer: LayerSpec, width: int) -> LayerWeights:
    a = layer.attention

    def matrix(name: str, rows: int, cols: int = width):  # noqa: ANN202
        return binder.matrix(f"{prefix}.{name}.weight", rows, cols)

    def norm(name: str, size: int = width):  # noqa: ANN202
        return binder.vector(f"{prefix}.{name}.weight", size)

    return LayerWeights(
        attn_norm=norm("attn_norm"),
        qkv=(matrix("q", a.q_width), matrix("k", a.kv_width), matrix("v", a.kv_width)),
        qkv_bias=None,
        qk_norms=(norm("q_norm", a.head_dim), norm("k_norm", a.head_dim)) if a.qk_norm else None,
        out=matrix("o", width, a.q_width),
        out_bias=None,
        post_attn_norm=None,
        ffn_norm=norm("ffn_norm"),
        gate=matrix("gate", layer.ffn),
        up=matrix("up", layer.ffn),
        down=matrix("down", width, layer.ffn),
        post_ffn_norm=None,
    )
