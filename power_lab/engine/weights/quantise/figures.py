"""What a stored matrix has lost, in figures."""

from __future__ import annotations

from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from power_lab.errors import ConfigError
from power_lab.kernels.dequantise import CHUNK, dequantise
from power_lab.kernels.quants import GEOMETRY, QuantType


class QuantError(NamedTuple):
    """Differences between a matrix and its stored form.

    Attributes:
        bits_per_weight: stored bits of a value, scales included.
        rmse: root mean square of the differences, in units of the root mean square of the values.
        largest: the largest difference, in the same units.
        cosine: of the angle between both as vectors; 1 if both are 0.
    """

    bits_per_weight: float
    rmse: float
    largest: float
    cosine: float


def error(values: np.ndarray, stored: np.ndarray, type: QuantType) -> QuantError:
    """Compare values [N, K] with their stored form, in f64 over rows in turn.

    Raises:
        ConfigError: the stored rows are not those of a matrix of this shape.
    """
    rows, cols = values.shape
    block, size = GEOMETRY[type]
    if len(stored) != rows or stored.nbytes != rows * cols // block * size:
        shapes = f"{list(stored.shape)} {stored.dtype} for values {list(values.shape)}"
        raise ConfigError("stored", f"{shapes} is not their form in {type.name}.")
    largest = lost = power = kept = product = 0.0
    step = max(1, CHUNK // cols)
    for at in range(0, rows, step):
        x = values[at : at + step].astype(np.float64)
        y = dequantise(stored[at : at + step], type, cols).astype(np.float64)
        rest = np.abs(x - y)
        largest = max(largest, float(rest.max()))
        lost, power, kept, product = (
            total + float(np.vdot(a, b))
            for total, a, b in ((lost, rest, rest), (power, x, x), (kept, y, y), (product, x, y))
        )
    rms = sqrt(power / values.size)
    return QuantError(
        bits_per_weight=8 * size / block,
        rmse=_ratio(sqrt(lost / values.size), rms),
        largest=_ratio(largest, rms),
        cosine=product / (sqrt(power) * sqrt(kept)) if power and kept else float(power == kept),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (inf if part else 0.0)
