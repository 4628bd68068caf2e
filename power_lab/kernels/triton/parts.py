"""Sums over splits of K that a product leaves as they are, for the one operation that reads its result to add up.

Inside of the product the program that comes last adds them, behind a barrier, an atomic and a reload. A reader adds the same numbers in the
same order, the bias behind them, so the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(slots=True, eq=False)
class Parts:
    """The result of a product that its reader may have to add up; `linear.linear` fills it.

    Its scratch is that of all products of a stream, so it is read before the next one is launched.

    Attributes:
        out: f32 [R, N], the result, where the product added it up itself.
        scratch: f32, flat; the first splits * R * N are parts [splits, R, N].
        apart: whether they are left wherever a reader can add them; None: as `linear.left` says.
        splits: how many parts there are; 1: none, `out` holds the result.
        bias: f32 [N], to be added behind them.
    """

    out: torch.Tensor
    scratch: torch.Tensor
    apart: bool | None = None
    splits: int = 1
    bias: torch.Tensor | None = None


def parts_of(sums: torch.Tensor | Parts) -> tuple[torch.Tensor, int, torch.Tensor | None]:
    """(where it begins, splits, bias): what a kernel gives to `summed`."""
    if isinstance(sums, Parts) and sums.splits > 1:
        return sums.scratch, sums.splits, sums.bias
    return (sums.out if isinstance(sums, Parts) else sums), 1, None


@triton.jit
def summed(at, size, bias, column, mask, SPLITS: tl.constexpr):
    """The values at these addresses and, in order, those of SPLITS - 1 more arrays, each `size` values further on; then their columns'
    bias, if there is one."""
    value = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(at + split * size, mask=mask, other=0.0)
    if bias is not None:
        value += tl.load(bias + column, mask=mask, other=0.0)
    return value
