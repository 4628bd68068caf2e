"""The target in plain torch, over whole texts at once: its hidden states and what it thinks comes next. Not exact, only fast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from power_lab.engine.models.bind import bind
from power_lab.engine.models.describe import describe
from power_lab.engine.models.rope import Rope
from power_lab.engine.models.spec import AttentionSpec, LayerSpec, LayerWeights, ModelSpec
from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.engine.weights.source import WeightSource
from power_lab.kernels.dequantise import dequantise
from power_lab.kernels.ops import Ops
from power_lab.kernels.quants import QuantType
from power_lab.training.modules.shared import Shared

_POSITIONS = 1024
"""Of the first table of angles."""


@dataclass(frozen=True, slots=True)
class _Dense:
    """As much of an operation table as binding needs: weights become dense tensors."""

    device: torch.device
    dtype: torch.dtype

    def operand(self, types: Iterable[QuantType]) -> str:
        return ""  # whatever the dtype of dense tensors is

    def weight(self, kind: QuantType, rows: int, cols: int, host: np.ndarray, operand: str) -> Tensor:
        return torch.from_numpy(dequantise(host, kind, cols)).to(self.device, self.dtype)

    def vector(self, kind: QuantType, host: np.ndarray) -> Tensor:
        values = dequantise(host.reshape(1, -1), kind, host.size)
        return torch.from_numpy(values.reshape(-1)).to(self.device)

    def asarray(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def tohost(self, values: Tensor) -> np.ndarray:
        return values.cpu().numpy()


class Target:
    """A decoder-only transformer over padded texts.

    Args:
        spec, source: what `describe` gives.
        device: where it runs; dtype: of weights and activations, bf16 by default on a GPU; the residual stream is f32.
    """

    def __init__(
        self, spec: ModelSpec, source: WeightSource, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        self.spec, self.device = spec, torch.device(device)
        self.dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
        weights = bind(spec, source, cast(Ops, _Dense(self.device, self.dtype)))
        self._embedding, self._head = cast(Tensor, weights.embedding), cast(Tensor, weights.head)
        self._layers = list(zip(spec.layers, weights.layers, strict=True))
        self._final_norm = cast(Tensor, weights.final_norm)
        self._turns: dict[Rope, tuple[Tensor, Tensor]] = {}

    @classmethod
    def open(cls, path: Path, device: str = "cpu", dtype: torch.dtype | None = None) -> Self:
        """From a .gguf file or a SafeTensors folder. Raises ModelFileError."""
        with open_checkpoint(path) as checkpoint:
            described = describe(checkpoint)
            return cls(described.spec, described.source, device, dtype)

    def layer(self, index: int) -> dict[str, Tensor]:
        """One layer's matrices and norms in f32, named as a drafter's layer names its own."""
        w = self._layers[index][1]
        q, k, v = w.qkv
        of = {"q": q, "k": k, "v": v, "o": w.out, "gate": w.gate, "up": w.up, "down": w.down}
        of |= {"attn_norm": w.attn_norm, "ffn_norm": w.ffn_norm}
        return {name: cast(Tensor, weight).float() for name, weight in of.items()}

    def shared(self) -> Shared:
        """What drafters borrow, with the whole vocabulary."""
        return Shared(
            self._embedding.float() * self.spec.embedding_scale,
            self._head,
            torch.arange(self.spec.vocab, device=self.device),
            self.spec.norm_eps,
            self.spec.final_softcap,
            self._final_norm,
        )

    @torch.no_grad()
    def hidden(self, tokens: Tensor, taps: Iterable[int]) -> dict[int, Tensor]:
        """The residual stream [B, T, D] that enters each layer of `taps`; the number of layers is what leaves the last one.

        tokens: int64 [B, T]. A text's end is padded with anything: no row sees what comes after it.
        """
        wanted, kept = frozenset(taps), {}
        positions = tokens.shape[1]
        x = functional.embedding(tokens, self._embedding).float() * self.spec.embedding_scale
        for index, (layer, weights) in enumerate(self._layers):
            if index in wanted:
                kept[index] = x.to(self.dtype)
            x = x + self._attend(layer.attention, weights, x, positions)
            x = x + self._feed(layer, weights, x)
        if len(self._layers) in wanted:
            kept[len(self._layers)] = x.to(self.dtype)
        return kept

    @torch.no_grad()
    def normed(self, last: Tensor) -> Tensor:
        """What the head reads, of what leaves the last layer."""
        return self._norm(last, self._final_norm)

    def _angles(self, turn: Rope, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines f32 [positions, pairs], made once for the longest text so far."""
        if turn not in self._turns or len(self._turns[turn][0]) < positions:
            frequencies = torch.tensor(turn.frequencies, dtype=torch.float64)
            angle = torch.outer(torch.arange(max(positions, _POSITIONS), dtype=torch.float64), frequencies)
            cos, sin = ((turn.magnitude * part).float().to(self.device) for part in (angle.cos(), angle.sin()))
            self._turns[turn] = cos, sin
        cos, sin = self._turns[turn]
        return cos[:positions], sin[:positions]

    def _norm(self, x: Tensor, weight: Any) -> Tensor:
        if weight is None:
            return x.to(self.dtype)
        return functional.rms_norm(x.float(), weight.shape, weight, self.spec.norm_eps).to(self.dtype)

    def _attend(self, a: AttentionSpec, w: LayerWeights, x: Tensor, positions: int) -> Tensor:
        h = self._norm(x, w.attn_norm)
        parts: list[Tensor] = [functional.linear(h, cast(Tensor, weight)) for weight in w.qkv]
        if w.qkv_bias is not None:
            biases = cast(Tensor, w.qkv_bias).to(self.dtype).split([part.shape[-1] for part in parts])
            parts = [part + bias for part, bias in zip(parts, biases, strict=True)]
        norms = (None, None) if w.qk_norms is None else w.qk_norms
        if a.qk_norm == "width":
            parts[:2] = [self._norm(part, norm) for part, norm in zip(parts, norms, strict=False)]
        q, k, v = (part.unflatten(-1, (-1, a.head_dim)).transpose(1, 2) for part in parts)
        if a.qk_norm == "head":
            q, k = self._norm(q, norms[0]), self._norm(k, norms[1])
        if a.rope is not None:
            turn = a.rope.within(self.spec.context)
            both = _rotated(torch.cat([q, k], 1), turn, *self._angles(turn, positions))
            q, k = both.split([q.shape[1], k.shape[1]], 1)
        if a.temperature is not None:
            beta, step = a.temperature
            q = q * (1 + beta * torch.log1p(torch.arange(positions, device=q.device) // step))[:, None].to(q.dtype)
        out = _attention(a, q, k, v).transpose(1, 2).flatten(2)
        out = functional.linear(out, cast(Tensor, w.out))
        out = out if w.out_bias is None else out + cast(Tensor, w.out_bias)
        return (out if w.post_attn_norm is None else self._norm(out, w.post_attn_norm)).float()

    def _feed(self, layer: LayerSpec, w: LayerWeights, x: Tensor) -> Tensor:
        h = self._norm(x, w.ffn_norm)
        gate, up = functional.linear(h, cast(Tensor, w.gate)), functional.linear(h, cast(Tensor, w.up))
        gate = functional.silu(gate) if layer.activation == "silu" else functional.gelu(gate, approximate="tanh")
        out = functional.linear(gate * up, cast(Tensor, w.down))
        return (out if w.post_ffn_norm is None else self._norm(out, w.post_ffn_norm)).float()


def _rotated(heads: Tensor, turn: Rope, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, H, T, d] rotated by its positions 0..T-1, as `Target._angles` gives them."""
    half = len(turn.frequencies)
    first, second = slice(0, half), slice(half, 2 * half)
    if turn.interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    out = heads.float().clone()
    a, b = heads[..., first].float(), heads[..., second].float()
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out.to(heads.dtype)


def _attention(a: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal: q [B, H, T, d], keys and values [B, KV, T, d]."""
    k, v = (part.repeat_interleave(a.heads // a.kv_heads, 1) for part in (k, v))
    length = q.shape[2]
    if not a.softcap and not (a.window and a.window < length):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=a.scale)
    rows = torch.arange(length, device=q.device)
    apart = rows[:, None] - rows
    seen = (apart >= 0) & (apart < (a.window or length))
    if not a.softcap:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=a.scale)
    scores = a.softcap * torch.tanh(a.scale / a.softcap * (q @ k.transpose(-1, -2)).float())
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).to(v.dtype) @ v
