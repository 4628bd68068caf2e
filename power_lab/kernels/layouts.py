"""Where the numbers of a stored block lie: one table, read by `unpack` and written by `pack`.

Source: ggml's block formats (github.com/ggml-org/ggml, ggml-common.h, as of late 2026), restated as bit planes.

A block approximates its values by `scale * level`, or `scale * level + minimum`, where a level is what a small code stands for. Blocks of
256 (super-blocks) hold sub-blocks of 16 or 32 values, whose own scales and minima are small integers, multiples of the block's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from power_lab.kernels.quants import GEOMETRY, QuantType

HALF = np.dtype("<f2")
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of OCP's E2M1; the exponent makes up for it.
E2M1_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Plane(NamedTuple):
    """`bits` bits of every number of a field, which are the number's bits from `shift` up.

    Byte i of each group of `run` bytes holds the numbers i, i + run, i + 2 run …, the first one in its lowest bits.
    """

    field: str
    bits: int
    run: int
    shift: int = 0


class Half(NamedTuple):
    """One f16: the block's scale or minimum."""

    field: str


class Exponent(NamedTuple):
    """One byte, the scale's binary exponent with bias 128 (OCP's E8M0, halved, since the levels are doubled)."""

    field: str


class SixBits(NamedTuple):
    """16 numbers of 6 bits in 12 bytes, in the order scales 0-3, minima 0-3, scales 4-7, minima 4-7.

    The first 8 numbers are the low bits of 8 bytes, whose two free bits are the top of the other 8; 4 bytes of nibbles follow.
    """

    field: str


Part = Plane | Half | Exponent | SixBits


@dataclass(frozen=True)
class Layout:
    """One block type.

    Attributes:
        parts: in the file's order.
        levels: what a code stands for.
        subs: how many sub-block scales and, after them, minima.
        sub_zero: the stored number of a sub-block scale of 0.
        sub_signed: whether those are two's complement bytes.
    """

    parts: tuple[Part, ...]
    levels: tuple[int, ...]
    subs: int = 0
    sub_zero: int = 0
    sub_signed: bool = False

    @property
    def affine(self) -> bool:
        return Half("minimum") in self.parts


class Fields(NamedTuple):
    """The numbers of n blocks of V values.

    scale: f16 [n], or uint8 [n] where it is an exponent. minimum: f16 [n], unused without one. subs: uint8 [n, subs] as stored.
    codes: uint8 [n, V].
    """

    scale: np.ndarray
    minimum: np.ndarray
    subs: np.ndarray
    codes: np.ndarray


_SCALE, _MINIMUM = Half("scale"), Half("minimum")
_NIBBLES = Plane("codes", 4, 16)
_FIFTH = Plane("codes", 1, 1, 4)
_U4, _U5 = tuple(range(16)), tuple(range(32))

LAYOUTS: dict[QuantType, Layout] = {
    QuantType.Q4_0: Layout((_SCALE, _NIBBLES), tuple(range(-8, 8))),
    QuantType.Q4_1: Layout((_SCALE, _MINIMUM, _NIBBLES), _U4),
    QuantType.Q5_0: Layout((_SCALE, _FIFTH, _NIBBLES), tuple(range(-16, 16))),
    QuantType.Q5_1: Layout((_SCALE, _MINIMUM, _FIFTH, _NIBBLES), _U5),
    QuantType.Q8_0: Layout((_SCALE, Plane("codes", 8, 32)), (*range(128), *range(-128, 0))),
    QuantType.IQ4_NL: Layout((_SCALE, _NIBBLES), IQ4_LEVELS),
    QuantType.MXFP4: Layout((Exponent("scale"), _NIBBLES), E2M1_LEVELS),
    QuantType.Q2_K: Layout(
        (Plane("subs", 4, 16), Plane("codes", 2, 32), _SCALE, _MINIMUM), (0, 1, 2, 3), subs=32
    ),
    QuantType.Q3_K: Layout(
        (Plane("codes", 1, 32, 2), Plane("codes", 2, 32), Plane("subs", 4, 8), Plane("subs", 2, 4, 4), _SCALE),
        tuple(range(-4, 4)),
        subs=16,
        sub_zero=32,
    ),
    QuantType.Q4_K: Layout((_SCALE, _MINIMUM, SixBits("subs"), Plane("codes", 4, 32)), _U4, subs=16),
    QuantType.Q5_K: Layout(
        (_SCALE, _MINIMUM, SixBits("subs"), Plane("codes", 1, 32, 4), Plane("codes", 4, 32)), _U5, subs=16
    ),
    QuantType.Q6_K: Layout(
        (Plane("codes", 4, 64), Plane("codes", 2, 32, 4), Plane("subs", 8, 16), _SCALE),
        tuple(range(-32, 32)),
        subs=16,
        sub_signed=True,
    ),
    QuantType.IQ4_XS: Layout(
        (_SCALE, Plane("subs", 2, 1, 4), Plane("subs", 4, 1), Plane("codes", 4, 16)), IQ4_LEVELS, subs=8, sub_zero=32
    ),
}  # fmt: skip


