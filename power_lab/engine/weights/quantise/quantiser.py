"""One call for every type: checks, bounded memory, and which method a type takes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from power_lab.engine.weights.quantise import plain, round_to_nearest
from power_lab.engine.weights.quantise.affine import SUB_TOP, quantise_affine, quantise_affine_super
from power_lab.engine.weights.quantise.half import LARGEST
from power_lab.engine.weights.quantise.symmetric import SYMMETRIC, quantise_symmetric
from power_lab.errors import ConfigError
from power_lab.kernels.quants import GEOMETRY, QuantType

CHUNK = 1 << 16
"""Values quantised at a time: the temporaries of one type's search, some 20 times that, stay in a core's cache."""
_UNIMPORTANT = 1e-6  # of the largest importance: what every column has at least, so that no group is without weight

Progress = Callable[[int, int], None]


def quantise(
    values: np.ndarray, type: QuantType, importance: np.ndarray | None = None, progress: Progress | None = None
) -> np.ndarray:
    """A matrix in the stored form of `type`, as `WeightSource.matrix` gives it.

    Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, MXFP4, F16 and BF16 are byte for byte what `gguf.quantize` and llama.cpp write. The K-quants,
    IQ4_NL and IQ4_XS are searched for the least sum of w (x - q)², w being the importance of a value's column, else 1. Values
    beyond ±65504, the largest f16, become that, except in F32, BF16 and MXFP4.

    Args:
        values: f32 [N, K], finite; copied if it is not contiguous.
        importance: [K], finite and not negative: what an error in each column counts, best the mean square of the activations that
            the column is multiplied with. Q4_0, Q4_1, Q5_0 and Q5_1 are then searched too. F32, F16, BF16, Q8_0 and MXFP4 make
            nothing of it.
        progress: called with values done and values in all, after each chunk.

    Returns:
        uint8 [N, bytes per row], or float32, float16 or uint16 (the bits of bf16) [N, K].

    Raises:
        ConfigError: naming the argument: wrong dtype or shape, values that are not finite, K not a whole number of blocks.
    """
    _check(values, type)
    if importance is not None:
        importance = _checked_importance(importance, values.shape[1])
    size, stored = GEOMETRY[type]
    rows = np.ascontiguousarray(values)
    blocks = rows.reshape(-1, size)
    weights = None if importance is None else importance.reshape(-1, size)
    out = np.empty((len(blocks), stored), np.uint8)
    step = CHUNK // size
    for at in range(0, len(blocks), step):
        part = blocks[at : at + step]
        _check_finite(part, at * size, values.shape[1])
        out[at : at + step] = _blocks(type, part, _weights(weights, at, len(part))).view(np.uint8).reshape(-1, stored)
        if progress is not None:
            progress(min(at + step, len(blocks)) * size, values.size)
    whole = out.reshape(len(values), -1)
    plain_dtype = {QuantType.F32: np.float32, QuantType.F16: np.float16, QuantType.BF16: np.uint16}.get(type)
    return whole if plain_dtype is None else whole.view(plain_dtype)


def _blocks(type: QuantType, blocks: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    if type == QuantType.F32:
        return blocks
    if type == QuantType.BF16:
        return plain.bf16(blocks)
    if type == QuantType.MXFP4:
        return round_to_nearest.mxfp4(blocks)
    if np.abs(blocks).max() > LARGEST:
        blocks = np.clip(blocks, -LARGEST, LARGEST)
    if type == QuantType.F16:
        return plain.f16(blocks)
    if type == QuantType.Q8_0:
        return round_to_nearest.q8_0(blocks)
    if weights is None and type in (QuantType.Q4_0, QuantType.Q5_0):
        return round_to_nearest.symmetric(type, blocks)
    if weights is None and type in (QuantType.Q4_1, QuantType.Q5_1):
        return round_to_nearest.affine(type, blocks)
    if weights is None:
        weights = np.ones_like(blocks)
    if type in SYMMETRIC:
        return quantise_symmetric(type, blocks, weights)
    return (quantise_affine_super if type in SUB_TOP else quantise_affine)(type, blocks, weights)


def _weights(per_row: np.ndarray | None, first: int, count: int) -> np.ndarray | None:
    """The weights of `count` blocks from the matrix's block `first` on."""
    return None if per_row is None else per_row[np.arange(first, first + count) % len(per_row)]


def _check(values: np.ndarray, type: QuantType) -> None:
    if values.dtype != np.float32 or values.ndim != 2 or values.size == 0:
        raise ConfigError("values", f"{values.dtype} {list(values.shape)} is not a matrix of float32 values.")
    block = GEOMETRY[type][0]
    if values.shape[1] % block:
        raise ConfigError(
            "type",
            f"{type.name} stores blocks of {block} values, but a row has {values.shape[1]}.",
            "Take a type of smaller blocks; `recipe` names one of about the same size.",
        )


def _check_finite(part: np.ndarray, first: int, cols: int) -> None:
    finite = np.isfinite(part)
    if not finite.all():
        row, col = divmod(first + int(finite.argmin()), cols)
        value = part.reshape(-1)[finite.argmin()]
        raise ConfigError("values", f"the value at row {row}, column {col} is {value}; only finite ones can be stored.")


def _checked_importance(importance: np.ndarray, cols: int) -> np.ndarray:
    """f32 [K], positive, the largest about 1."""
    if importance.shape != (cols,):
        raise ConfigError(
            "importance", f"shape {list(importance.shape)}, but one number for each of {cols} columns is expected."
        )
    wide = importance.astype(np.float64)
    if not (np.isfinite(wide) & (wide >= 0)).all():
        raise ConfigError("importance", "has entries that are negative or not finite.")
    return (wide / (wide.max() or 1.0) + _UNIMPORTANT).astype(np.float32)
