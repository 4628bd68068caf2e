"""Codes to values, in registers: bit for bit what `dequantise` computes, (scale * sub) * level - (minimum * sub) in f32.

`tile` makes bf16 tiles for the matrix unit, in PTX of its own: two neighbours at a time, and of each code a float by one byte permutation,
where a conversion runs at a quarter of the rate. A byte c under the exponent of 2^7 or 2^15 is the float `base` + c, and with the offset
-(base + zero) * scale, which is exact, one fused multiply-add gives scale * (c - zero) rounded once. `gathered` computes the same values in
plain arithmetic, for rows of tables and for the interpreter.
"""

# pyright: reportPossiblyUnbound=false
# What a branch on constants leaves out is not compiled.

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.triton.planes import Form


@triton.constexpr_function
def base(form: Form) -> float:
    """What a code is raised by as it becomes a float."""
    return 32768.0 if bits(form) == 8 else 128.0


@triton.constexpr_function
def bits(form: Form) -> int:
    return 8 if form.book else form.low + form.high


@triton.constexpr_function
def fused(form: Form) -> bool:
    """Whether (base + zero) * scale is exact in f32: a scale has 11 bits, 7 more with a sub-block's, and base + zero 9 at most."""
    return not (form.sub and bits(form) == 8)


@triton.constexpr_function
def word_of(book: tuple[int, ...], at: int) -> int:
    """Four levels of a code book as bytes, 128 more than they are, in an int32."""
    return int.from_bytes(bytes(level + 128 for level in book[at : at + 4]), "little", signed=True)


@triton.constexpr_function
def assembly(form: Form, half: int) -> str:
    """PTX that turns two words into as many pairs of bf16 as a word has fields.

    Operands: the pairs; two words (and their bytes of `high` as 16 bits each, of tile `half` of a step); the scales of the codes' groups,
    each twice, once for either word, which share them; where `fused` offsets -(base + zero) * scale in the same way; where affine minima.
    """
    inputs = iter(f"${i}" for i in range(form.fields, 64))
    count = scales_of_pair(form)
    word = next(inputs)
    high = next(inputs) if form.high else ""
    scales, offsets, minima = (
        [(next(inputs), next(inputs))[0] for _ in range(count if there else 0)]
        for there in (True, fused(form), form.affine)
    )
    lines = ["{ .reg .b32 c<8>, t, u; .reg .f32 f<2>;"]
    lines += _book(form, word) if form.book else _bytes(form, word, high, half)
    for field in range(form.fields):
        group = field * count // form.fields
        for lane in range(2):
            register, byte = _place(form, field, lane)
            lines.append(_float(form, f"f{lane}", register, byte))
            if fused(form):
                lines.append(f"fma.rn.f32 f{lane}, f{lane}, {scales[group]}, {offsets[group]};")
            else:
                lines.append(f"sub.rn.f32 f{lane}, f{lane}, {base(form) + form.zero:.1f};")
                lines.append(f"mul.rn.f32 f{lane}, f{lane}, {scales[group]};")
            if form.affine:
                lines.append(f"add.rn.f32 f{lane}, f{lane}, {minima[group]};")
        lines.append(f"cvt.rn.bf16x2.f32 ${field}, f1, f0;")
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _place(form: Form, field: int, lane: int) -> tuple[str, int]:
    """Register and byte where `_bytes` or `_book` leave the code of a field of word `lane`."""
    if form.book:
        return f"c{lane}", field
    layers = 8 // form.low
    return f"c{field % layers}", field // layers + 2 * lane


@triton.constexpr_function
def _bytes(form: Form, word: str, high: str, half: int) -> list[str]:
    """Codes apart: field f of the words becomes byte f // layers of either half of register f % layers."""
    layers = 8 // form.low
    lines = []
    for layer in range(layers):
        lines.append(f"shr.b32 c{layer}, {word}, {layer * form.low};")
        if form.low < 8:
            lines.append(f"and.b32 c{layer}, c{layer}, {((1 << form.low) - 1) * 0x01010101:#x};")
        for field in range(layer, form.fields, layers) if form.high else ():
            target = field // layers * 8 + form.low
            move = target - (half * form.fields + field) * form.high
            lines.append(f"{'shl' if move >= 0 else 'shr'}.b32 t, {high}, {abs(move)};")
            lines.append(f"and.b32 t, t, {((1 << form.high) - 1 << target) * 0x00010001:#x};")
            lines.append(f"or.b32 c{layer}, c{layer}, t;")
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
    return lines


