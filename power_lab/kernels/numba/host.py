"""The way to the device and back where it is the host: arrays share its memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class InPlace:
    """`Staging` where host and device share memory."""

    raw: np.ndarray

    def open(self) -> np.ndarray:
        return self.raw

    def send(self, nbytes: int) -> None:
        """It is there."""


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """`Fetched` arrays."""

    arrays: tuple[np.ndarray, ...]
    seconds: float = 0.0

    def get(self) -> tuple[np.ndarray, ...]:
        return self.arrays
