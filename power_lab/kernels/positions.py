"""Tables of rotary positions, the same for every device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rope_table(positions: int, frequencies: Sequence[float], magnitude: float) -> np.ndarray:
    """f32 [positions, pairs, 2]: magnitude times cosine and sine of position * frequency, computed in f64."""
    angle = np.arange(positions, dtype=np.float64)[:, None] * np.asarray(frequencies, np.float64)
    return (magnitude * np.stack([np.cos(angle), np.sin(angle)], axis=-1)).astype(np.float32)
