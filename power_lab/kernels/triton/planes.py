"""Stored matrices as aligned planes: what the GPU's kernels read. No value changes and next to no byte is added.

A block of a file is 17 to 210 bytes, so its fields lie unaligned, and a tile of weights is scattered over small pieces. Here every field
becomes an array of its own, the depth (K) its slowest axis, so that a tile of consecutive rows is one contiguous piece:

- `codes` int16 [tiles, N, words]: the low `low` bits of the codes, of `tile` values of a row, in the order in which the matrix unit's
  lanes hold them. Of 16 values k, lane t of four holds 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. Its words lie side by side, in pairs: bits
  f * low and up of the first are the code of an even value, of the second that of the next one, which become a pair of f16 together.
  Field f of pair p stands for half f % 2 of the 16 values p * F / 2 + f // 2, F = 16 / low. Signed codes are stored with their sign bit
  flipped, so that order is kept.
- `high` uint8 [steps, N, 32]: the remaining `high` bits, a byte for each word of the step's tiles, those of f at bits f * high and up; a
  byte that is half needed serves the words of two tiles.
- `scale`, `minimum` f16 (MXFP4: the exponent, uint8) [tiles, N, groups of a tile].
- Where blocks are of 256 values, `scale` f16 [blocks, N, 2] is the block's scale, then its minimum negated or the scale again; `subs` uint8
  [tiles, N, numbers] has the sub-blocks' integers: each scale, 128 more than it is where it may be negative, and behind it its minimum,
  which is the upper four bits of the scale's byte in Q2_K, as in the file.
- `values` bf16 or f16 [N, K]: types without blocks, and small matrices.

Steps are whole, so a K that is no multiple of one is filled up with codes and scales of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from power_lab.kernels.dequantise import dequantise
from power_lab.kernels.layouts import LAYOUTS, Fields, unpack
from power_lab.kernels.quants import GEOMETRY, QuantType, row_bytes

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 20  # values that are repacked at a time, so that temporaries stay small whatever the matrix is
SMALL = 1 << 21  # values of a matrix that is held as plain values, however it is stored
PLANES = ("codes", "high", "scale", "minimum", "subs")
"""In the order in which kernels take them."""

PLAIN_OF = {"float16": QuantType.F16, "bfloat16": QuantType.BF16}
"""What plain values are held as, by what they are multiplied by."""
_PLAIN = {QuantType.F32: np.dtype("<f4"), QuantType.F16: np.dtype("<f2"), QuantType.BF16: np.dtype("<i2")}


@dataclass(frozen=True)
class Form:
    """How one block type lies in planes.

    Attributes:
        low, high: bits of a code in `codes` and in `high`.
        zero: the code of value 0, where codes stand for consecutive integers.
        block: values of a scale. sub: values of a sub-block, 0 where there are none.
        affine: whether a minimum belongs to each scale.
        exponent: whether a scale is a binary exponent. book: what codes stand for, where those are no consecutive integers.
    """

    low: int
    high: int
    zero: int
    block: int
    sub: int
    affine: bool
    exponent: bool
    book: tuple[int, ...] | None

    @property
    def fields(self) -> int:
        """Codes of a word of `codes`."""
        return 16 // self.low

    @property
    def tile(self) -> int:
        """Values of a row that are unpacked at a time."""
        return 256 if self.low == 2 else 128

    @property
    def words(self) -> int:
        return self.tile // self.fields

    @property
    def depth(self) -> int:
        """Values of one step of a product: one or two tiles, whole in every plane."""
        return 256 if self.fields * self.high == 4 else self.tile

    @property
    def numbers(self) -> int:
        """Bytes in `subs` of the sub-blocks that a pair of words lies in."""
        return 8 * self.fields // self.sub * (2 if self.affine and self.sub == 32 else 1) if self.sub else 0

    @property
    def sub_zero(self) -> int:
        """What stands for a sub-block's number of 0: those that may be negative are stored as so much more."""
        return 128 if self.sub and not self.affine else 0

    @property
    def group(self) -> int:
        """Values of one scale within a tile."""
        return self.sub if self.sub else self.block


