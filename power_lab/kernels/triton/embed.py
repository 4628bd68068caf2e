"""Rows of a stored table as activations, alone or beside a state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from power_lab.kernels.triton import chain, unpack
from power_lab.kernels.triton.norm import root_scale, warps
from power_lab.kernels.triton.operand import from_operand, to_operand
from power_lab.kernels.triton.planes import DeviceWeight, arguments

PLAN = "the f32 value of a stored weight, times the scale"
DEPTH = 256  # values of one program: a whole step of every type


@triton.jit
def _values(id, Drawn, before, table, j, N, K, scale, FORM: tl.constexpr):
    """Columns j of the row that an id means: NaN where it is outside of the table, 0 beyond K."""
    if Drawn is not None:
        at = -1 - id
        id = tl.where(id < 0, tl.load(Drawn + at, mask=(at >= 0) & (at < before), other=-1), id)
    known = (id >= 0) & (id < N)
    row = tl.where(known, id, 0).to(tl.int64)
    if FORM is None:
        value = tl.load(table[0] + row * K + j, mask=j < K, other=0.0).to(tl.float32)
    else:
        value = unpack.gathered(table, row, j, N, j < K, FORM)
    return tl.where(known, value * scale, float("nan"))


@triton.jit(do_not_specialize=["before"], do_not_specialize_on_alignment=["Ids", "Drawn"])
def _embed(Ids, Drawn, before, table, Out, K, scale, FORM: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr):
    """Program (row, depth). A row whose id is outside of the table becomes NaN."""
    chain.begin(PDL)
    chain.wait(PDL)
    r = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * DEPTH
    N = table[-1]
    j = k + tl.arange(0, DEPTH)
    value = _values(tl.load(Ids + r), Drawn, before, table, j, N, K, scale, FORM)
    tl.store(Out + r * K + j, to_operand(value, Out.dtype.element_ty), mask=j < K)


def embed(
    table: DeviceWeight, ids: torch.Tensor, out: torch.Tensor, scale: float = 1.0, drawn: torch.Tensor | None = None
) -> None:
    """out[r] = scale * table[ids[r]], where an id i below 0 stands for drawn[-i - 1].

    ids int32 [R], out f32 or an operand [R, K], drawn int32 [any], the tokens of the step before. A row whose id is not in the table
    becomes NaN.
    """
    if out.shape != (len(ids), table.cols):
        raise ValueError(f"shape of the result is {list(out.shape)}, expected {[len(ids), table.cols]}")
    if len(ids) == 0:
        return
    grid = (len(ids), triton.cdiv(table.cols, DEPTH))
    _embed[grid](
        ids, drawn, 0 if drawn is None else len(drawn), arguments(table), out, table.cols, float(scale),
        FORM=table.form, DEPTH=DEPTH, num_warps=1, enable_fp_fusion=False, **chain.options(out.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["before", "count"], do_not_specialize_on_alignment=["Ids", "Drawn", "Index"])
def _merge(
    Ids, Drawn, before, table, scale, First, States, count, Index, Second, eps, Out,
    D: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, half)."""
    chain.begin(PDL)
    r, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.arange(0, BLOCK)
    inside = j < D
    factor = tl.load(tl.where(half == 0, First, Second) + j, mask=inside, other=0.0)
    N = table[-1]
    chain.wait(PDL)
    if half == 0:
        value = _values(tl.load(Ids + r), Drawn, before, table, j, N, D, scale, FORM)
    else:
        place = r if Index is None else tl.load(Index + r)
        known = (place >= 0) & (place < count)
        value = from_operand(tl.load(States + place * D + j, mask=inside & known, other=0.0))
        value = tl.where(place < count, value, float("nan"))
    value = tl.where(inside, value, 0.0)
    value = to_operand((value * root_scale(value, eps, D)) * factor, Out.dtype.element_ty)
    tl.store(Out + (2 * r + half) * D + j, value, mask=inside)


def merge(
    table: DeviceWeight,
    ids: torch.Tensor,
    scale: float,
    drawn: torch.Tensor | None,
    first: torch.Tensor,
    states: torch.Tensor,
    index: torch.Tensor | None,
    second: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """out[r] = norm of scale * table[ids[r]] by `first` beside norm of states[index[r]] by `second`, as in `Ops.merge`.

    first, second f32 [D]; states and out f32 or operands [any, D] and [R, 2 D], index int64 [R]; all contiguous.
    """
    rows, d = len(ids), table.cols
    places = len(states) if index is None else len(index)
    if out.shape != (rows, 2 * d) or states.shape[1] != d or (places < rows if index is None else places != rows):
        raise ValueError(
            f"{rows} rows of {d}, states {list(states.shape)} in {places} places, result {list(out.shape)}"
        )
    if rows:
        options = {"num_warps": warps(d), "enable_fp_fusion": False, **chain.options(out.device)}
        _merge[(rows, 2)](
            ids, drawn, 0 if drawn is None else len(drawn), arguments(table), float(scale), first, states, len(states),
            index, second, eps, out, D=d, BLOCK=triton.next_power_of_2(d), FORM=table.form, **options,
        )  # fmt: skip
