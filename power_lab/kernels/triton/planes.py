"""Stored matrices as aligned planes: what the GPU's kernels read. No value changes and next to no byte is added.

A block of a file is 17 to 210 bytes, so its fields lie unaligned, and a tile of weights is scattered over small pieces. Here every field
becomes an array of its own, the depth (K) its slowest axis, so that a tile of consecutive rows is one contiguous piece:

- `codes` int16 [chunks, N, 32]: the low `LOW` bits of the codes. A word holds the codes of 16 / LOW groups of 32: bits f * LOW and up of
  word j are the code of value 32 f + j of its chunk. Signed codes are stored with their sign bit flipped, so that order is kept.
- `high` uint8 [chunks, N, 32]: the remaining `HIGH` bits, packed in the same way.
- `scale`, `minimum` f16 [blocks, N] (MXFP4: the exponent, uint8); `subs`, `sub_minima` [groups, N]: the blocks' integers, those of
  Q2_K as in the file, the minimum in the upper four bits of `subs`.
- `values` [N, K]: types without blocks, as they are.

Chunks are whole, so a K that is no multiple of one is filled up with codes 0; so are `scale` and `minimum` up to a whole `depth`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from power_lab.kernels.layouts import LAYOUTS, Fields, unpack
from power_lab.kernels.quants import GEOMETRY, QuantType, row_bytes

if TYPE_CHECKING:
    import torch

GROUP = 32  # values of one word position, and the depth of one matrix instruction pair
CHUNK = 1 << 20  # values that are repacked at a time, so that temporaries stay small whatever the matrix is
PLANES = ("codes", "high", "scale", "minimum", "subs", "sub_minima")
"""In the order in which kernels take them."""

_PLAIN = {QuantType.F32: np.dtype("<f4"), QuantType.F16: np.dtype("<f2"), QuantType.BF16: np.dtype("<i2")}


@dataclass(frozen=True)
class Form:
    """How one block type lies in planes.

    Attributes:
        low, high: bits of a code in `codes` and in `high`.
        zero: the code of value 0, where codes stand for consecutive integers.
        block: values of a scale. sub: values of a sub-block, 0 where there are none.
        affine: whether a minimum belongs to each scale.
    """

    low: int
    high: int
    zero: int
    block: int
    sub: int
    affine: bool

    @property
    def chunk(self) -> int:
        """Values of a word's 32 positions in `codes`."""
        return GROUP * 16 // self.low

    @property
    def high_chunk(self) -> int:
        return GROUP * 8 // self.high if self.high else GROUP

    @property
    def depth(self) -> int:
        """Values of one step of a product: a multiple of both planes' chunks."""
        return max(self.chunk, self.high_chunk, 128)


_BITS = {4: (2, 0), 8: (2, 1), 16: (4, 0), 32: (4, 1), 64: (4, 2), 256: (8, 0)}


def _form(type: QuantType) -> Form:
    layout, block = LAYOUTS[type], GEOMETRY[type][0]
    low, high = _BITS[len(layout.levels)]
    count = layout.subs // 2 if layout.affine else layout.subs
    return Form(low, high, -min(layout.levels), block, block // count if count else 0, layout.affine)


FORMS: dict[QuantType, Form] = {type: _form(type) for type in LAYOUTS}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeight:
    """A matrix [N, K] in planes, on a device.

    Attributes:
        type: how values were stored. rows: N. cols: K.
        planes: by the names above; bf16 values are torch.bfloat16.
    """

    type: QuantType
    rows: int
    cols: int
    planes: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(plane.numel() * plane.element_size() for plane in self.planes.values())


def repack(type: QuantType, rows: int, cols: int, host: np.ndarray) -> dict[str, np.ndarray]:
    """The planes of a stored matrix. `host` is any array of its bytes; bf16 values come as int16 bits.

    Raises:
        ValueError: `cols` is no whole number of blocks, or `host` is not as long as such a matrix.
    """
    pitch = row_bytes(type, cols)
    raw = np.ascontiguousarray(host).view(np.uint8).reshape(-1)
    if raw.size != rows * pitch:
        raise ValueError(f"{raw.size} bytes are not {rows} rows of {cols} {type.name} values")
    if type in _PLAIN:
        return {"values": raw.view(_PLAIN[type]).reshape(rows, cols)}
    planes = _empty(type, rows, cols)
    blocks = raw.reshape(rows, pitch)
    span = max(1, CHUNK // cols)
    for first in range(0, rows, span):
        part = blocks[first : first + span]
        fields = unpack(type, part.reshape(-1, GEOMETRY[type][1]))
        for name, numbers in _planes(type, len(part), fields).items():
            planes[name][: len(numbers), first : first + span] = numbers
    return planes


def _empty(type: QuantType, rows: int, cols: int) -> dict[str, np.ndarray]:
    form, layout = FORMS[type], LAYOUTS[type]
    whole = -(-cols // form.depth) * form.depth
    planes = {"codes": np.zeros((-(-cols // form.chunk), rows, GROUP), np.int16)}
    if form.high:
        planes["high"] = np.zeros((whole // form.high_chunk, rows, GROUP), np.uint8)
    planes["scale"] = np.zeros((whole // form.block, rows), np.uint8 if type == QuantType.MXFP4 else np.float16)
    if form.affine:
        planes["minimum"] = np.zeros((whole // form.block, rows), np.float16)
    if form.sub:
        planes["subs"] = np.zeros((whole // form.sub, rows), np.uint8 if layout.affine else np.int8)
        if form.affine and form.sub == 32:
            planes["sub_minima"] = np.zeros((whole // form.sub, rows), np.uint8)
    return planes


def _planes(type: QuantType, rows: int, fields: Fields) -> dict[str, np.ndarray]:
    """The planes of whole rows, depth first."""
    form, layout = FORMS[type], LAYOUTS[type]
    codes = fields.codes.reshape(rows, -1)
    if type == QuantType.Q8_0:
        codes = codes ^ np.uint8(128)
    planes = {
        "codes": _packed(codes & np.uint8((1 << form.low) - 1), form.low, np.uint16).view(np.int16),
        "scale": fields.scale.reshape(rows, -1).T,
    }
    if form.high:
        planes["high"] = _packed(codes >> np.uint8(form.low), form.high, np.uint8)
    if form.affine:
        planes["minimum"] = fields.minimum.reshape(rows, -1).T
    if form.sub:
        count = form.block // form.sub
        if layout.sub_signed:
            subs = fields.subs.view(np.int8)
        else:
            subs = fields.subs - np.uint8(layout.sub_zero)
            subs = subs if form.affine else subs.view(np.int8)
        scales, minima = subs[:, :count].reshape(rows, -1).T, subs[:, count:].reshape(rows, -1).T
        if form.affine and form.sub == 32:
            planes["sub_minima"] = minima
        elif form.affine:
            scales = scales | minima << np.uint8(4)
        planes["subs"] = scales
    return planes


def _packed(numbers: np.ndarray, bits: int, word: type[np.unsignedinteger]) -> np.ndarray:
    """[chunks, rows, 32] words of `numbers` uint8 [rows, K], each of so many bits."""
    fields = np.dtype(word).itemsize * 8 // bits
    rows, cols = numbers.shape
    filled = np.pad(numbers, ((0, 0), (0, -cols % (GROUP * fields))))
    groups = (
        filled.reshape(rows, -1, fields, GROUP).astype(word) << (np.arange(fields, dtype=word) * word(bits))[:, None]
    )
    return np.bitwise_or.reduce(groups, axis=2).transpose(1, 0, 2)
