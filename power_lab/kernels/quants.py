"""Storage types and their block geometry (source: the GGUF format document and ggml's type table)."""

from __future__ import annotations

from enum import IntEnum


class QuantType(IntEnum):
    """GGML tensor types that Power Lab computes on; the values are the file format's numbers."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30
    MXFP4 = 39


GEOMETRY: dict[QuantType, tuple[int, int]] = {
    QuantType.F32: (1, 4),
    QuantType.F16: (1, 2),
    QuantType.Q4_0: (32, 18),
    QuantType.Q4_1: (32, 20),
    QuantType.Q5_0: (32, 22),
    QuantType.Q5_1: (32, 24),
    QuantType.Q8_0: (32, 34),
    QuantType.Q2_K: (256, 84),
    QuantType.Q3_K: (256, 110),
    QuantType.Q4_K: (256, 144),
    QuantType.Q5_K: (256, 176),
    QuantType.Q6_K: (256, 210),
    QuantType.IQ4_NL: (32, 18),
    QuantType.IQ4_XS: (256, 136),
    QuantType.BF16: (1, 2),
    QuantType.MXFP4: (32, 17),
}
"""type -> (values per block, bytes per block)."""


def row_bytes(type: QuantType, cols: int) -> int:
    """Bytes of one stored row of `cols` values. Raises ValueError when cols is not a whole number of blocks."""
    values, size = GEOMETRY[type]
    if cols % values:
        raise ValueError(f"{type.name} stores blocks of {values} values, but a row has {cols}")
    return cols // values * size
