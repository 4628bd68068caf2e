"""Stored codes as operands of the matrix unit, without their scales: integers in bf16, exact, and what their sums are scaled by.

A code of up to 7 bits under bf16's exponent of 2^7 is 128 + code, of which one packed subtraction takes 128 + zero. One of 8 bits gives
128 + its lower seven and, by its top bit in the exponent's lowest place, 128 or 256, whose difference it stands for. Words lie so that a
shift and a mask make an operand of a tile of words (`planes`): nothing leaves its lane. In PTX of its own; the interpreter computes the
same numbers in plain arithmetic.
"""

# pyright: reportPossiblyUnbound=false
# What a branch on constants leaves out is not compiled.

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.triton import unpack
from power_lab.kernels.triton.planes import Form

ONES = 0x43004300  # 128 twice, bf16


@triton.constexpr_function
def integers_assembly(form: Form, run: int) -> str:
    """PTX that turns two words of a run into a pair of bf16 integers for each of its chunks. Operands: the pairs; words, high words."""
    low, high = f"${form.fields}", f"${form.fields + 1}"
    lines = ["{ .reg .b32 c<8>, t, u;", f"mov.b32 c2, {ONES + 0x10001 * form.zero:#x};"]
    if form.book:
        lines += unpack.book_lookup(form, low)
    for field in range(form.fields):
        if form.book:
            lines.append(f"prmt.b32 t, c0, c1, {field * 0x11 | (field + 4) * 0x1100:#x};")
        else:
            lines.append(f"shr.b32 t, {low}, {field * form.low};")
        if unpack.bits(form) == 6:
            source, move = (high, 6 * run) if field == 3 else (low, 6 * field)
            lines.append(f"shr.b32 t, {source}, {move};")
            lines.append(f"lop3.b32 t, t, {0x000F000F if field == 2 else 0x003F003F:#x}, {ONES:#x}, 0xea;")
            if field == 2:
                lines.append(f"shr.b32 u, {high}, {8 + 2 * run};")
                lines.append("lop3.b32 t, u, 0x00300030, t, 0xea;")
            lines.append(f"sub.rn.bf16x2 ${field}, t, c2;")
            continue
        if unpack.bits(form) == 8:
            lines.append(
                f"lop3.b32 u, t, 0x00800080, {ONES ^ 0x00800080:#x}, 0x6a;"
            )  # (a & b) ^ c: 256 for codes below 128
            lines.append(f"lop3.b32 t, t, 0x007f007f, {ONES:#x}, 0xea;")  # a & b | c
            lines.append(f"sub.rn.bf16x2 ${field}, t, u;")
            continue
        lines.append(f"lop3.b32 t, t, {((1 << form.low) - 1) * 0x10001:#x}, {ONES:#x}, 0xea;")
        if form.high:
            move = (run * form.fields + field) * form.high - form.low
            lines.append(f"{'shr' if move >= 0 else 'shl'}.b32 u, {high}, {abs(move)};")
            lines.append(f"lop3.b32 t, u, {((1 << form.high) - 1 << form.low) * 0x10001:#x}, t, 0xea;")
        lines.append(f"sub.rn.bf16x2 ${field}, t, c2;")
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def integers_constraints(form: Form) -> str:
    return ",".join(["=r"] * form.fields + ["r"] * (2 if form.high else 1))


