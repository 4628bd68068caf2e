"""f16 as scales are stored: never infinite."""

from __future__ import annotations

import numpy as np

from power_lab.kernels.layouts import HALF

LARGEST = np.float32(65504)
SMALLEST = HALF.type(2.0**-24)


def half(values: np.ndarray) -> np.ndarray:
    """The nearest finite f16."""
    return np.clip(values, -LARGEST, LARGEST).astype(HALF)


def half_above_zero(values: np.ndarray) -> np.ndarray:
    """The nearest finite f16, but not 0 unless the value is: a super-block that is scaled by 0 loses everything."""
    rounded = half(values)
    return np.where((rounded == 0) & (values != 0), np.copysign(SMALLEST, rounded), rounded)
