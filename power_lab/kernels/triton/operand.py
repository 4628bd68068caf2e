"""Activations as products read them.

Beside plain bf16 weights they are bf16. Stored codes become f16, and so must what they are multiplied by, with more digits than bf16 and
less range: there an activation is held as f16 of its 16th part. Values beyond 1,048,064 are held as that, steps are 1e-6 at the bottom, and
sums are multiplied by 16 at the end, which changes no digit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PART = tl.constexpr(0.0625)
WHOLE = tl.constexpr(16.0)
LARGEST = tl.constexpr(65504.0)


@triton.jit
def to_operand(value, dtype: tl.constexpr):
    """f32 values as what products read, of this type, or as f32."""
    if dtype == tl.float16:
        part = tl.clamp(value * PART, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        return part.to(tl.float16)
    else:
        return value.to(dtype)


@triton.jit
def from_operand(value):
    """f32 values of such activations."""
    if value.dtype == tl.float16:
        return value.to(tl.float32) * WHOLE
    else:
        return value.to(tl.float32)


@triton.jit
def whole(sums, dtype: tl.constexpr):
    """Sums of products with activations of this type."""
    if dtype == tl.float16:
        return sums * WHOLE
    else:
        return sums


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`to_operand` of a whole array."""
    if dtype == torch.float16:
        x = (x * PART.value).clamp(-LARGEST.value, LARGEST.value)
    return x.to(dtype)
