"""Types with minima, by search: Q2_K, Q4_K and Q5_K; Q4_1 and Q5_1 when columns have an importance."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from power_lab.engine.weights.quantise.half import half, half_above_zero
from power_lab.engine.weights.quantise.search import divide, dot, fit_affine
from power_lab.kernels.layouts import LAYOUTS, Fields, pack
from power_lab.kernels.quants import QuantType

SUB_TOP = {QuantType.Q2_K: 15, QuantType.Q4_K: 63, QuantType.Q5_K: 63}
"""The largest integer that a sub-block's scale or minimum is stored as."""


def quantise_affine(type: QuantType, blocks: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """uint8 [n, bytes per block] of f32 blocks [n, 32] of Q4_1 or Q5_1 with positive weights of the same shape."""
    top = len(LAYOUTS[type].levels) - 1
    scale, minimum = (half(part)[:, None] for part in fit_affine(blocks, weights, top, _spans(top), free=True))
    steps = divide(blocks - minimum.astype(np.float32), scale.astype(np.float32))
    codes = np.clip(np.rint(steps), 0, top).astype(np.uint8)
    return pack(type, Fields(scale[:, 0], minimum[:, 0], np.zeros((len(blocks), 0), np.uint8), codes))


def quantise_affine_super(type: QuantType, blocks: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """uint8 [n, bytes per block] of f32 super-blocks [n, 256] of Q2_K, Q4_K or Q5_K with positive weights.

    1. Each sub-block's scale and minimum are fitted freely.
    2. They become integers, multiples of the super-block's; of the integers around, the pair with the least error stays.
    3. For those and the codes, the super-block's scale and minimum are fitted, and step 2 is done once more from where it was.
    """
    search = _Search(type, blocks, weights)
    scales, minima = fit_affine(search.values, search.weights, search.top, _spans(search.top))
    shape, sub_top = (len(blocks), search.groups), SUB_TOP[type]
    scales, minima = scales.reshape(shape), -minima.reshape(shape)
    coarse = _Coarse(half_above_zero(scales.max(1) / sub_top), half_above_zero(minima.max(1) / sub_top))
    fine = search.around(
        coarse,
        np.rint(divide(scales, coarse.scale.astype(np.float32)[:, None])),
        np.rint(divide(minima, coarse.minimum.astype(np.float32)[:, None])),
    )
    coarse = search.refit(coarse, fine)
    fine = search.around(coarse, fine.scales, fine.minima)
    subs = np.concatenate([fine.scales, fine.minima], axis=1).astype(np.uint8)
    return pack(type, Fields(coarse.scale, coarse.minimum, subs, fine.codes.astype(np.uint8).reshape(len(blocks), -1)))


def _spans(top: int) -> list[float]:
    """Candidates from a little less than the levels there are, so that both ends round inwards, to a fifth more, which clips the ends."""
    return [top - 0.8 + step / 19 * (top / 5 + 1.3) for step in range(20)]


class _Coarse(NamedTuple):
    """A super-block's own numbers, f16 [n]."""

    scale: np.ndarray
    minimum: np.ndarray


class _Fine(NamedTuple):
    """Sub-block integers [n, groups] and codes [n * groups, V], all f32 holding whole numbers."""

    scales: np.ndarray
    minima: np.ndarray
    codes: np.ndarray


class _Search:
    """The values of some super-blocks as rows of sub-blocks."""

    def __init__(self, type: QuantType, blocks: np.ndarray, weights: np.ndarray) -> None:
        layout = LAYOUTS[type]
        self.groups, self.top, self._sub_top = layout.subs // 2, len(layout.levels) - 1, SUB_TOP[type]
        self.values = blocks.reshape(len(blocks) * self.groups, -1)
        self.weights = weights.reshape(self.values.shape)

    def around(self, coarse: _Coarse, scales: np.ndarray, minima: np.ndarray) -> _Fine:
        """Of the integers at most 1 away, the pair of each sub-block with the least error."""
        best = _Fine(np.zeros_like(scales), np.zeros_like(scales), np.zeros_like(self.values))
        least = np.full(scales.shape, np.inf, np.float32)
        for ds, dm in product((0, -1, 1), repeat=2):
            s, m = np.clip(scales + ds, 0, self._sub_top), np.clip(minima + dm, 0, self._sub_top)
            step = (coarse.scale.astype(np.float32)[:, None] * s).reshape(-1, 1)
            offset = (coarse.minimum.astype(np.float32)[:, None] * m).reshape(-1, 1)
            codes = np.clip(np.rint(divide(self.values + offset, step)), 0, self.top)
            rest = codes * step - offset - self.values
            squares = dot(rest * self.weights, rest).reshape(scales.shape)
            better = squares < least
            least[better], best.scales[better], best.minima[better] = squares[better], s[better], m[better]
            best.codes[better.ravel()] = codes[better.ravel()]
        return best

    def refit(self, old: _Coarse, fine: _Fine) -> _Coarse:
        """The super-block's scale and minimum by least squares for given integers and codes; the old ones where those do not decide."""
        rows = (len(old.scale), -1)
        a = (fine.codes * fine.scales.reshape(-1, 1)).reshape(rows)
        b = np.repeat(-fine.minima, self.values.shape[1], axis=1)
        x, w = self.values.reshape(rows), self.weights.reshape(rows)
        wa, wb = w * a, w * b
        aa, ab, bb, ax, bx = dot(wa, a), dot(wa, b), dot(wb, b), dot(wa, x), dot(wb, x)
        determinant = aa * bb - ab * ab
        sound = determinant > 1e-5 * aa * bb
        determinant[~sound] = np.inf
        scale, minimum = (bb * ax - ab * bx) / determinant, (aa * bx - ab * ax) / determinant
        sound &= (scale > 0) & (minimum > 0)
        return _Coarse(
            np.where(sound, half_above_zero(scale), old.scale), np.where(sound, half_above_zero(minimum), old.minimum)
        )