@triton.jit
def integers(words, high, RUN: tl.constexpr, FORM: tl.constexpr):
    """bf16 [BN, 16] for each chunk of a run, of its words int16 [BN, 16] and the tile's high words."""
    ASM: tl.constexpr = integers_assembly(FORM, RUN)
    inputs = (words, high) if FORM.high > 0 else (words,)
    if FORM.fields == 2:
        return tl.inline_asm_elementwise(
            ASM, integers_constraints(FORM), inputs, dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif FORM.fields == 4:
        return tl.inline_asm_elementwise(
            ASM, integers_constraints(FORM), inputs, dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            ASM, integers_constraints(FORM), inputs,
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def codes(planes, k, n, nm, N, BN: tl.constexpr, FORM: tl.constexpr, POLICY: tl.constexpr):
    """The words of the tile at depth k of rows n int64: int16 [BN, 16] for each run, and its high words (or others, where it has none)."""
    RUNS: tl.constexpr = FORM.words // 16
    row = (k // FORM.tile).to(tl.int64) * N + n
    at = planes[0] + row[:, None] * FORM.words + tl.arange(0, FORM.words)[None, :]
    low = tl.load(at, mask=nm[:, None], other=0, eviction_policy=POLICY)
    if RUNS == 2:
        # lane, run, half, which of a pair: to half, lane, which of a pair, run
        runs = tl.split(tl.permute(tl.reshape(low, (BN, 4, 2, 2, 2)), (0, 3, 1, 4, 2)))
        runs = (tl.reshape(runs[0], (BN, 16)), tl.reshape(runs[1], (BN, 16)))
    else:
        tl.static_assert(RUNS == 4)
        even, odd = tl.split(tl.permute(tl.reshape(low, (BN, 4, 2, 2, 2, 2)), (0, 4, 1, 5, 2, 3)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        runs = (
            tl.reshape(first, (BN, 16)), tl.reshape(second, (BN, 16)), tl.reshape(third, (BN, 16)), tl.reshape(fourth, (BN, 16))
        )  # fmt: skip
    high = runs[0]
    if FORM.high > 0:
        at = planes[1] + row[:, None] * 16 + tl.arange(0, 16)[None, :]
        high = tl.load(at, mask=nm[:, None], other=0, eviction_policy=POLICY)
        high = tl.reshape(tl.permute(tl.reshape(high, (BN, 4, 2, 2)), (0, 2, 1, 3)), (BN, 16))
    return runs, high


# --- factors ----------------------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def width(form: Form) -> int:
    """Bytes of a group in the planes of scales."""
    return 1 if form.sub or form.exponent else 2


@triton.constexpr_function
def span(form: Form) -> int:
    """Bytes of a tile's groups in the planes of scales: 4, 8 or 16."""
    return form.tile // form.group * width(form)


@triton.jit
def _vector(plane, row, nm, BYTES: tl.constexpr):
    """What rows hold of a tile in a plane, as two integers; the second of less than 16 bytes is the first again."""
    if BYTES == 4:
        first = tl.load(plane.to(tl.pointer_type(tl.int32), bitcast=True) + row, mask=nm, other=0)
        second = first
    elif BYTES == 8:
        first = tl.load(plane.to(tl.pointer_type(tl.int64), bitcast=True) + row, mask=nm, other=0)
        second = first
    else:
        at = plane.to(tl.pointer_type(tl.int64), bitcast=True) + row * 2
        first = tl.load(at, mask=nm, other=0)
        second = tl.load(at + 1, mask=nm, other=0)
    return first, second


@triton.jit
def held(planes, k, n, nm, N, FORM: tl.constexpr, INTERPRET: tl.constexpr):
    """What `factors` makes the scales of a tile of: integers [BN], loaded a tile ahead since they are too narrow for the pipeline."""
    if INTERPRET:
        return 0, 0, 0, 0, 0
    else:
        row = (k // FORM.tile).to(tl.int64) * N + n
        a, b = _vector(planes[4 if FORM.sub > 0 else 2], row, nm, span(FORM))
        c, d, of_block = a, b, a
        if FORM.affine:
            if FORM.sub == 0:
                c, d = _vector(planes[3], row, nm, span(FORM))
            elif FORM.sub == 32:
                c, d = _vector(planes[5], row, nm, span(FORM))
        if FORM.sub > 0:
            at = (k // FORM.block).to(tl.int64) * N + n
            of_block = tl.load(planes[2].to(tl.pointer_type(tl.int16), bitcast=True) + at, mask=nm, other=0).to(
                tl.int32
            )
            if FORM.affine:
                minimum = tl.load(planes[3].to(tl.pointer_type(tl.int16), bitcast=True) + at, mask=nm, other=0)
                of_block = (of_block & 0xFFFF) | minimum.to(tl.int32) << 16
        return a, b, c, d, of_block


@triton.constexpr_function
def factor_assembly(form: Form, group: int, minimum: bool) -> str:
    """PTX for the f32 scale or minimum of a group. Operands: the factor; an integer of `held`, and the block's, if any."""
    offset = group * width(form) % 8
    lines = ["{ .reg .b32 w, x, t; .reg .b16 h, i; .reg .f32 f, d, e; .reg .pred p;"]
    if span(form) == 4:
        lines.append("mov.b32 w, $1;")
    else:
        lines.append(f"mov.b64 {{{'w, x' if offset < 4 else 'x, w'}}}, $1;")
    byte = offset % 4
    if form.exponent:
        lines += [
            f"prmt.b32 t, w, 0, {0x4440 | byte:#x};",
            "sub.s32 x, t, 1;",
            "shl.b32 x, x, 23;",
            "shl.b32 w, 0x200000, t;",
        ]
        lines += ["setp.gt.s32 p, t, 1;", "selp.b32 w, x, w, p;", "mov.b32 $0, w;"]
    elif not form.sub:
        lines += ["mov.b32 {h, i}, w;", f"cvt.f32.f16 $0, {'i' if byte else 'h'};"]
    else:
        shared = form.affine and form.sub == 16  # a byte holds both
        if shared:
            lines += ["shr.b32 w, w, 4;"] * minimum + ["and.b32 w, w, 0x0f0f0f0f;"]
        elif not form.affine:
            lines.append("xor.b32 w, w, 0x80808080;")
        zero = 32768 + (0 if form.affine else 128)
        lines += [f"prmt.b32 t, w, 0x47, {0x4505 | byte << 4:#x};", "mov.b32 f, t;"]  # 32768 + the byte
        lines += ["mov.b32 {h, i}, $2;", f"cvt.f32.f16 d, {'i' if minimum else 'h'};"]
        lines += ["neg.f32 d, d;"] * minimum
        lines += [f"mul.rn.f32 e, d, {-zero:.1f};", "fma.rn.f32 $0, f, d, e;"]  # exact, both
    return "\n".join([*lines, "}"])


@triton.jit
def _factor(word, of_block, GROUP: tl.constexpr, MINIMUM: tl.constexpr, FORM: tl.constexpr):
    ASM: tl.constexpr = factor_assembly(FORM, GROUP, MINIMUM)
    WORD: tl.constexpr = "r" if span(FORM) == 4 else "l"
    if FORM.sub > 0:
        return tl.inline_asm_elementwise(
            ASM, "=f," + WORD + ",r", (word, of_block), dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(ASM, "=f," + WORD, (word,), dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def factors(
    planes, stored, k, GROUP: tl.constexpr, n, nm, N, BN: tl.constexpr, BM: tl.constexpr, FORM: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """f32 [BN, BM] scales and minima (where there are none, the scales again) of a group of the tile at depth k, equal along BM.

    They are made where sums lie, of what `held` gave: one exchange among lanes for all groups of a tile.
    """
    if INTERPRET:
        at = k + GROUP * FORM.group + tl.zeros((BN,), tl.int32)
        scale, minimum = unpack.scales(planes, n, at, N, nm, FORM)
        return tl.broadcast_to(scale[:, None], (BN, BM)), tl.broadcast_to(minimum[:, None], (BN, BM))
    else:
        SECOND: tl.constexpr = GROUP * width(FORM) // 8
        of_block = tl.broadcast_to(stored[4][:, None], (BN, BM))
        scale = _factor(tl.broadcast_to(stored[SECOND][:, None], (BN, BM)), of_block, GROUP, False, FORM)
        minimum = scale
        if FORM.affine:
            minimum = _factor(tl.broadcast_to(stored[2 + SECOND][:, None], (BN, BM)), of_block, GROUP, True, FORM)
        return scale, minimum