@triton.constexpr_function
def _float(form: Form, to: str, register: str, byte: int) -> str:
    """The float base + code: the exponent, and the code at the top of the fraction, or a byte lower where it has 8 bits."""
    if bits(form) == 8:
        return f"prmt.b32 t, {register}, 0x47, {0x4505 | byte << 4:#x}; mov.b32 {to}, t;"
    return f"prmt.b32 t, {register}, 0x43, {0x4055 | byte << 8:#x}; mov.b32 {to}, t;"


@triton.constexpr_function
def constraints(form: Form) -> str:
    inputs = ["r"] * (2 if form.high else 1) + ["f"] * (2 * scales_of_pair(form) * (1 + fused(form) + form.affine))
    return ",".join(["=r"] * form.fields + inputs)


@triton.jit
def _f32(scale, FORM: tl.constexpr):
    """A stored scale as f32."""
    if FORM.exponent:
        e = scale.to(tl.int32)
        return tl.where(e > 1, (e - 1) << 23, 0x200000 << (e & 1)).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def of_blocks(planes, at, mask, FORM: tl.constexpr):
    """Scale and minimum as stored, at these places of their planes; what a type lacks is stood in for by its scale."""
    scale = tl.load(planes[2] + at, mask=mask, other=0)
    minimum = scale
    if FORM.affine:
        minimum = tl.load(planes[3] + at, mask=mask, other=0)
    return scale, minimum


