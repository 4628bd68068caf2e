"""e^x and ln x in plain f32 operations: the same bits as the CPU's `kernels/numba/vector.py`, operation for operation.

libdevice's functions and the hardware's approximations differ from the CPU in the last bits, and a drawn token is the largest of
sums of such values. Kernels that call these are launched with `enable_fp_fusion=False`. `div_rn` is IEEE division; `/` is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and taking it away rounds to whole numbers, ties to even


@triton.jit
def exp(x):
    """e^x of f32; at most 1.01 ulp for results in the normal range; NaN stays NaN."""
    inside = tl.where(x < -104.0, -104.0, x)
    inside = tl.where(inside > 89.0, 89.0, inside)
    n = (inside * 1.44269504 + ROUND) - ROUND
    r = tl.fma(n, -0.693145751953125, inside)
    r = tl.fma(n, -1.42860677e-06, r)
    p = tl.full(x.shape, 0.0013814597623422742, tl.float32)
    p = tl.fma(p, r, 0.008368716575205326)
    p = tl.fma(p, r, 0.04166838899254799)
    p = tl.fma(p, r, 0.1666652113199234)
    p = tl.fma(p, r, 0.4999999403953552)
    p = tl.fma(p, r, 1.0)
    p = tl.fma(p, r, 1.0)
    whole = tl.where(n == n, n, 0.0).to(tl.int32)  # the conversion of NaN is undefined: p carries it
    first = whole >> 1  # 2^n in two exact steps: the largest and denormal results come out right
    p *= ((first + 127) << 23).to(tl.float32, bitcast=True)
    return p * ((whole - first + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def log(x):
    """Natural logarithm of positive, finite, normal f32; about 1 ulp."""
    shifted = x.to(tl.int32, bitcast=True) - 0x3F3504F3  # the bits of sqrt(1/2)
    exponent = (shifted >> 23).to(tl.float32)
    m = ((shifted & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    t = m - 1.0
    s = tl.div_rn(t, m + 1.0)
    z = s * s
    p = tl.full(x.shape, 1 / 9, tl.float32)
    p = tl.fma(p, z, 1 / 7)
    p = tl.fma(p, z, 1 / 5)
    p = tl.fma(p, z, 1 / 3)
    tail = exponent * 1.42860677e-06 - s * (t - 2.0 * (z * p))
    return tl.fma(exponent, 0.693145751953125, t + tail)
