"""Storage types and their block geometry (source: the GGUF format document and ggml's type table)."""

from __future__ import annotations

from enum import IntEnum


class QuantType(IntEnum):
    """GGML tensor types that Power Lab computes on; the values are the file format's numbers."""

    F32 = 0
    F16 = 1
    Q4_1 = 3
    Q8_0 = 8
    BF16 = 30


GEOMETRY: dict[QuantType, tuple[int, int]] = {
    QuantType.F32: (1, 4),
    QuantType.F16: (1, 2),
    QuantType.Q4_1: (32, 20),
    QuantType.Q8_0: (32, 34),
    QuantType.BF16: (1, 2),
}
"""type -> (values per block, bytes per block)."""


def row_bytes(type: QuantType, cols: int) -> int:
    """Bytes of one stored row of `cols` values. Raises ValueError when cols is not a whole number of blocks."""
    values, size = GEOMETRY[type]
    if cols % values:
        raise ValueError(f"{type.name} stores blocks of {values} values, but a row has {cols}")
    return cols // values * size
