"""Codes to values, in registers: bit for bit what `dequantise` computes, (scale * sub) * level - (minimum * sub) in f32.

An integer of at most 23 bits becomes a float by being put under the exponent of 2^23, from which 2^23 is then taken: two cheap
instructions where a conversion runs at a quarter of the rate. So a code stays at the bits where it was packed, f, and counts 2^f times
as much; its scale is 2^-f of itself. Both are exact, so their product is the product's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.layouts import IQ4_LEVELS
from power_lab.kernels.quants import QuantType

MAGIC = tl.constexpr(0x4B000000)  # 2^23 in f32
MAGIC_VALUE = tl.constexpr(8388608.0)
BOOK_0, BOOK_1, BOOK_2, BOOK_3 = (  # of IQ4: four bytes each, 128 more than the level
    tl.constexpr(int.from_bytes(bytes(level + 128 for level in IQ4_LEVELS[i : i + 4]), "little", signed=True))
    for i in (0, 4, 8, 12)
)
EXPONENT = tl.constexpr(int(QuantType.MXFP4))


@triton.jit
def of_block(planes, b, n, mask, N, FORM: tl.constexpr):
    """Scale and minimum, as stored, of block b of rows n: any shapes that broadcast. What a type lacks is stood in for by its scale."""
    at = N * b + n.to(tl.int64)
    scale = tl.load(planes[2] + at, mask=mask, other=0)
    minimum = scale
    if FORM[5]:
        minimum = tl.load(planes[3] + at, mask=mask, other=0)
    return scale, minimum


@triton.jit
def of_sub(block, planes, s, n, mask, N, FORM: tl.constexpr):
    """(scale, minimum, and the two integers of sub-block s of rows n), as stored, of what `of_block` returned."""
    sub, sub_minimum = block[0], block[0]
    if FORM[4] > 0:
        at = N * s + n.to(tl.int64)
        sub = tl.load(planes[4] + at, mask=mask, other=0)
        if FORM[5] and FORM[4] == 32:
            sub_minimum = tl.load(planes[5] + at, mask=mask, other=0)
    return block[0], block[1], sub, sub_minimum


@triton.jit
def scales(stored, FORM: tl.constexpr):
    """f32 scale and offset of what `of_sub` returned."""
    if FORM[6] == EXPONENT:
        e = stored[0].to(tl.int32)
        scale = tl.where(e > 1, (e - 1) << 23, 0x200000 << (e & 1)).to(tl.float32, bitcast=True)
    else:
        scale = stored[0].to(tl.float32)
    offset = scale
    if FORM[5]:
        offset = stored[1].to(tl.float32)
    if FORM[4] > 0:
        sub = stored[2]
        if FORM[5] and FORM[4] == 16:
            offset = -(offset * (sub >> 4).to(tl.float32))
            sub = sub & 15
        elif FORM[5]:
            offset = -(offset * stored[3].to(tl.float32))
        scale = scale * sub.to(tl.float32)
    return scale, offset


@triton.jit
def values(low, high, scale, offset, FIELD: tl.constexpr, HIGH_FIELD: tl.constexpr, FORM: tl.constexpr):
    """f32 values of one field of the words `low` (int32) and `high` (int32); `scale` and `offset` broadcast to them."""
    LOW: tl.constexpr = FORM[0]
    HIGH: tl.constexpr = FORM[1]
    ZERO: tl.constexpr = FORM[2]
    AT: tl.constexpr = FIELD * LOW
    if FORM[6] == EXPONENT:
        # OCP's E2M1 under f32's exponent field, which makes it 2^-127 of twice its value, subnormal numbers included.
        code = low >> AT
        level = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 1.7014118346046923e38
        return level * scale
    elif FORM[7]:
        upper = ((low >> AT) & 8) != 0
        word = tl.where(((low >> AT) & 4) != 0, tl.where(upper, BOOK_3, BOOK_1), tl.where(upper, BOOK_2, BOOK_0))
        level = ((word >> (((low >> AT) & 3) << 3)) & 255) | MAGIC
        return (level.to(tl.float32, bitcast=True) - (MAGIC_VALUE + 128.0)) * scale
    else:
        bits = (low & (((1 << LOW) - 1) << AT)) | MAGIC
        if HIGH > 0:
            MOVE: tl.constexpr = AT + LOW - HIGH_FIELD * HIGH
            moved = high << MOVE if MOVE >= 0 else high >> -MOVE
            bits = bits | (moved & (((1 << HIGH) - 1) << (AT + LOW)))
        whole = bits.to(tl.float32, bitcast=True) - (MAGIC_VALUE + (ZERO << AT))
        product = whole * (scale * (1.0 / (1 << AT)))
        return product + offset if FORM[5] else product
