"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) after an optional RMS norm of queries and keys, and the paged KV write.

Pages: keys and values [pages, KV heads, BLOCK, head_dim] bf16, so that one page of one head is one contiguous tile. Queries are turned in
place and rounded: a head's f32 values make room for as many bf16 values, at the start of theirs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from power_lab.kernels.ops import BLOCK, Batch
from power_lab.kernels.triton import chain
from power_lab.kernels.triton.parts import Parts, parts_of, summed

PLAN = "rope: (x * (1 / sqrt(sum / size + eps))) * w; x0 * cos - x1 * sin, x0 * sin + x1 * cos, rounded one by one, then to bf16"
PAIRS = 256  # pairs of one program, about


@triton.jit
def _treat(
    source, size, bias, to, pitch, slot, positions, rope, weight, eps, heads, COLUMN: tl.constexpr, SPLITS: tl.constexpr,
    COUNT: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate some of COUNT heads [COUNT, D] at `source`, or the sums of SPLITS that lie `size` values apart, with the bias
    from COLUMN on; head h goes to `to + h * pitch`, in the page of a slot if any."""
    i = tl.arange(0, HALF_BLOCK)
    first, second = (2 * i, 2 * i + 1) if INTERLEAVED else (i, i + HALF)
    head = heads[:, None]
    here = (head < COUNT) & (i < HALF)[None, :]
    if REST_BLOCK:
        j = 2 * HALF + tl.arange(0, REST_BLOCK)
        there = (head < COUNT) & (j < D)[None, :]
    if weight is not None:
        w = weight + (head * D if WIDE else head * 0)
        weight_a = tl.load(w + first[None, :], mask=here, other=0.0)
        weight_b = tl.load(w + second[None, :], mask=here, other=0.0)
        if REST_BLOCK:
            weight_rest = tl.load(w + j[None, :], mask=there, other=0.0)
    if rope is not None:
        turn = rope + tl.load(positions).to(tl.int64) * (2 * HALF)
        cos = tl.load(turn + 2 * i, mask=i < HALF, other=0.0)[None, :]
        sin = tl.load(turn + 2 * i + 1, mask=i < HALF, other=0.0)[None, :]
    if slot is not None:
        place = tl.load(slot)
        to += (place // PAGE * (COUNT * PAGE) + place % PAGE) * D
    chain.wait(PDL)
    column = COLUMN + head * D
    a = summed(source + head * D + first[None, :], size, bias, column + first[None, :], here, SPLITS)
    b = summed(source + head * D + second[None, :], size, bias, column + second[None, :], here, SPLITS)
    if REST_BLOCK:
        rest = summed(source + head * D + j[None, :], size, bias, column + j[None, :], there, SPLITS)
    if weight is not None:
        squares = tl.sum(a * a + b * b, 1)
        if REST_BLOCK:
            squares += tl.sum(rest * rest, 1)
        if WIDE:
            scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, 0) / (COUNT * D) + eps))
        else:
            scale = tl.div_rn(1.0, tl.sqrt_rn(squares / D + eps))[:, None]
        a = (a * scale) * weight_a
        b = (b * scale) * weight_b
        if REST_BLOCK:
            rest = (rest * scale) * weight_rest
    if rope is not None:
        a, b = a * cos - b * sin, a * sin + b * cos
    if slot is None:
        tl.debug_barrier()  # queries are written over themselves: every thread has read first
    tl.store(to + head * pitch + first[None, :], a, mask=here)
    tl.store(to + head * pitch + second[None, :], b, mask=here)
    if REST_BLOCK:
        tl.store(to + head * pitch + j[None, :], rest, mask=there)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions", "slots"])
def _rope_write(
    qkv, bias, rows, narrow, positions, slots, rope, q_norm, k_norm, keys, values, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, and HEADS query heads or HEADS KV heads of it. narrow: what `qkv` is, or is to be added up to, seen as bf16."""
    chain.begin(PDL)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    PITCH: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) * D
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, size = row * PITCH, rows.to(tl.int64) * PITCH
    if block < Q_BLOCKS:
        heads = block * HEADS + tl.arange(0, HEADS)
        _treat(
            qkv + start, size, bias, narrow + 2 * start, 2 * D, None, positions + row, rope, q_norm, eps, heads, 0, SPLITS,
            Q_HEADS, D, HALF, HALF_BLOCK, REST_BLOCK, PAGE, INTERLEAVED, WIDE, PDL,
        )  # fmt: skip
    else:
        heads = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
        source = qkv + start + Q_HEADS * D
        _treat(
            source, size, bias, keys, PAGE * D, slots + row, positions + row, rope, k_norm, eps, heads, Q_HEADS * D, SPLITS,
            KV_HEADS, D, HALF, HALF_BLOCK, REST_BLOCK, PAGE, INTERLEAVED, WIDE, PDL,
        )  # fmt: skip
        slot = tl.load(slots + row)
        at = (slot // PAGE * (KV_HEADS * PAGE) + slot % PAGE) * D
        d, head = tl.arange(0, D_BLOCK)[None, :], heads[:, None]
        here = (head < KV_HEADS) & (d < D)
        column = (Q_HEADS + KV_HEADS) * D + head * D + d
        value = summed(source + KV_HEADS * D + head * D + d, size, bias, column, here, SPLITS)
        tl.store(values + at + head * (PAGE * D) + d, value, mask=here)


def kv_cache(pages: int, heads: int, head_dim: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values bf16 [pages, heads, BLOCK, head_dim], not initialised. Page 0 is the dummy."""
    keys, values = (
        torch.empty(pages, heads, BLOCK, head_dim, dtype=torch.bfloat16, device=device) for _ in ("keys", "values")
    )
    return keys, values


def rope_write(
    qkv: torch.Tensor | Parts,
    batch: Batch,
    rope: torch.Tensor | None,
    interleaved: bool,
    q_heads: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Normalise and rotate the queries in place, and write keys, treated alike, and values to their slots; all rounded to bf16.

    Queries are then found by `queries`; those of `Parts` in their `out`. Arguments as in `Ops.rope_write`; keys and values as made by
    `kv_cache`.
    """
    (source, splits, bias), qkv = parts_of(qkv), qkv.out if isinstance(qkv, Parts) else qkv
    kv_heads, dim = keys.shape[1], keys.shape[3]
    if qkv.shape[1] == q_heads * dim:
        kv_heads = 0
    half = dim // 2 if rope is None else rope.shape[1]
    half_block, rest = triton.next_power_of_2(half), dim - 2 * half
    wide = norms is not None and norms[0 if q_heads else 1].shape[0] != dim
    most = triton.next_power_of_2(max(q_heads, kv_heads))
    heads = most if wide else max(PAIRS // half_block, 1)
    if norms is None:  # else a norm's sum would be made in another order with keys alone than with queries beside them
        heads = min(most, heads)
    q_norm, k_norm = (None, None) if norms is None else norms
    grid = (qkv.shape[0], triton.cdiv(q_heads, heads) + triton.cdiv(kv_heads, heads))
    _rope_write[grid](
        source, bias, len(qkv), qkv.view(torch.bfloat16), batch.positions, batch.slots, rope, q_norm, k_norm, keys, values, eps,
        q_heads, kv_heads, dim, half, half_block, triton.next_power_of_2(rest) if rest else 0, triton.next_power_of_2(dim),
        heads, BLOCK, interleaved and rope is not None, wide, splits,
        num_warps=8 if wide else 4, enable_fp_fusion=False, **chain.options(qkv.device),
    )  # fmt: skip


def queries(qkv: torch.Tensor, q_heads: int, head_dim: int) -> torch.Tensor:
    """The queries that `rope_write` left in qkv f32 [R, ...], as a bf16 view [R, q_heads, head_dim]."""
    return qkv.view(torch.bfloat16)[:, : 2 * q_heads * head_dim].unflatten(1, (q_heads, 2 * head_dim))[..., :head_dim]
