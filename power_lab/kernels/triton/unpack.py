"""Codes to values, in registers: bit for bit what `dequantise` computes, (scale * sub) * level - (minimum * sub) in f32.

An integer of at most 23 bits becomes a float by being put under the exponent of 2^23, from which 2^23 is then taken: two cheap
instructions where a conversion runs at a quarter of the rate. So a code stays at the bits where it was packed, f, and counts 2^f times
as much; its scale is 2^-f of itself. Both are exact, so their product is the product's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.quants import QuantType

GROUP = tl.constexpr(32)
MAGIC = tl.constexpr(0x4B000000)  # 2^23 in f32
MAGIC_VALUE = tl.constexpr(8388608)
EXPONENT = tl.constexpr(int(QuantType.MXFP4))


@triton.jit
def scales(planes, g, n, mask, N, FORM: tl.constexpr):
    """f32 scale and offset of group g of 32 (of FORM's sub-block at g where it is smaller) of rows n; any shapes that broadcast."""
    BLOCK: tl.constexpr = FORM[3]
    SUB: tl.constexpr = FORM[4]
    AFFINE: tl.constexpr = FORM[5]
    UNIT: tl.constexpr = 16 if SUB == 16 else 32
    at = (g // (BLOCK // UNIT)).to(tl.int64) * N + n
    if FORM[6] == EXPONENT:
        e = tl.load(planes[2] + at, mask=mask, other=0).to(tl.int32)
        scale = tl.where(e > 1, (e - 1) << 23, 0x200000 << (e & 1)).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(planes[2] + at, mask=mask, other=0.0).to(tl.float32)
    offset = scale
    if AFFINE:
        offset = tl.load(planes[3] + at, mask=mask, other=0.0).to(tl.float32)
    if SUB > 0:
        sub_at = g.to(tl.int64) * N + n
        sub = tl.load(planes[4] + sub_at, mask=mask, other=0)
        if AFFINE and SUB == 16:
            offset = -(offset * (sub >> 4).to(tl.float32))
            sub = sub & 15
        elif AFFINE:
            offset = -(offset * tl.load(planes[5] + sub_at, mask=mask, other=0).to(tl.float32))
        scale = scale * sub.to(tl.float32)
    return scale, offset


@triton.jit
def values(planes, low, high, scale, offset, FIELD: tl.constexpr, HIGH_FIELD: tl.constexpr, FORM: tl.constexpr):
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
        return tl.load(planes[6] + ((low >> AT) & 15)) * scale
    else:
        bits = (low & (((1 << LOW) - 1) << AT)) | MAGIC
        if HIGH > 0:
            MOVE: tl.constexpr = AT + LOW - HIGH_FIELD * HIGH
            moved = high << MOVE if MOVE >= 0 else high >> -MOVE
            bits = bits | (moved & (((1 << HIGH) - 1) << (AT + LOW)))
        whole = bits.to(tl.float32, bitcast=True) - (MAGIC_VALUE + (ZERO << AT))
        product = whole * (scale * (1.0 / (1 << AT)))
        return product + offset if FORM[5] else product
