"""DFlash2's grouped dynamic depthwise convolution: a row's channels, and those of the rows before it in its block, weighed and summed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from power_lab.kernels.triton import chain
from power_lab.kernels.triton.operand import from_operand, to_operand

PLAN = "conv: sum of (base + coef) * x over taps in order, rounded operation by operation"
COLUMNS = 256  # of a row, that one program takes


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["previous"])
def _conv(
    x, coef, base, previous, out, rows,
    D: tl.constexpr, SIDE: tl.constexpr, TAPS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, columns)."""
    chain.begin(PDL)
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = i < D
    base += SIDE * TAPS * D
    coef += (r * 2 + SIDE) * (TAPS * GROUPS) + i // (D // GROUPS)
    first = tl.load(base + i, mask=inside, other=0.0)
    chain.wait(PDL)
    factor = first + tl.load(coef, mask=inside, other=0.0)
    total = factor * from_operand(tl.load(x + r * D + i, mask=inside, other=0.0))
    source, known = r, r >= 0
    for t in tl.static_range(1, TAPS):
        source = tl.load(previous + source, mask=known, other=-1).to(tl.int64)
        known = known & (source >= 0) & (source < rows)
        factor = tl.load(base + t * D + i, mask=inside, other=0.0) + tl.load(coef + t * GROUPS, mask=inside, other=0.0)
        term = factor * from_operand(tl.load(x + source * D + i, mask=inside & known, other=0.0))
        total = tl.where(known, total + term, total)
    tl.store(out + r * D + i, to_operand(total, out.dtype.element_ty), mask=inside)


def dynamic_conv(x: Tensor, coef: Tensor, base: Tensor, side: int, previous: Tensor, out: Tensor) -> None:
    """Arguments as in `Ops.dynamic_conv`, all contiguous."""
    (rows, d), taps = x.shape, base.shape[1]
    groups = coef.shape[1] // (2 * taps)
    shapes = base.shape, coef.shape, previous.shape, out.shape
    if shapes != ((2, taps, d), (rows, 2 * taps * groups), (rows,), (rows, d)) or not groups or d % groups:
        raise ValueError(f"shapes of a convolution of {list(x.shape)}: {list(map(list, shapes))}")
    if side not in (0, 1) or x.data_ptr() == out.data_ptr() != 0:
        raise ValueError(f"side {side} is 0 or 1, and the result is another array")
    if rows:
        _conv[rows, triton.cdiv(d, COLUMNS)](
            x, coef, base, previous, out, rows, d, side, taps, groups, COLUMNS,
            num_warps=2, enable_fp_fusion=False, **chain.options(out.device),
        )  # fmt: skip