@triton.jit
def of_rows(planes, k, n, nm, N, FORM: tl.constexpr):
    """[BN, 1] of the blocks of 256 that depth k lies in."""
    at = tl.full((1,), k // FORM.block, tl.int64) * N + n
    return of_blocks(planes, at[:, None], nm[:, None], FORM)


@triton.jit
def _scales(planes, stored, at, mask, FORM: tl.constexpr):
    """f32 scale and offset of what `of_blocks` gave, and of the sub-blocks at these places of their planes."""
    scale = _f32(stored[0], FORM)
    offset = scale
    if FORM.affine:
        offset = stored[1].to(tl.float32)
    if FORM.sub > 0:
        sub = tl.load(planes[4] + at, mask=mask, other=0)
        if FORM.affine and FORM.sub == 16:
            offset = -(offset * (sub >> 4).to(tl.float32))
            sub = sub & 15
        elif FORM.affine:
            offset = -(offset * tl.load(planes[5] + at, mask=mask, other=0).to(tl.float32))
        scale = scale * sub.to(tl.float32)
    return scale, offset


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
    block = at
    if FORM.sub > 0:
        block = (k // FORM.block).to(tl.int64) * N + row
    scale, offset = _scales(planes, of_blocks(planes, block, mask, FORM), at, mask, FORM)
    level = code - FORM.zero
    if FORM.book is not None:
        W0: tl.constexpr = word_of(FORM.book, 0)
        W1: tl.constexpr = word_of(FORM.book, 4)
        W2: tl.constexpr = word_of(FORM.book, 8)
        W3: tl.constexpr = word_of(FORM.book, 12)
        four = tl.where(code < 8, tl.where(code < 4, W0, W1), tl.where(code < 12, W2, W3))
        level = ((four >> ((code & 3) * 8)) & 255) - 128
    value = scale * level.to(tl.float32)
    return value + offset if FORM.affine else value


@triton.constexpr_function
def scales_of_pair(form: Form) -> int:
    """Groups whose codes a pair of words holds."""
    return max(1, 8 * form.fields // form.group)


@triton.jit
def _spread(numbers, BN: tl.constexpr, FORM: tl.constexpr):
    """[BN, groups] to a tuple of [BN, words]: the groups of each pair of words, in order."""
    PAIRS: tl.constexpr = FORM.words // 8
    COUNT: tl.constexpr = scales_of_pair(FORM)
    if COUNT == 1:
        return (_over_lanes(numbers, BN, FORM),)
    elif COUNT == 2:
        first, second = tl.split(tl.reshape(numbers, (BN, PAIRS, 2)))
        return _over_lanes(first, BN, FORM), _over_lanes(second, BN, FORM)
    else:
        even, odd = tl.split(tl.reshape(numbers, (BN, PAIRS, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return (
            _over_lanes(first, BN, FORM), _over_lanes(second, BN, FORM), _over_lanes(third, BN, FORM), _over_lanes(fourth, BN, FORM)
        )  # fmt: skip


@triton.jit
def _over_lanes(numbers, BN: tl.constexpr, FORM: tl.constexpr):
    """[BN, groups] to [BN, words]."""
    GROUPS: tl.constexpr = numbers.shape[1]
    wide = tl.broadcast_to(numbers[:, None, :, None], (BN, 4, GROUPS, FORM.words // (4 * GROUPS)))
    return tl.reshape(wide, (BN, FORM.words))


@triton.jit
def tile(
    planes, stored, k, HALF: tl.constexpr, n, nm, N, BN: tl.constexpr, FORM: tl.constexpr, POLICY: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """bf16 [BN, tile] values from depth k on, the HALF-th tile of a step, of rows n int64; 0 in rows outside of the mask nm.

    `stored` is what `of_rows` gave, where blocks are of 256: the caller fetches it in time.
    """
    if INTERPRET:
        inside = tl.arange(0, FORM.tile)
        return gathered(planes, n[:, None], k + inside[None, :], N, nm[:, None], FORM)  # its bf16 is not rounded
    else:
        mask = nm[:, None]
        row = (k // FORM.tile).to(tl.int64) * N + n
        GROUPS: tl.constexpr = FORM.tile // FORM.group
        at = row[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        if FORM.sub == 0:
            stored = of_blocks(planes, at, mask, FORM)
        scale, minimum = _scales(planes, stored, at, mask, FORM)
        word = tl.arange(0, FORM.words)[None, :]
        low = tl.load(planes[0] + row[:, None] * FORM.words + word, mask=mask, other=0, eviction_policy=POLICY)
        inputs = (low,)
        if FORM.high > 0:
            step = (k // FORM.depth).to(tl.int64) * N + n
            high = tl.load(planes[1] + step[:, None] * 32 + word, mask=mask, other=0, eviction_policy=POLICY)
            inputs = inputs + (high.to(tl.int16),)  # noqa: RUF005
        inputs = inputs + _spread(scale, BN, FORM)
        if fused(FORM):
            offset = scale * -(base(FORM) + FORM.zero)
            inputs = inputs + _spread(offset, BN, FORM)
        if FORM.affine:
            inputs = inputs + _spread(minimum, BN, FORM)
        return _joined(_pairs(inputs, HALF, FORM), BN, FORM)


@triton.jit
def _pairs(inputs, HALF: tl.constexpr, FORM: tl.constexpr):
    """bf16 [BN, words] of each field."""
    ASM: tl.constexpr = assembly(FORM, HALF)
    if FORM.fields == 2:
        return tl.inline_asm_elementwise(
            ASM, constraints(FORM), inputs, dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif FORM.fields == 4:
        return tl.inline_asm_elementwise(
            ASM, constraints(FORM), inputs, dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            ASM, constraints(FORM), inputs,
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _joined(f, BN: tl.constexpr, FORM: tl.constexpr):
    """[BN, tile] of the fields f, which are [BN, lanes, pairs, 2]: pairs, fields, lanes, 2. Nothing leaves its lane."""
    PAIRS: tl.constexpr = FORM.words // 8
    if FORM.fields == 2:
        x = tl.reshape(tl.join(f[0], f[1]), (BN, 4, PAIRS, 2, 2))
        x = tl.permute(x, (0, 2, 4, 1, 3))
    elif FORM.fields == 4:
        x = tl.join(tl.join(f[0], f[2]), tl.join(f[1], f[3]))  # the last axis added is the lowest bit of the field
        x = tl.reshape(x, (BN, 4, PAIRS, 2, 2, 2))
        x = tl.permute(x, (0, 2, 4, 5, 1, 3))
    else:
        even = tl.join(tl.join(f[0], f[4]), tl.join(f[2], f[6]))
        odd = tl.join(tl.join(f[1], f[5]), tl.join(f[3], f[7]))
        x = tl.reshape(tl.join(even, odd), (BN, 4, PAIRS, 2, 2, 2, 2))
        x = tl.permute(x, (0, 2, 4, 5, 6, 1, 3))
    return tl.reshape(x, (BN, FORM.tile))
