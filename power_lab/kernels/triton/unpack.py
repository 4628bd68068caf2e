"""Codes to values, in registers.

`tile` makes f16 tiles for the matrix unit, in PTX of its own, two neighbours at a time: a code's bits under the exponent of 1024 are the
f16 1024 + code, so one addition gives the level exactly, and one multiplication or multiply-add its value, scale * level + minimum. All are
rounded once to f16: values, and before them the scales and minima of sub-blocks, products of two of the file's numbers; those of blocks are
f16 in the file.

`gathered` computes the file's values in f32, for rows of tables, bit for bit what `dequantise` does, and for the interpreter.
"""

# pyright: reportPossiblyUnbound=false
# What a branch on constants leaves out is not compiled.

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl

from power_lab.kernels.triton.planes import Form

ONES = 0x64006400  # a pair of the f16 1024, in whose last ten bits 1 is a unit


@triton.constexpr_function
def word_of(book: tuple[int, ...], at: int) -> int:
    """Four levels of a code book as bytes, 128 more than they are, in an int32."""
    return int.from_bytes(bytes(level + 128 for level in book[at : at + 4]), "little", signed=True)


@triton.constexpr_function
def half(number: float) -> str:
    """Twice a number as f16, which it must be, in hexadecimal."""
    fraction, exponent = abs(number), 15
    while fraction >= 2:
        fraction, exponent = fraction / 2, exponent + 1
    while fraction < 1:
        fraction, exponent = fraction * 2, exponent - 1
    digits = (fraction - 1) * 1024
    assert digits == int(digits), f"{number} is no f16"
    assert 0 < exponent < 31, f"{number} is no f16"
    return f"{((number < 0) << 15 | exponent << 10 | int(digits)) * 0x00010001:#x}"


@triton.constexpr_function
def assembly(form: Form, at: int) -> str:
    """PTX that turns a pair of words into as many pairs of f16 as a word has fields. `at`: the words' tile of a step.

    Operands: the pairs; the words; their bytes of `high`, low in a register; scale and, where affine, minimum, f16 pairs. Where blocks are
    of 256 values instead of these the block's two f16, and the numbers of the words' sub-blocks, low in a register. Registers that are no
    pairs come twice, once for either word.
    """
    names = iter(f"${i}" for i in range(form.fields, 99))
    word = next(names)
    lines = ["{ .reg .b32 c<8>, h, t, u, s<4>, m<4>, d, e, k, a, b; .reg .b16 x, y;", f"mov.b32 k, {ONES};"]
    if form.high:
        lines.append(f"prmt.b32 h, {_twice(names)}, k, 0x5150;")
    lines += _codes(form, word, at)
    if form.sub:
        both, numbers = _twice(names), _twice(names)
        lines += [f"mov.b32 {{x, y}}, {both};", "mov.b32 d, {x, x};", "mov.b32 e, {y, y};"]
        lines += _sub_scales(form, numbers)
    else:
        lines.append(f"mov.b32 s0, {next(names)};")
        lines += [f"mov.b32 m0, {next(names)};"] if form.affine else []
    for field in range(form.fields):
        group = field * 8 // min(form.group, 8 * form.fields)
        if form.affine:
            lines.append(f"fma.rn.f16x2 ${field}, c{field}, s{group}, m{group};")
        else:
            lines.append(f"mul.rn.f16x2 ${field}, c{field}, s{group};")
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _twice(names: Iterator[str]) -> str:
    return (next(names), next(names))[0]


