"""Types without minima, by search: Q3_K, Q6_K, IQ4_XS and IQ4_NL; Q4_0 and Q5_0 when columns have an importance."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from power_lab.engine.weights.quantise.half import half, half_above_zero
from power_lab.engine.weights.quantise.levels import IntegerLevels, Levels, TableLevels
from power_lab.engine.weights.quantise.search import divide, fit_scale
from power_lab.kernels.layouts import IQ4_LEVELS, LAYOUTS, Fields, pack
from power_lab.kernels.quants import QuantType


class Symmetric(NamedTuple):
    """levels of a value; sub_low and sub_high bound the integers that sub-block scales are stored as."""

    levels: Levels
    sub_low: int = 0
    sub_high: int = 0


SYMMETRIC: dict[QuantType, Symmetric] = {
    QuantType.Q4_0: Symmetric(IntegerLevels(-8, 7)),
    QuantType.Q5_0: Symmetric(IntegerLevels(-16, 15)),
    QuantType.IQ4_NL: Symmetric(TableLevels(IQ4_LEVELS)),
    QuantType.Q3_K: Symmetric(IntegerLevels(-4, 3), -32, 31),
    QuantType.Q6_K: Symmetric(IntegerLevels(-32, 31), -128, 127),
    QuantType.IQ4_XS: Symmetric(TableLevels(IQ4_LEVELS), -32, 31),
}


def quantise_symmetric(type: QuantType, blocks: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """uint8 [n, bytes per block] of f32 blocks [n, V] with positive weights of the same shape."""
    form, layout = SYMMETRIC[type], LAYOUTS[type]
    n, groups = len(blocks), max(layout.subs, 1)
    values = blocks.reshape(n * groups, -1)
    scales = fit_scale(values, weights.reshape(values.shape), form.levels, _peaks(form.levels)).reshape(n, groups)
    if layout.subs:
        peak = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)
        scale = half_above_zero(peak / np.float32(form.sub_low))  # the peak takes the longer side of the range
        subs = np.clip(np.rint(divide(scales, scale.astype(np.float32))), form.sub_low, form.sub_high)
        stored = subs.astype(np.int16) + np.int16(layout.sub_zero)
    else:
        scale, subs, stored = half(scales), np.float32(1), np.zeros((n, 0))
    steps = (scale.astype(np.float32) * subs).reshape(-1, 1)
    codes = form.levels.codes(form.levels.nearest(divide(values, steps)))
    return pack(type, Fields(scale[:, 0], scale[:, 0], stored.astype(np.uint8), codes.reshape(n, -1)))


def _peaks(levels: Levels) -> list[float]:
    """The largest value at either end of the levels, up to a fifth inside or outside."""
    return [end * stretch for end in (levels.low, levels.high) for stretch in np.linspace(0.8, 1.2, 9)]
