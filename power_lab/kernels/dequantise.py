"""The values of stored matrices, in numpy: bit for bit those of the `gguf` package, for every type that kernels read."""

from __future__ import annotations

import numpy as np

from power_lab.kernels.layouts import HALF, LAYOUTS, Fields, unpack
from power_lab.kernels.quants import GEOMETRY, QuantType, row_bytes

CHUNK = 1 << 18
"""Values that are unpacked at a time, so that temporaries stay small whatever the matrix is."""


def dequantise(stored: np.ndarray, type: QuantType, cols: int) -> np.ndarray:
    """f32 [N, cols] of a stored matrix.

    Args:
        stored: in the form of `Weight.data`: uint8 [N, bytes per row], or [N, cols] f32, f16 or the bits of bf16 as uint16; their
            raw bytes do as well.

    Raises:
        ValueError: the stored rows are not rows of `cols` values of that type.
    """
    raw = np.ascontiguousarray(stored).view(np.uint8)
    if raw.ndim != 2 or raw.shape[1] != row_bytes(type, cols):
        raise ValueError(f"{stored.dtype} {list(stored.shape)} are not rows of {cols} {type.name} values")
    if type == QuantType.F32:
        return raw.view("<f4").astype(np.float32)
    if type == QuantType.F16:
        return raw.view(HALF).astype(np.float32)
    if type == QuantType.BF16:
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    values, size = GEOMETRY[type]
    blocks = raw.reshape(-1, size)
    out = np.empty((len(blocks), values), np.float32)
    step = CHUNK // values
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # what a file's scales are, infinite too, is the reader's business
        for at in range(0, len(blocks), step):
            out[at : at + step] = block_values(type, unpack(type, blocks[at : at + step]))
    return out.reshape(len(raw), cols)


def block_values(type: QuantType, fields: Fields) -> np.ndarray:
    """f32 [n, V]. Products and sums are f32, in the order that the format's users agree on: (scale * sub) * level - (minimum * sub)."""
    layout = LAYOUTS[type]
    levels = np.array(layout.levels, np.float32)[fields.codes]
    scale = _exponential(fields.scale) if type == QuantType.MXFP4 else fields.scale.astype(np.float32)
    minimum = fields.minimum.astype(np.float32)
    if not layout.subs:
        product = scale[:, None] * levels
        return product + minimum[:, None] if layout.affine else product
    subs = fields.subs.view(np.int8) if layout.sub_signed else fields.subs.astype(np.int16) - np.int16(layout.sub_zero)
    count = layout.subs // 2 if layout.affine else layout.subs
    levels = levels.reshape(len(levels), count, -1)
    levels *= (scale[:, None] * subs[:, :count].astype(np.float32))[:, :, None]
    if layout.affine:
        levels -= (minimum[:, None] * subs[:, count:].astype(np.float32))[:, :, None]
    return levels.reshape(len(levels), -1)


def _exponential(exponent: np.ndarray) -> np.ndarray:
    """2 ** (exponent - 128), exact down to the subnormal ones."""
    return np.ldexp(np.float32(1), exponent.astype(np.int32) - 128)
