"""One llama-like layer over blocks: rows of a block see a context that is given as keys and values, and each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from power_lab.training.modules.config import DrafterConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in f32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


def frequencies(head_dim: int, theta: float) -> Tensor:
    """f32 [head_dim / 2]: radians per position of each rotated pair."""
    half = head_dim // 2
    return theta ** (-torch.arange(half, dtype=torch.float32) / half)


def rope(heads: Tensor, positions: Tensor, turns: Tensor) -> Tensor:
    """Rotate [..., R, H, d] by positions [..., R] at frequencies `turns` [d / 2]: pairs are (i, i + d / 2), NeoX's order."""
    angle = (positions[..., None] * turns)[..., None, :]
    cos, sin = angle.cos(), angle.sin()
    a, b = heads.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(heads.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """What rows see.

    Attributes:
        context: bool [B, A, S, T], of a text's positions; own: bool [S, K], of their block's rows.
    """

    context: Tensor
    own: Tensor

    @classmethod
    def of(cls, positions: Tensor, anchors: Tensor, length: int, *, causal: bool, window: int) -> Sight:
        """Of whole blocks: rows at `positions` [B, A, S] see what lies before their anchor [B, A], and each other."""
        keys = torch.arange(length, device=positions.device)
        context = (keys < anchors[..., None, None]).expand(*positions.shape, length)
        rows = torch.arange(positions.shape[-1], device=positions.device)
        apart = rows[:, None] - rows
        own = apart >= 0 if causal else torch.ones_like(apart, dtype=torch.bool)
        if window:
            context = context & (positions[..., None] - keys < window)
            own = own & (apart.abs() < window)
        return cls(context, own)


def attention(q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], sight: Sight) -> Tensor:
    """Grouped attention with scale d**-0.5.

    Args:
        q: [B, A, S, H, d].
        context: keys and values [B, T, KV, d]; own: those of a block [B, A, K, KV, d].

    Returns:
        [B, A, S, H * d].
    """
    q = q.unflatten(3, (context[0].shape[2], -1)) * q.shape[-1] ** -0.5
    far = torch.einsum("basngd,btnd->basngt", q, context[0])
    near = torch.einsum("basngd,baknd->basngk", q, own[0])
    far = far.masked_fill(~sight.context[:, :, :, None, None], -torch.inf)
    near = near.masked_fill(~sight.own[:, None, None], -torch.inf)
    weights = torch.softmax(torch.cat([far, near], -1).float(), -1).to(q.dtype)
    split = weights.split([far.shape[-1], near.shape[-1]], -1)
    out = torch.einsum("basngt,btnd->basngd", split[0], context[1])
    return (out + torch.einsum("basngk,baknd->basngd", split[1], own[1])).flatten(3)


class Layer(nn.Module):
    """Attention, then a gated feed-forward (silu), each on its normed input and added to what comes in."""

    turns: Tensor

    def __init__(self, width: int, config: DrafterConfig, eps: float) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.attn_norm, self.ffn_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        if config.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(config.head_dim, eps), RMSNorm(config.head_dim, eps)
        self.q, self.k, self.v = (nn.Linear(width, size, bias=False) for size in (queries, keys, keys))
        self.o = nn.Linear(queries, width, bias=False)
        self.gate, self.up = nn.Linear(width, config.ffn, bias=False), nn.Linear(width, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, width, bias=False)
        self.register_buffer("turns", frequencies(config.head_dim, config.rope_theta), persistent=False)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., R, KV, d] of normed rows [..., R, D] at `positions` [..., R]."""
        k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in (self.k(x), self.v(x)))
        return rope(self.k_norm(k) if self.config.qk_norm else k, positions, self.turns), v

    def queries_keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Queries [..., R, H, d] too, rotated along with the keys."""
        q, k, v = (part.unflatten(-1, (-1, self.config.head_dim)) for part in (self.q(x), self.k(x), self.v(x)))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope(torch.cat([q, k], -2), positions, self.turns).split([q.shape[-2], k.shape[-2]], -2)
        return q, (k, v)

    def attend(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], sight: Sight) -> Tensor:
        """The attention part's contribution: normed x [B, A, S, D] at `positions` [B, A, S] over context and block."""
        queries, own = self.queries_keys_values(x, positions)
        return self.o(attention(queries, context, own, sight))

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward part's contribution of normed x."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], sight: Sight) -> Tensor:
        x = x + self.attend(self.attn_norm(x), positions, context, sight)
        return x + self.feed(self.ffn_norm(x))