def unpack(type: QuantType, blocks: np.ndarray) -> Fields:
    """The numbers in `blocks` uint8 [n, bytes per block]. Raises KeyError for types without blocks."""
    layout, n = LAYOUTS[type], len(blocks)
    fields = {
        "scale": np.zeros(n, HALF),
        "minimum": np.zeros(n, HALF),
        "subs": np.zeros((n, layout.subs), np.uint8),
        "codes": np.zeros((n, GEOMETRY[type][0]), np.uint8),
    }
    at = 0
    for part in layout.parts:
        size = _size(part, fields)
        raw = np.ascontiguousarray(blocks[:, at : at + size])
        at += size
        if isinstance(part, Half):
            fields[part.field] = raw.view(HALF)[:, 0]
        elif isinstance(part, Exponent):
            fields[part.field] = raw[:, 0]
        elif isinstance(part, SixBits):
            fields[part.field] = _unpack_six(raw)
        else:
            fields[part.field] |= _unpack_plane(raw, part) << np.uint8(part.shift)
    return Fields(**fields)


def pack(type: QuantType, fields: Fields) -> np.ndarray:
    """uint8 [n, bytes per block] that hold `fields`."""
    named = fields._asdict()
    parts: list[np.ndarray] = []
    for part in LAYOUTS[type].parts:
        numbers = named[part.field]
        if isinstance(part, Half):
            parts.append(numbers.astype(HALF, copy=False)[:, None].view(np.uint8))
        elif isinstance(part, Exponent):
            parts.append(numbers[:, None])
        elif isinstance(part, SixBits):
            parts.append(_pack_six(numbers))
        else:
            parts.append(_pack_plane(numbers >> np.uint8(part.shift), part))
    return np.concatenate(parts, axis=1)


def _size(part: Part, fields: dict[str, np.ndarray]) -> int:
    if isinstance(part, Half):
        return 2
    if isinstance(part, Exponent):
        return 1
    if isinstance(part, SixBits):
        return 12
    return fields[part.field].shape[1] * part.bits // 8


def _unpack_plane(raw: np.ndarray, plane: Plane) -> np.ndarray:
    shifts = np.arange(0, 8, plane.bits, dtype=np.uint8)[:, None]
    groups = raw.reshape(len(raw), -1, 1, plane.run) >> shifts
    return (groups & np.uint8((1 << plane.bits) - 1)).reshape(len(raw), raw.shape[1] * len(shifts))


def _pack_plane(numbers: np.ndarray, plane: Plane) -> np.ndarray:
    shifts = np.arange(0, 8, plane.bits, dtype=np.uint8)[:, None]
    groups = (numbers & np.uint8((1 << plane.bits) - 1)).reshape(len(numbers), -1, len(shifts), plane.run) << shifts
    return np.bitwise_or.reduce(groups, axis=2).reshape(len(numbers), numbers.shape[1] // len(shifts))


_SIX_ORDER = np.array([0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15])  # its own inverse
_SIX_LOW = Plane("subs", 4, 4)


def _unpack_six(raw: np.ndarray) -> np.ndarray:
    low, high = raw[:, :8] & np.uint8(63), raw[:, :8] >> np.uint8(6)
    return np.concatenate([low, _unpack_plane(raw[:, 8:], _SIX_LOW) | high << np.uint8(4)], axis=1)[:, _SIX_ORDER]


def _pack_six(numbers: np.ndarray) -> np.ndarray:
    ordered = numbers[:, _SIX_ORDER]
    head = ordered[:, :8] | (ordered[:, 8:] >> np.uint8(4)) << np.uint8(6)
    return np.concatenate([head, _pack_plane(ordered[:, 8:], _SIX_LOW)], axis=1)
