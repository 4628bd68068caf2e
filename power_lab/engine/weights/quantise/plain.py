"""Types without blocks: f32 itself, f16 and bf16, rounded to the nearest, ties to even."""

from __future__ import annotations

import numpy as np

from power_lab.engine.weights.quantise.half import half

_LARGEST_BF16 = np.uint32(0x7F7F)


def f16(values: np.ndarray) -> np.ndarray:
    """f16 of finite f32 values; beyond ±65504 that."""
    return half(values)


def bf16(values: np.ndarray) -> np.ndarray:
    """uint16, the bits of bf16, of any f32 values: NaN stays NaN, infinity infinity, and what is finite stays finite."""
    bits = values.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    nan, finite = magnitude > 0x7F800000, magnitude < 0x7F800000
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    overflow = finite & (rounded & np.uint32(0x7FFF) > _LARGEST_BF16)
    rounded = np.where(overflow, (bits >> np.uint32(16)) & np.uint32(0x8000) | _LARGEST_BF16, rounded)
    quiet = bits >> np.uint32(16) | np.uint32(64)
    return np.where(nan, quiet, rounded).astype(np.uint16)