_BITS = {4: (2, 0), 8: (2, 1), 16: (4, 0), 32: (4, 1), 64: (4, 2), 256: (8, 0)}


def _form(type: QuantType) -> Form:
    layout, block = LAYOUTS[type], GEOMETRY[type][0]
    low, high = _BITS[len(layout.levels)]
    count = layout.subs // 2 if layout.affine else layout.subs
    sub = block // count if count else 0
    first = min(layout.levels)
    book = None if sorted(layout.levels) == list(range(first, first + len(layout.levels))) else layout.levels
    return Form(low, high, 128 if book else -first, block, sub, layout.affine, type == QuantType.MXFP4, book)


FORMS: dict[QuantType, Form] = {type: _form(type) for type in LAYOUTS}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeight:
    """A matrix [N, K] in planes, on a device.

    Attributes:
        type: how values are held: BF16 or F16 for plain ones. rows: N. cols: K.
        planes: by the names above.
    """

    type: QuantType
    rows: int
    cols: int
    planes: dict[str, torch.Tensor]

    @property
    def form(self) -> Form | None:
        """What kernels are compiled for; None for types without blocks."""
        return FORMS.get(self.type)

    @property
    def nbytes(self) -> int:
        return sum(plane.numel() * plane.element_size() for plane in self.planes.values())


def valued(type: QuantType, rows: int, cols: int, operand: str) -> bool:
    """Whether a device holds a stored matrix as plain values: it has no blocks, is small, or meets bf16, which codes do not become."""
    return type in _PLAIN or rows * cols <= SMALL or operand != "float16"


def arguments(weight: DeviceWeight) -> tuple[torch.Tensor | int, ...]:
    """A weight as kernels take it: its planes, those that its type lacks stood in for by its codes, then N."""
    if weight.form is None:
        return weight.planes["values"], weight.rows
    codes = weight.planes["codes"]
    return *(weight.planes.get(name, codes) for name in PLANES), weight.rows


def at_load(
    type: QuantType, rows: int, cols: int, host: np.ndarray, operand: str
) -> tuple[QuantType, dict[str, np.ndarray]]:
    """What a device holds of a stored matrix, and its type: planes, or values [N, K], plain ones as stored and others f32, to be rounded.

    Products of small matrices take as long as a launch, not as their bytes.

    Raises:
        ValueError: as `repack`.
    """
    if type in _PLAIN or not valued(type, rows, cols, operand):
        return type, repack(type, rows, cols, host)
    pitch = row_bytes(type, cols)
    raw = np.ascontiguousarray(host).view(np.uint8).reshape(-1)
    if raw.size != rows * pitch:
        raise ValueError(f"{raw.size} bytes are not {rows} rows of {cols} {type.name} values")
    return QuantType.F32, {"values": dequantise(raw.reshape(rows, pitch), type, cols)}