@triton.constexpr_function
def _codes(form: Form, word: str, at: int) -> list[str]:
    """c0, c1 ...: of every field the levels of both words, exactly. Bits under the exponent of 1024 are that much more than they mean."""
    if form.book:
        return _book(form, word)
    if form.low == 8:
        lines = [f"mov.b32 a, {half(-1024.0 - form.zero)};"]
        for field, order in enumerate((0x5250, 0x5351)):
            lines += [f"prmt.b32 t, {word}, k, {order:#x};", f"add.rn.f16x2 c{field}, t, a;"]
        return lines
    lines = []
    apart = 8 // form.low
    for field in range(form.fields):
        if field == apart:
            lines.append(f"shr.b32 u, {word}, 8;")
        source, shift = (word, field * form.low) if field < apart else ("u", (field - apart) * form.low)
        lines.append(_masked("t", source, form.low, shift))
        raised = 1024.0 / (1 << shift)
        if form.high:
            up = (at * form.fields + field) * form.high
            more = (1 << form.low) / (1 << up)
            lines.append(_masked(f"c{field}", "h", form.high, up))
            lines += [f"mov.b32 a, {half(more)};", f"mov.b32 b, {half(-1024.0 * more - raised - form.zero)};"]
            lines.append(f"fma.rn.f16x2 b, c{field}, a, b;")
        else:
            lines.append(f"mov.b32 b, {half(-raised - form.zero)};")
        lines += [f"mov.b32 a, {half(1 / (1 << shift))};", f"fma.rn.f16x2 c{field}, t, a, b;"]
    return lines


@triton.constexpr_function
def _masked(to: str, source: str, bits: int, shift: int) -> str:
    """Some bits of both halves, under the exponent of 1024: (source & mask) | k."""
    return f"lop3.b32 {to}, {source}, {((1 << bits) - 1 << shift) * 0x00010001:#x}, k, 0xea;"


