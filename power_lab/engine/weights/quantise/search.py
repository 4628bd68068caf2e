"""Scales of groups of values: the best of a grid of candidates, each refined by weighted least squares.

A candidate assigns levels; for fixed levels the best scale (and minimum) has a closed form, whose error ranks the candidate. Groups are
normalised first, so that no sum overflows and none is lost among subnormal numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from power_lab.engine.weights.quantise.levels import Levels


def fit_scale(values: np.ndarray, weights: np.ndarray, levels: Levels, peaks: Sequence[float]) -> np.ndarray:
    """f32 [G]: scales s for which sum w (x - s nearest(x / s))² is least.

    Args:
        values: f32 [G, V].
        weights: f32 [G, V], positive.
        peaks: where, in levels, a candidate puts the group's value of the largest magnitude.
    """
    peak = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
    unit = values / np.where(peak == 0, np.float32(1), peak)
    weighted = weights * unit
    gain, scale = np.zeros(len(values), np.float32), np.zeros(len(values), np.float32)
    for place in peaks:
        level = levels.nearest(unit * np.float32(place))
        along, power = dot(weighted, level), dot(weights * level, level)
        fit = divide(along, power)
        better = fit * along > gain  # what the error falls by
        gain[better], scale[better] = (fit * along)[better], fit[better]
    return scale * peak[:, 0]


def fit_affine(
    values: np.ndarray, weights: np.ndarray, top: int, spans: Sequence[float], free: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """f32 [G], f32 [G]: scales s >= 0 and minima m for which sum w (x - (s q + m))² is least over q of 0 to `top`.

    Args:
        values: f32 [G, V].
        weights: f32 [G, V], positive.
        spans: how many levels a candidate gives to the range of the group's values; more than `top` clips the largest.
        free: whether m may be positive.
    """
    size = np.abs(values).max(axis=1, keepdims=True)
    unit = values / np.where(size == 0, np.float32(1), size)
    low = unit.min(axis=1, keepdims=True) if free else np.minimum(unit.min(axis=1, keepdims=True), 0)
    span = unit.max(axis=1, keepdims=True) - low
    place = (unit - low) / np.where(span == 0, np.float32(1), span)
    weighted, total = weights * unit, weights.sum(axis=1)
    first = weighted.sum(axis=1)

    scale, minimum = np.zeros(len(values), np.float32), first / total  # the best without a scale: the mean
    if not free:
        minimum = np.minimum(minimum, 0)
    least = _squares(unit - minimum[:, None], weights)
    for levels in spans:
        q = np.clip(np.rint(place * np.float32(levels)), 0, top)
        wq = weights * q
        sum_q, sum_qq, sum_qx = wq.sum(axis=1), dot(wq, q), dot(weighted, q)
        determinant = total * sum_qq - sum_q * sum_q
        bare = determinant <= 1e-6 * total * sum_qq  # all values on one level
        determinant[bare] = np.inf
        m = (sum_qq * first - sum_q * sum_qx) / determinant
        s = (total * sum_qx - sum_q * first) / determinant
        if not free:
            bare |= m > 0
        s, m = np.where(bare, divide(sum_qx, sum_qq), s), np.where(bare, np.float32(0), m)
        squares = _squares(unit - (s[:, None] * q + m[:, None]), weights)
        better = squares < least
        least[better], scale[better], minimum[better] = squares[better], s[better], m[better]
    return scale * size[:, 0], minimum * size[:, 0]


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[G]: sums of products along rows."""
    return np.einsum("gv,gv->g", a, b)


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, and 0 where b is 0."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    return np.divide(a, b, out=np.zeros(shape, np.float32), where=np.broadcast_to(b != 0, shape))


def _squares(rest: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return dot(rest * weights, rest)
