"""The values that codes stand for, and the nearest of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class IntegerLevels:
    """The integers from `low` to `high`, coded from 0."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def nearest(self, values: np.ndarray) -> np.ndarray:
        """The level nearest to each value, f32 of the same shape."""
        return np.clip(np.rint(values), self.low, self.high)

    def codes(self, levels: np.ndarray) -> np.ndarray:
        """uint8 codes of levels."""
        return (levels - self.low).astype(np.uint8)


class TableLevels:
    """Ascending integers within ±127, coded by their place; they need not be evenly spaced."""

    def __init__(self, levels: Sequence[int]) -> None:
        self._levels = np.array(levels, np.float32)
        self.low, self.high = int(levels[0]), int(levels[-1])
        # Whole numbers lie half a unit from the middle between neighbours, or on it: cells of half a unit decide exactly.
        middles = (self._levels[1:] + self._levels[:-1]) / 2
        self._cells = self._levels[np.searchsorted(middles, np.arange(-256, 256) / 2, side="right")]

    def nearest(self, values: np.ndarray) -> np.ndarray:
        """The level nearest to each value, f32 of the same shape."""
        return self._cells[np.clip(np.floor(values * 2) + 256, 0, 511).astype(np.intp)]

    def codes(self, levels: np.ndarray) -> np.ndarray:
        """uint8 codes of levels."""
        return np.searchsorted(self._levels, levels).astype(np.uint8)


Levels = IntegerLevels | TableLevels
