"""The engine's f32 arithmetic on the CPU, in numpy: slow, and equal to the kernels bit for bit.

What makes a result is the order of its roundings. So each function here rounds where the kernel rounds, and nowhere else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from power_lab.kernels.numba.vector import EXP_POLYNOMIAL, LANES

Floats = NDArray[np.float32]


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Floats:
    """a * b + c of f32 numbers, rounded once, as the processor's fused multiply-add does.

    The product of two f32 is exact in f64. Their sum with c is rounded to odd there (Boldo and Melquiond 2008, "Emulation of FMA and
    correctly rounded sums"), so that rounding it again to f32 is as good as rounding once.
    """
    one, other, addend = (np.asarray(value, np.float32).astype(np.float64) for value in (a, b, c))
    product = one * other
    total = product + addend
    with np.errstate(invalid="ignore"):  # infinities have no rest
        virtual = total - product
        rest = (product - (total - virtual)) + (addend - virtual)  # what rounding the sum took away, exactly
    bits = np.atleast_1d(total).view(np.int64).copy()
    lost = np.atleast_1d(np.isfinite(rest) & (rest != 0)) & (bits & 1 == 0)
    away = np.atleast_1d((rest > 0) == (total > 0))  # the true sum is farther from zero than the rounded one
    bits[lost] += np.where(away, 1, -1)[lost]
    return bits.view(np.float64).reshape(np.shape(total)).astype(np.float32)


def exp(x: ArrayLike) -> Floats:
    """e^x by the kernels' own polynomial, with the kernels' roundings."""
    x = np.clip(np.asarray(x, np.float32), np.float32(-104.0), np.float32(89.0))
    n = np.rint(x * np.float32(1.44269504))
    r = fma(n, np.float32(-1.42860677e-06), fma(n, np.float32(-0.693145751953125), x))
    p = np.full_like(r, EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        p = fma(p, r, np.float32(coefficient))
    whole = n.astype(np.int32)
    first = whole >> 1
    for part in (first, whole - first):
        p = p * np.ldexp(np.float32(1), part)
    return p


def tree_sum(values: ArrayLike) -> np.float32:
    """The sum of any number of f32 as the kernels take it: 16 partial sums, number i going to sum i % 16, then halves folded together."""
    flat = np.asarray(values, np.float32).ravel()
    padded = np.zeros(-(-flat.size // LANES) * LANES, np.float32)
    padded[: flat.size] = flat
    sums = np.zeros(LANES, np.float32)
    for lanes in padded.reshape(-1, LANES):
        sums = sums + lanes
    while sums.size > 1:
        sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    return sums[0]