def bound(type: QuantType, planes: dict[str, np.ndarray]) -> float:
    """What no value of a matrix in planes exceeds, if each number of a block is as large as any other's."""
    form, layout = FORMS[type], LAYOUTS[type]
    level = max(map(abs, layout.levels))
    if form.exponent:
        return float(2.0 ** (int(planes["scale"].max(initial=0)) - 128) * level)
    of_blocks = np.abs(planes["scale"]).astype(np.float32)
    if form.sub:
        scale, minimum = of_blocks.reshape(-1, 2).max(axis=0, initial=0).tolist()
        return 63 * (scale * level + minimum) if form.affine else 128 * scale * level
    minimum = float(np.abs(planes["minimum"]).max(initial=0)) if form.affine else 0.0
    return float(of_blocks.max(initial=0)) * level + minimum


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
    form = FORMS[type]
    blocks = raw.reshape(rows, pitch)
    whole = -(-cols // form.depth) * form.depth
    planes: dict[str, np.ndarray] = {}
    for first in range(0, rows, span := max(1, CHUNK // cols)):
        part = blocks[first : first + span]
        fields = unpack(type, part.reshape(-1, GEOMETRY[type][1]))
        for name, numbers in _planes(type, len(part), whole, fields).items():
            if name not in planes:
                planes[name] = np.empty((len(numbers), rows, *numbers.shape[2:]), numbers.dtype)
            planes[name][:, first : first + span] = numbers
    return planes


def _planes(type: QuantType, rows: int, whole: int, fields: Fields) -> dict[str, np.ndarray]:
    """The planes of whole rows, filled up to `whole` values."""
    form, layout = FORMS[type], LAYOUTS[type]
    codes = fields.codes.reshape(rows, -1)
    if type == QuantType.Q8_0:
        codes = codes ^ np.uint8(128)
    # Axes: row, step, tile, pair, field, lane, which of a pair; then lanes come before pairs, and fields last but one.
    codes = _filled(codes, whole).reshape(rows, whole // form.depth, form.depth // form.tile, -1, form.fields, 4, 2)
    codes = codes.transpose(0, 1, 2, 5, 3, 4, 6).reshape(*codes.shape[:3], -1, form.fields, 2)
    planes = {"codes": _low(codes, form)}
    if form.high:
        planes["high"] = _high(codes, form)
    if not form.sub:
        planes["scale"] = _of_groups(fields.scale, rows, whole, form)
        if form.affine:
            planes["minimum"] = _of_groups(fields.minimum, rows, whole, form)
        return planes
    both = np.stack([fields.scale, -fields.minimum if form.affine else fields.scale], axis=1).reshape(rows, -1, 2)
    planes["scale"] = np.pad(both, ((0, 0), (0, whole // form.block - both.shape[1]), (0, 0))).transpose(1, 0, 2)
    subs = fields.subs + np.uint8((form.sub_zero - (0 if layout.sub_signed else layout.sub_zero)) % 256)
    count = form.block // form.sub
    scales, minima = (_of_groups(part, rows, whole, form) for part in (subs[:, :count], subs[:, count:]))
    if form.affine:
        both = np.stack([scales, minima], axis=3).reshape(*scales.shape[:2], -1)
        scales = both if form.sub == 32 else scales | minima << np.uint8(4)
    planes["subs"] = scales
    return planes


def _filled(numbers: np.ndarray, width: int) -> np.ndarray:
    return np.pad(numbers, ((0, 0), (0, width - numbers.shape[1])))


def _of_groups(numbers: np.ndarray, rows: int, whole: int, form: Form) -> np.ndarray:
    filled = _filled(numbers.reshape(rows, -1), whole // form.group)
    return filled.reshape(rows, -1, form.tile // form.group).transpose(1, 0, 2)


def _low(codes: np.ndarray, form: Form) -> np.ndarray:
    """Words [tiles, rows, words] of codes [rows, steps, tiles of a step, pairs of words, fields, 2]."""
    shifts = np.arange(form.fields, dtype=np.uint16)[:, None] * np.uint16(form.low)
    words = (codes & np.uint8((1 << form.low) - 1)).astype(np.uint16) << shifts
    joined = np.bitwise_or.reduce(words, axis=4)
    return joined.reshape(len(codes), -1, form.words).transpose(1, 0, 2).view(np.int16)


def _high(codes: np.ndarray, form: Form) -> np.ndarray:
    """Bytes [steps, rows, words] of the same codes."""
    tiles = np.arange(codes.shape[2], dtype=np.uint8)[:, None, None, None] * np.uint8(form.fields * form.high)
    shifts = tiles + np.arange(form.fields, dtype=np.uint8)[:, None] * np.uint8(form.high)
    joined = np.bitwise_or.reduce(codes >> np.uint8(form.low) << shifts, axis=(2, 4))
    return joined.reshape(len(codes), -1, form.words).transpose(1, 0, 2)
