"""The Triton kernels behind `rows`: one program a row, which reads its logits twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8


def probabilities(logits: Tensor, ids: Tensor, softcap: float) -> Tensor:
    """As `rows.probabilities`."""
    out = logits.new_empty(len(logits), len(ids))
    if len(logits):
        vocab, count = logits.shape[1], len(ids)
        _probabilities[(len(logits),)](
            logits, ids, out, softcap, vocab, count, CAPPED=softcap > 0, BLOCK=block(vocab), num_warps=_WARPS
        )
    return out


def imitate(
    logits: Tensor, table: Tensor, index: Tensor, tokens: Tensor, weight: Tensor, hard: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """As `rows.imitate`."""
    loss, agreed = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
    if len(logits):
        count = logits.shape[1]
        _imitate[(len(logits),)](
            logits,
            table,
            index,
            tokens,
            weight,
            loss,
            agreed,
            hard,
            softcap,
            count,
            CAPPED=softcap > 0,
            BLOCK=block(count),
            num_warps=_WARPS,
        )
    return loss, agreed


def block(columns: int) -> int:
    """Columns that a program holds at once."""
    return min(_BLOCK, triton.next_power_of_2(columns))


@triton.jit
def _capped(v, softcap, CAPPED: tl.constexpr):
    if CAPPED:
        v = softcap * (2 * tl.sigmoid(2 * v / softcap) - 1)
    return v


@triton.jit
def _probabilities(logits, ids, out, softcap, vocab, n, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    z = logits + row * vocab
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        v = _capped(tl.load(z + at, at < vocab, other=0.0).to(tl.float32), softcap, CAPPED)
        v = tl.where(at < vocab, v, -1e30)
        higher = tl.maximum(top, v)
        total = total * tl.exp(top - higher) + tl.exp(v - higher)
        top = higher
    most = tl.max(top, 0)
    norm = most + tl.log(tl.sum(total * tl.exp(top - most), 0))
    for start in range(0, n, BLOCK):
        at = start + lanes
        token = tl.load(ids + at, at < n, other=0)
        v = _capped(tl.load(z + token).to(tl.float32), softcap, CAPPED)
        tl.store(out + row * n + at, tl.exp(v - norm).to(out.dtype.element_ty), at < n)


@triton.jit
def _imitate(
    logits, table, index, tokens, weight, loss, agreed, hard, softcap, n, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    z = logits + row * n
    truth = table + tl.load(index + row).to(tl.int64) * n
    token = tl.load(tokens + row)
    w = tl.load(weight + row)
    lanes = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total, mass, dot = (
        tl.zeros((BLOCK,), tl.float32),
        tl.zeros((BLOCK,), tl.float32),
        tl.zeros((BLOCK,), tl.float32),
    )
    for start in range(0, n, BLOCK):
        at = start + lanes
        v = _capped(tl.load(z + at, at < n, other=0.0).to(tl.float32), softcap, CAPPED)
        p = tl.load(truth + at, at < n, other=0.0).to(tl.float32)
        v = tl.where(at < n, v, -1e30)
        higher = tl.maximum(top, v)
        total = total * tl.exp(top - higher) + tl.exp(v - higher)
        top = higher
        mass += p
        dot += p * v
    most = tl.max(top, 0)
    norm = most + tl.log(tl.sum(total * tl.exp(top - most), 0))
    masses = tl.sum(mass, 0)
    inside = tl.where(token >= 0, 1.0, 0.0)
    said = _capped(tl.load(z + tl.maximum(token, 0)).to(tl.float32), softcap, CAPPED)
    soft = norm * masses - tl.sum(dot, 0)
    tl.store(loss + row, w * ((1 - hard) * soft + hard * inside * (norm - said)))
    tl.debug_barrier()  # the token's own logit is read before it is overwritten
    factor = (1 - hard) * masses + hard * inside
    both = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lanes
        v = _capped(tl.load(z + at, at < n, other=0.0).to(tl.float32), softcap, CAPPED)
        p = tl.load(truth + at, at < n, other=0.0).to(tl.float32)
        q = tl.where(at < n, tl.exp(v - norm), 0.0)
        both += tl.minimum(q, p)
        gradient = q * factor - (1 - hard) * p - tl.where(at == token, hard, 0.0)
        if CAPPED:
            gradient *= 1 - (v / softcap) * (v / softcap)
        tl.store(z + at, (gradient * w).to(logits.dtype.element_ty), at < n)
    tl.store(agreed + row, tl.minimum(tl.sum(both, 0), 1.0))
