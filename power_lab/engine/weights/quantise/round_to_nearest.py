"""The types whose scale follows from a block's extremes, and every value goes to its nearest level: byte for byte what `gguf.quantize` and
llama.cpp write, so that files compare. Order of operations and the treatment of ties are theirs.
"""

from __future__ import annotations

import numpy as np

from power_lab.engine.weights.quantise.half import half
from power_lab.kernels.layouts import LAYOUTS, Fields, pack
from power_lab.kernels.quants import QuantType

_E2M1_MIDDLES = np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.float32)  # between the doubled magnitudes 0 1 2 3 4 6 8 12


def q8_0(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 34]: the largest magnitude at ±127, halves away from zero."""
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    size = np.abs(blocks * _inverse(scale))
    whole = np.floor(size)
    whole += size - whole >= 0.5  # not floor(size + 0.5): the sum rounds
    codes = np.copysign(whole, blocks).astype(np.int8).view(np.uint8)
    return _pack(QuantType.Q8_0, scale, scale, codes)


def symmetric(type: QuantType, blocks: np.ndarray) -> np.ndarray:
    """Q4_0 and Q5_0: the value of the largest magnitude (the first of several) at the lowest level, halves up."""
    low = -LAYOUTS[type].levels[0]
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = peak / np.float32(-low)
    levels = blocks * _inverse(scale) + np.float32(low + 0.5)
    return _pack(type, scale, scale, np.clip(levels, 0, 2 * low - 1).astype(np.uint8))


def affine(type: QuantType, blocks: np.ndarray) -> np.ndarray:
    """Q4_1 and Q5_1: from the least value to the largest, halves up."""
    top = len(LAYOUTS[type].levels) - 1
    minimum = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - minimum) / np.float32(top)
    levels = (blocks - minimum) * _inverse(scale) + np.float32(0.5)
    return _pack(type, scale, minimum, np.clip(levels, 0, top).astype(np.uint8))


def mxfp4(blocks: np.ndarray) -> np.ndarray:
    """uint8 [n, 17]: the exponent of the largest magnitude, less 2, so that it falls on 4 to 8 of 6 (OCP MX 1.0); halves toward zero.

    Where other writers wrap around, under 2**-125, the exponent is the least that there is; at the other end nothing becomes infinite.
    """
    largest = np.abs(blocks).max(axis=1)
    exponent = np.floor(np.log2(largest, out=np.full(len(blocks), -np.inf, np.float32), where=largest > 0)) + 125
    exponent = np.clip(exponent, 0, 252).astype(np.uint8)
    units = np.ldexp(np.abs(blocks), 128 - exponent.astype(np.int32)[:, None])
    codes = np.searchsorted(_E2M1_MIDDLES, units).astype(np.uint8)
    codes += ((blocks < 0) & (codes > 0)).astype(np.uint8) << np.uint8(3)
    return pack(QuantType.MXFP4, Fields(exponent, exponent, np.zeros((len(blocks), 0), np.uint8), codes))


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale; 0 for scales so small that f32 has no inverse, which f16 rounds to 0 anyway."""
    small = np.abs(scale) < np.finfo(np.float32).tiny
    return np.where(small, np.float32(0), np.float32(1) / np.where(small, np.float32(1), scale))


def _pack(type: QuantType, scale: np.ndarray, minimum: np.ndarray, codes: np.ndarray) -> np.ndarray:
    subs = np.zeros((len(codes), 0), np.uint8)
    return pack(type, Fields(half(scale[:, 0]), half(minimum[:, 0]), subs, codes))
