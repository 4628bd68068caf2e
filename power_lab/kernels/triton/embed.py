"""Rows of a stored table as activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from power_lab.kernels.triton import chain, unpack
from power_lab.kernels.triton.planes import DeviceWeight, arguments

PLAN = "the f32 value of a stored weight, times the scale"
DEPTH = 256  # values of one program: a whole step of every type


@triton.jit(do_not_specialize=["before"], do_not_specialize_on_alignment=["Ids", "Drawn"])
def _embed(Ids, Drawn, before, table, Out, K, scale, FORM: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr):
    """Program (row, depth). A row whose id is outside of the table becomes NaN."""
    chain.begin(PDL)
    chain.wait(PDL)
    r = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * DEPTH
    N = table[-1]
    row = tl.load(Ids + r)
    if Drawn is not None:
        at = -1 - row
        row = tl.where(row < 0, tl.load(Drawn + at, mask=(at >= 0) & (at < before), other=-1), row)
    known = (row >= 0) & (row < N)
    row = tl.where(known, row, 0).to(tl.int64)
    if FORM is None:
        j = k + tl.arange(0, DEPTH)
        value = tl.load(table[0] + row * K + j, mask=j < K, other=0.0).to(tl.float32)
        tl.store(Out + r * K + j, tl.where(known, value * scale, float("nan")), mask=j < K)
    else:
        j = k + tl.arange(0, DEPTH)
        value = unpack.gathered(table, row, j, N, j < K, FORM)
        tl.store(Out + r * K + j, tl.where(known, value * scale, float("nan")), mask=j < K)


def embed(
    table: DeviceWeight, ids: torch.Tensor, out: torch.Tensor, scale: float = 1.0, drawn: torch.Tensor | None = None
) -> None:
    """out[r] = scale * table[ids[r]], where an id i below 0 stands for drawn[-i - 1].

    ids int32 [R], out f32 or bf16 [R, K], drawn int32 [any], the tokens of the step before. A row whose id is not in the table becomes NaN.
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