@triton.constexpr_function
def _sub_scales(form: Form, numbers: str) -> list[str]:
    """s0, s1 ... and m0, m1 ...: the scales and minima of the words' sub-blocks, rounded once, from the block's d and e."""
    lines = [f"mov.b32 a, {half(-1024.0 - form.sub_zero)};"]
    apart = form.affine and form.sub == 32  # minima have bytes of their own, each behind its scale's
    for group in range(form.numbers // (1 + apart)):
        order = 0x5050 + group * (1 + apart) * 0x0101
        lines.append(f"prmt.b32 t, {numbers}, k, {order:#x};")
        if form.affine and not apart:
            lines += [_masked("u", "t", 4, 4), _masked("t", "t", 4, 0), f"mov.b32 b, {half(1 / 16)};"]
            lines += [f"mov.b32 m{group}, {half(-64.0)};", f"fma.rn.f16x2 u, u, b, m{group};"]
        elif apart:
            lines += [f"prmt.b32 u, {numbers}, k, {order + 0x0101:#x};", "add.rn.f16x2 u, u, a;"]
        lines += ["add.rn.f16x2 t, t, a;", f"mul.rn.f16x2 s{group}, t, d;"]
        lines += [f"mul.rn.f16x2 m{group}, u, e;"] if form.affine else []
    return lines


@triton.constexpr_function
def _book(form: Form, word: str) -> list[str]:
    """Four codes of either word looked up at a time: by their low bits in both halves of the book, of which their top bits choose."""
    words = [f"{word_of(form.book, at) & 0xFFFFFFFF:#x}" for at in (0, 4, 8, 12)]
    lines = [f"mov.b32 c{4 + i}, {w};" for i, w in enumerate(words)]
    for lane in range(2):
        lines += [
            f"shr.b32 u, {word}, {16 * lane};",
            "and.b32 t, u, 0x7777;",
            f"prmt.b32 c{lane}, c4, c5, t;",
            "prmt.b32 c2, c6, c7, t;",
            "shr.b32 t, u, 1;",
            "and.b32 t, t, 0x4444;",
            "or.b32 t, t, 0x3210;",
            f"prmt.b32 c{lane}, c{lane}, c2, t;",
        ]
    lines += ["prmt.b32 t, c0, c1, 0x5410;", "prmt.b32 u, c0, c1, 0x7632;", f"mov.b32 a, {half(-1024.0 - form.zero)};"]
    for field in range(4):
        lines.append(f"prmt.b32 c{field}, {'t' if field < 2 else 'u'}, k, {0x5250 if field % 2 == 0 else 0x5351:#x};")
        lines.append(f"add.rn.f16x2 c{field}, c{field}, a;")
    return lines


@triton.constexpr_function
def constraints(form: Form) -> str:
    numbers = 4 if form.sub else 1 + form.affine
    return ",".join(["=r"] * form.fields + ["r"] * (1 + 2 * (form.high > 0) + numbers))


@triton.jit
def _f32(scale, FORM: tl.constexpr):
    """A stored scale as f32."""
    if FORM.exponent:
        e = scale.to(tl.int32)
        return tl.where(e > 1, (e - 1) << 23, 0x200000 << (e & 1)).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def _scales(planes, block, at, mask, FORM: tl.constexpr):
    """f32 scale and minimum of blocks at these places of their planes, and of sub-blocks."""
    if FORM.sub > 0:
        scale = tl.load(planes[2] + 2 * block, mask=mask, other=0).to(tl.float32)
        minimum = tl.load(planes[2] + 2 * block + 1, mask=mask, other=0).to(tl.float32)
        APART: tl.constexpr = FORM.affine and FORM.sub == 32
        sub = tl.load(planes[4] + at * (1 + APART), mask=mask, other=0).to(tl.int32)
        if APART:
            minimum *= tl.load(planes[4] + at * 2 + 1, mask=mask, other=0).to(tl.float32)
        elif FORM.affine:
            minimum *= (sub >> 4).to(tl.float32)
            sub = sub & 15
        return scale * (sub - FORM.sub_zero).to(tl.float32), minimum
    else:
        scale = _f32(tl.load(planes[2] + at, mask=mask, other=0), FORM)
        minimum = scale
        if FORM.affine:
            minimum = tl.load(planes[3] + at, mask=mask, other=0).to(tl.float32)
        return scale, minimum


@triton.jit
def gathered(planes, row, k, N, mask, FORM: tl.constexpr):
    """f32 values k of rows `row` (int64): any shapes that broadcast."""
    place = k % FORM.tile
    t = (k // FORM.tile).to(tl.int64)
    eight = place // 8
    field = eight % FORM.fields
    word = place % 8 // 2 * (FORM.words // 4) + eight // FORM.fields * 2 + place % 2
    code = tl.load(planes[0] + (t * N + row) * FORM.words + word, mask=mask, other=0).to(tl.int32) >> (field * FORM.low)
    code = code & ((1 << FORM.low) - 1)
    if FORM.high > 0:
        step = (k // FORM.depth).to(tl.int64)
        high = tl.load(planes[1] + (step * N + row) * 32 + word, mask=mask, other=0).to(tl.int32)
        field += k % FORM.depth // FORM.tile * FORM.fields
        code |= ((high >> (field * FORM.high)) & ((1 << FORM.high) - 1)) << FORM.low
    at = (t * N + row) * (FORM.tile // FORM.group) + place // FORM.group
    block = (k // FORM.block).to(tl.int64) * N + row
    scale, minimum = _scales(planes, block, at, mask, FORM)
    level = code - FORM.zero
    if FORM.book is not None:
        W0: tl.constexpr = word_of(FORM.book, 0)
        W1: tl.constexpr = word_of(FORM.book, 4)
        W2: tl.constexpr = word_of(FORM.book, 8)
        W3: tl.constexpr = word_of(FORM.book, 12)
        four = tl.where(code < 8, tl.where(code < 4, W0, W1), tl.where(code < 12, W2, W3))
        level = ((four >> ((code & 3) * 8)) & 255) - 128
    value = scale * level.to(tl.float32)
    return value + minimum if FORM.affine else value


@triton.jit
def _over_lanes(numbers, BN: tl.constexpr, FORM: tl.constexpr):
    """[BN, groups] to [BN, words]: each lane's words have them all, in order."""
    GROUPS: tl.constexpr = numbers.shape[1]
    wide = tl.broadcast_to(numbers[:, None, :, None], (BN, 4, GROUPS, FORM.words // (4 * GROUPS)))
    return tl.reshape(wide, (BN, FORM.words))


@triton.jit
def _halves(four):
    """Four bytes as twice two, in the lower half of a register."""
    return tl.join(four, four >> 16)


@triton.jit
def tile(
    planes, k, HALF: tl.constexpr, n, nm, N, BN: tl.constexpr, FORM: tl.constexpr, POLICY: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """f16 [BN, tile] values from depth k on, the HALF-th tile of a step, of rows n int64; 0 in rows outside of the mask nm."""
    if INTERPRET:
        inside = tl.arange(0, FORM.tile)
        return gathered(planes, n[:, None], k + inside[None, :], N, nm[:, None], FORM).to(tl.float16)
    else:
        mask = nm[:, None]
        row = (k // FORM.tile).to(tl.int64) * N + n
        word = tl.arange(0, FORM.words)[None, :]
        low = tl.load(planes[0] + row[:, None] * FORM.words + word, mask=mask, other=0, eviction_policy=POLICY)
        inputs = (low,)
        if FORM.high > 0:
            step = (k // FORM.depth).to(tl.int64) * N + n
            four = step[:, None] * 8 + tl.arange(0, 8)[None, :]
            high = tl.load(planes[1].to(tl.pointer_type(tl.int32)) + four, mask=mask, other=0, eviction_policy=POLICY)
            inputs = inputs + (tl.reshape(tl.broadcast_to(_halves(high)[:, :, :, None], (BN, 8, 2, 2)), (BN, 32)),)  # noqa: RUF005
        if FORM.sub > 0:
            block = (k // FORM.block).to(tl.int64) * N + n
            both = tl.load(planes[2].to(tl.pointer_type(tl.int32)) + block[:, None], mask=mask, other=0)
            four = row[:, None] * FORM.numbers + tl.arange(0, FORM.numbers)[None, :]
            numbers = tl.load(planes[4].to(tl.pointer_type(tl.int32)) + four, mask=mask, other=0)
            if FORM.numbers == 1:
                numbers = tl.join(_halves(numbers), _halves(numbers >> 8))
            elif FORM.numbers == 2:
                numbers = _halves(numbers)
            numbers = tl.reshape(numbers, (BN, 4))
            inputs = inputs + (_over_lanes(both, BN, FORM), _over_lanes(numbers, BN, FORM))  # noqa: RUF005
        else:
            GROUPS: tl.constexpr = FORM.tile // FORM.group
            at = row[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
            scale = tl.load(planes[2] + at, mask=mask, other=0)
            if FORM.exponent:  # those below the smallest f16 become 0
                scale = _f32(scale, FORM).to(tl.float16)
            inputs = inputs + (_over_lanes(scale, BN, FORM),)  # noqa: RUF005
            if FORM.affine:
                minimum = tl.load(planes[3] + at, mask=mask, other=0)
                inputs = inputs + (_over_lanes(minimum, BN, FORM),)  # noqa: RUF005
        return _joined(_pairs(inputs, HALF, FORM), BN, FORM)


@triton.jit
def _pairs(inputs, HALF: tl.constexpr, FORM: tl.constexpr):
    """f16 [BN, words] of each field."""
    ASM: tl.constexpr = assembly(FORM, HALF)
    if FORM.fields == 2:
        return tl.inline_asm_elementwise(
            ASM, constraints(FORM), inputs, dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif FORM.fields == 4:
        return tl.inline_asm_elementwise(
            ASM, constraints(FORM), inputs, dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            ASM, constraints(FORM), inputs,
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _joined(f, BN: tl.constexpr, FORM: tl.constexpr):
    """[BN, tile] of the fields f, which are [BN, lanes, pairs, 2]: pairs, fields, lanes, 2. Nothing leaves its lane."""
    COUNTED: tl.constexpr = FORM.words // 8
    if FORM.fields == 2:
        x = tl.reshape(tl.join(f[0], f[1]), (BN, 4, COUNTED, 2, 2))
        x = tl.permute(x, (0, 2, 4, 1, 3))
    elif FORM.fields == 4:
        x = tl.join(tl.join(f[0], f[2]), tl.join(f[1], f[3]))  # the last axis added is the lowest bit of the field
        x = tl.reshape(x, (BN, 4, COUNTED, 2, 2, 2))
        x = tl.permute(x, (0, 2, 4, 5, 1, 3))
    else:
        even = tl.join(tl.join(f[0], f[4]), tl.join(f[2], f[6]))
        odd = tl.join(tl.join(f[1], f[5]), tl.join(f[3], f[7]))
        x = tl.reshape(tl.join(even, odd), (BN, 4, COUNTED, 2, 2, 2, 2))
        x = tl.permute(x, (0, 2, 4, 5, 6, 1, 3))
    return tl.reshape(x, (BN, FORM.tile))
