"""Rows and columns on their way: hidden states into a table, rows out of it, and logits of some tokens among those of all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from power_lab.kernels.triton import chain
from power_lab.kernels.triton.norm import root_scale, warps
from power_lab.kernels.triton.operand import from_operand, to_operand

PLAN = "moves: x, x + delta or x + norm of delta, with norm's bits, rounded to what holds it"
COLUMNS = 1024  # of a row, that one program takes
PROBES = 256  # places of a list that a program looks at together


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def _tap(
    x, delta, post, eps, out, column, slots, count, width, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One row."""
    chain.begin(PDL)
    i = tl.arange(0, BLOCK)
    inside = i < D
    if post is not None:
        after = tl.load(post + i, mask=inside, other=0.0)
    r = tl.program_id(0).to(tl.int64)
    slot = r if slots is None else tl.load(slots + r)
    chain.wait(PDL)
    row = tl.load(x + r * D + i, mask=inside, other=0.0)
    if delta is not None:
        added = tl.load(delta + r * D + i, mask=inside, other=0.0)
        if post is not None:
            added = (added * root_scale(added, eps, D)) * after
        row = row + added
    row = to_operand(row, out.dtype.element_ty)
    tl.store(out + slot * width + column + i, row, mask=inside & (slot >= 0) & (slot < count))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["index"])
def _take(table, count, index, out, width, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Program (row, columns)."""
    chain.begin(PDL)
    chain.wait(PDL)
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = tl.load(index + r)
    known = (wanted >= 0) & (wanted < count)
    value = from_operand(tl.load(table + wanted * width + i, mask=known & (i < width), other=0.0))
    value = to_operand(tl.where(wanted < count, value, float("nan")), out.dtype.element_ty)
    tl.store(out + r * width + i, value, mask=i < width)


@triton.jit
def _before(ids, number, column, PROBES: tl.constexpr):
    """How many of the ascending `ids`, of which there are `number`, are below `column`."""
    first, left = number * 0, number
    while left > 0:
        step = (left + PROBES - 1) // PROBES
        at = tl.arange(0, PROBES) * step
        found = tl.load(ids + first + at, mask=at < left, other=2**31 - 1)
        below = tl.sum((found < column).to(tl.int32))
        passed = tl.maximum(below - 1, 0) * step + tl.minimum(below, 1)
        left = tl.where(below > 0, tl.minimum(step - 1, left - passed), 0)
        first += passed
    return first


@triton.jit(do_not_specialize=["number", "vocabulary"])
def _scatter(values, ids, number, out, vocabulary, COLUMNS: tl.constexpr, PROBES: tl.constexpr, PDL: tl.constexpr):
    """Program (row, columns): fills them, then writes over those that have values."""
    chain.begin(PDL)
    r, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    i = tl.arange(0, COLUMNS)
    n = _before(ids, number, column, PROBES) + i
    end = tl.minimum(column + COLUMNS, vocabulary)
    to = tl.load(ids + n, mask=n < number, other=2**31 - 1)
    chain.wait(PDL)
    value = tl.load(values + r * number + n, mask=to < end, other=0.0)
    out += r * vocabulary
    tl.store(out + column + i, tl.full((COLUMNS,), float("-inf"), tl.float32), mask=column + i < end)
    tl.debug_barrier()
    tl.store(out + to, value, mask=to < end)


def tap(
    x: Tensor, delta: Tensor | None, post: Tensor | None, eps: float, out: Tensor, column: int, slots: Tensor | None
) -> None:
    """out[slots[r] or r, column : column + D] = x[r], x[r] + delta[r], or x[r] + rms_norm(delta[r]) * post; as in `Ops.tap`.

    x, delta f32 [R, D], post f32 [D], out f32 or an operand [any, W], slots int64 [R]; all contiguous.
    """
    (rows, d), (count, width) = x.shape, out.shape
    if not 0 <= column <= width - d:
        raise ValueError(f"{d} columns from {column} on are not in {width}")
    if rows:
        options = {"num_warps": warps(d), "enable_fp_fusion": False, **chain.options(x.device)}
        _tap[(rows,)](
            x, delta, post, eps, out, column, slots, count, width, d, triton.next_power_of_2(d), **options
        )  # fmt: skip


def take(table: Tensor, index: Tensor, out: Tensor) -> None:
    """out[r] = table[index[r]], 0 for negative ones, NaN beyond the table. table, out f32 or operands [.., W], index int64 [R]."""
    (count, width), rows = table.shape, len(index)
    _same(out.shape, (rows, width))
    if rows:
        grid = rows, triton.cdiv(width, COLUMNS)
        _take[grid](table, count, index, out, width, COLUMNS, num_warps=4, **chain.options(out.device))


def scatter_columns(values: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[r, ids[n]] = values[r, n], -inf elsewhere. values f32 [R, N], ids int32 [N], ascending, each once, out f32 [R, V]."""
    rows, vocabulary = out.shape
    _same(values.shape, (rows, len(ids)))
    if rows:
        grid = rows, triton.cdiv(vocabulary, COLUMNS)
        _scatter[grid](
            values, ids, len(ids), out, vocabulary, COLUMNS, PROBES, num_warps=4, **chain.options(out.device)
        )  # fmt: skip


def _same(given: torch.Size, expected: tuple[int, ...]) -> None:
    """Kernels compute addresses: a wrong shape must stop here."""
    if given != expected:
        raise ValueError(f"an array of shape {list(given)} where {list(expected)} is expected")
