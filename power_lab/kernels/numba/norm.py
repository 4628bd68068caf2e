"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), with the residual addition before it."""

from __future__ import annotations

import numpy as np
from numba import njit, prange, types

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.vector import F32, Builder, Span, Value, address

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
    v.sweep(b, count, square)
    mean = b.fdiv(v.tree_sums(b, [b.load(acc)])[0], b.sitofp(count, F32))
    root = v.call(b, "llvm.sqrt.f32", F32, (b.fadd(mean, eps),))
    scale = v.splat(b, b.fdiv(v.const(F32, 1.0), root))
    v.sweep(b, count, lambda span: span.store(b.fmul(b.fmul(span.load(x), scale), span.load(weight)), out))


norm_row = v.routine("norm_row", types.void, [types.int64, types.int64, types.int64, types.float32, types.int64, types.int64], _emit)


@njit(nogil=True)
def _rows(x, delta, weight, eps, out, first, step):
    d, added = x.shape[1], delta.shape[0] > 0
    for r in range(first, x.shape[0], step):
        at = r * d * 4
        norm_row(address(x) + at, address(delta) + at if added else 0, address(weight), np.float32(eps), address(out) + at, d)


@njit(nogil=True)
def norm_serial(x, delta, weight, eps, out):
    """x f32 [R, D], delta f32 [R, D] or [0, D] for none (x += delta first), weight f32 [D], out f32 [R, D]."""
    _rows(x, delta, weight, eps, out, 0, 1)


@njit(parallel=True, nogil=True)
def norm_parallel(x, delta, weight, eps, out, parts):
    """The same, rows shared among `parts` threads."""
    for part in prange(parts):
        _rows(x, delta, weight, eps, out, part, parts)
