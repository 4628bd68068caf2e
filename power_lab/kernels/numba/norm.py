"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), with the residual addition before it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.program import Job, bits, f32
from power_lab.kernels.numba.team import NORM
from power_lab.kernels.numba.vector import F32, Builder, Span, Value, f32_from_bits

ROWS = 16  # a chunk's; fewer are not worth sharing
PLAN = "sum of squares as in tiles.PLAN; (x * (1 / sqrt(mean + eps))) * w"


def _emit(b: Builder, x: Value, delta: Value, weight: Value, eps: Value, out: Value, count: Value) -> None:
    acc = v.variable(b, v.vec(F32))

    def square(span: Span) -> None:
        value = span.load(x)
        b.store(v.fma(b, value, value, b.load(acc)), acc)

    def add(span: Span) -> None:
        span.store(b.fadd(span.load(x), span.load(delta)), x)

    with b.if_then(b.icmp_signed("!=", delta, v.i64(0))):
        v.sweep(b, count, add)
    with b.if_then(b.icmp_signed("!=", weight, v.i64(0))):
        v.sweep(b, count, square)
        mean = b.fdiv(v.tree_sums(b, [b.load(acc)])[0], b.sitofp(count, F32))
        root = v.call(b, "llvm.sqrt.f32", F32, (b.fadd(mean, eps),))
        scale = v.splat(b, b.fdiv(v.const(F32, 1.0), root))
        v.sweep(b, count, lambda span: span.store(b.fmul(b.fmul(span.load(x), scale), span.load(weight)), out))


norm_row = v.routine(
    "norm_row", types.void, [types.int64, types.int64, types.int64, types.float32, types.int64, types.int64], _emit
)
"""f(x, delta, weight, eps, out, count): x += delta, then out = norm(x) * weight; an address of 0 leaves its part out. out may be x."""


@njit(nogil=True, inline="always")
def _rows(first, last, x, delta, post, weight, eps, out, d):
    for r in range(first, last):
        at = r * d * 4
        if post:
            norm_row(delta + at, 0, post, eps, delta + at, d)
        norm_row(x + at, delta + at if delta else 0, weight, eps, out + at, d)


@njit(nogil=True)
def chunk(job, index, scratch):
    """Up to ROWS rows; `job` as made by `job`."""
    x, delta, post, weight, eps, out, d, rows = job[1:9]
    _rows(index * ROWS, min(rows, (index + 1) * ROWS), x, delta, post, weight, f32_from_bits(eps), out, d)


def job(x: np.ndarray, delta: Any, post: Any, weight: Any, eps: float, out: np.ndarray) -> Job:
    """x f32 [R, D], delta f32 [R, D] (x += delta first), post and weight f32 [D], out f32 [R, D]; what is None is left out."""
    rows, d = x.shape
    parts = (0 if part is None else f32(part) for part in (delta, post, weight))
    return -(-rows // ROWS), NORM, f32(x), *parts, bits(eps), f32(out), d, rows
