"""DFlash2's grouped dynamic depthwise convolution: a row's channels, and those of the rows before it in its block, weighed and summed."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from power_lab.kernels.numba.program import Job, f32, i32, same
from power_lab.kernels.numba.team import CONV
from power_lab.kernels.numba.vector import f32_pointer, i32_pointer

ROWS = 8  # a chunk's; fewer are not worth sharing
PLAN = "conv: sum of (base + coef) * x over taps in order, rounded operation by operation"


@njit(nogil=True)
def chunk(job, index, scratch):
    """Up to ROWS rows; `job` as made by `job`."""
    x, coef, base, side, previous, out, rows, d, taps, groups = job[1:11]
    size, before = d // groups, carray(i32_pointer(previous), rows)
    for r in range(index * ROWS, min(rows, (index + 1) * ROWS)):
        to, source = carray(f32_pointer(out + r * d * 4), d), r
        for t in range(taps):
            if not 0 <= source < rows:
                break
            row = carray(f32_pointer(x + source * d * 4), d)
            fixed = carray(f32_pointer(base + (side * taps + t) * d * 4), (groups, size))
            moving = carray(f32_pointer(coef + ((r * 2 + side) * taps + t) * groups * 4), groups)
            for g in range(groups):
                for i in range(size):
                    term = (fixed[g, i] + moving[g]) * row[g * size + i]
                    to[g * size + i] = term if t == 0 else to[g * size + i] + term
            source = before[source]


def job(x: np.ndarray, coef: np.ndarray, base: np.ndarray, side: int, previous: np.ndarray, out: np.ndarray) -> Job:
    """Arguments as in `Ops.dynamic_conv`."""
    (rows, d), taps = x.shape, base.shape[1]
    groups = coef.shape[1] // (2 * taps)
    same(base.shape, (2, taps, d), "shape of the base")
    same(coef.shape, (rows, 2 * taps * max(groups, 1)), "shape of the coefficients")
    same(d % groups, 0, "what whole groups leave of the width")
    same((previous.shape, out.shape), ((rows,), x.shape), "shape of the rows before and of the result")
    if side not in (0, 1) or np.may_share_memory(x, out):
        raise ValueError(f"side {side} is 0 or 1, and the result is another array")
    arrays = (f32(x), f32(coef), f32(base), side, i32(previous), f32(out))
    return -(-rows // ROWS), CONV, *arrays, rows, d, taps, groups
