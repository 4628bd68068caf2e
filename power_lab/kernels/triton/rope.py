"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) after an optional RMS norm of queries and keys, and the paged KV write.

Pages: keys and values [pages, KV heads, BLOCK, head_dim] bf16, so that one page of one head is one contiguous tile. Queries are turned in
place and stay f32. A thread owns both values of a pair, so that nothing is read after another thread wrote it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from power_lab.kernels.ops import BLOCK, Batch

PLAN = "rope: (x * (1 / sqrt(sum / size + eps))) * w; x0 * cos - x1 * sin, x0 * sin + x1 * cos, rounded operation by operation"
PAIRS = 256  # pairs of one program, about


@triton.jit
def _treat(
    source,
    to,
    pitch,
    weight,
    turn,
    eps,
    heads,
    COUNT: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Normalise and rotate some of COUNT heads [COUNT, D] at `source`; head h goes to `to + h * pitch`."""
    i = tl.arange(0, HALF_BLOCK)
    first, second = (2 * i, 2 * i + 1) if INTERLEAVED else (i, i + HALF)
    head = heads[:, None]
    here = (head < COUNT) & (i < HALF)[None, :]
    a = tl.load(source + head * D + first[None, :], mask=here, other=0.0)
    b = tl.load(source + head * D + second[None, :], mask=here, other=0.0)
    if REST_BLOCK:
        j = 2 * HALF + tl.arange(0, REST_BLOCK)
        there = (head < COUNT) & (j < D)[None, :]
        rest = tl.load(source + head * D + j[None, :], mask=there, other=0.0)
    if weight is not None:
        squares = tl.sum(a * a + b * b, 1)
        if REST_BLOCK:
            squares += tl.sum(rest * rest, 1)
        if WIDE:
            mean = tl.sum(squares, 0) / (COUNT * D)
            scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
            w = weight + head * D
        else:
            scale = tl.div_rn(1.0, tl.sqrt_rn(squares / D + eps))[:, None]
            w = weight + head * 0
        a = (a * scale) * tl.load(w + first[None, :], mask=here, other=0.0)
        b = (b * scale) * tl.load(w + second[None, :], mask=here, other=0.0)
        if REST_BLOCK:
            rest = (rest * scale) * tl.load(w + j[None, :], mask=there, other=0.0)
    if turn is not None:
        cos = tl.load(turn + 2 * i, mask=i < HALF, other=0.0)[None, :]
        sin = tl.load(turn + 2 * i + 1, mask=i < HALF, other=0.0)[None, :]
        a, b = a * cos - b * sin, a * sin + b * cos
    tl.store(to + head * pitch + first[None, :], a, mask=here)
    tl.store(to + head * pitch + second[None, :], b, mask=here)
    if REST_BLOCK:
        tl.store(to + head * pitch + j[None, :], rest, mask=there)


@triton.jit
def _rope_write(
    qkv,
    positions,
    slots,
    rope,
    q_norm,
    k_norm,
    keys,
    values,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    D_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One row, and HEADS query heads or HEADS KV heads of it."""
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    queries = qkv + row * ((Q_HEADS + 2 * KV_HEADS) * D)
    turn = rope
    if rope is not None:
        turn = rope + tl.load(positions + row).to(tl.int64) * (2 * HALF)
    if block < Q_BLOCKS:
        heads = block * HEADS + tl.arange(0, HEADS)
        _treat(
            queries, queries, D, q_norm, turn, eps, heads, Q_HEADS, D, HALF, HALF_BLOCK, REST_BLOCK, INTERLEAVED, WIDE
        )
    else:
        heads = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
        slot = tl.load(slots + row)
        at = (slot // PAGE * (KV_HEADS * PAGE) + slot % PAGE) * D
        source = queries + Q_HEADS * D
        _treat(
            source,
            keys + at,
            PAGE * D,
            k_norm,
            turn,
            eps,
            heads,
            KV_HEADS,
            D,
            HALF,
            HALF_BLOCK,
            REST_BLOCK,
            INTERLEAVED,
            WIDE,
        )
        d = tl.arange(0, D_BLOCK)[None, :]
        head = heads[:, None]
        here = (head < KV_HEADS) & (d < D)
        value = tl.load(source + KV_HEADS * D + head * D + d, mask=here, other=0.0)
        tl.store(values + at + head * (PAGE * D) + d, value, mask=here)


def kv_cache(pages: int, heads: int, head_dim: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values bf16 [pages, heads, BLOCK, head_dim], not initialised. Page 0 is the dummy."""
    keys, values = (
        torch.empty(pages, heads, BLOCK, head_dim, dtype=torch.bfloat16, device=device) for _ in ("keys", "values")
    )
    return keys, values


def rope_write(
    qkv: torch.Tensor,
    batch: Batch,
    rope: torch.Tensor | None,
    interleaved: bool,
    q_heads: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Normalise and rotate the queries in place, and write keys, treated alike, and values to their slots, rounded to bf16.

    Arguments as in `Ops.rope_write`; keys and values as made by `kv_cache`.
    """
    kv_heads, dim = keys.shape[1], keys.shape[3]
    half = dim // 2 if rope is None else rope.shape[1]
    half_block, rest = triton.next_power_of_2(half), dim - 2 * half
    wide = norms is not None and norms[0].shape[0] != dim
    most = triton.next_power_of_2(max(q_heads, kv_heads))
    heads = most if wide else min(most, max(PAIRS // half_block, 1))
    q_norm, k_norm = (None, None) if norms is None else norms
    grid = (qkv.shape[0], triton.cdiv(q_heads, heads) + triton.cdiv(kv_heads, heads))
    _rope_write[grid](
        qkv,
        batch.positions,
        batch.slots,
        rope,
        q_norm,
        k_norm,
        keys,
        values,
        eps,
        q_heads,
        kv_heads,
        dim,
        half,
        half_block,
        triton.next_power_of_2(rest) if rest else 0,
        triton.next_power_of_2(dim),
        heads,
        BLOCK,
        interleaved and rope is not None,
        wide,
        num_warps=8 if wide else 4,
        enable_fp_fusion=False,
    )
