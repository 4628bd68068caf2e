"""The PTX that unpacks codes, run by a small machine for its dozen instructions, against the stored values."""

from __future__ import annotations

import re

import numpy as np
import pytest

from power_lab.kernels import reference
from power_lab.kernels.probe import random_blocks
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import unpack
from power_lab.kernels.triton.planes import FORMS, repack

ROWS, COLS = 5, 512


def run(ptx: str, registers: dict[str, int]) -> None:
    """Change `registers` (32 bits each) as the instructions say."""

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0) & 0xFFFFFFFF

    for line in re.sub(r"^{|}$|\.reg[^;]*;", "", ptx).replace("\n", " ").split(";"):
        if not line.strip():
            continue
        name, rest = line.split(maxsplit=1)
        if halves := re.fullmatch(r"{(.*), (.*)}, (.*)", rest.strip()):
            registers[halves[1]], registers[halves[2]] = value(halves[3]) & 0xFFFF, value(halves[3]) >> 16
        elif joined := re.fullmatch(r"(.*), {(.*), (.*)}", rest.strip()):
            registers[joined[1]] = value(joined[2]) | value(joined[3]) << 16
        else:
            to, *operands = (part.strip() for part in rest.split(","))
            registers[to] = instruction(name, [value(operand) for operand in operands])


def halves(number: int) -> np.ndarray:
    """The two f16 of a register as f64, in which their products and sums are exact."""
    return np.array([number & 0xFFFF, number >> 16], np.uint16).view(np.float16).astype(np.float64)


def rounded(numbers: np.ndarray) -> int:
    low, high = numbers.astype(np.float16).view(np.uint16)
    return int(low) | int(high) << 16


def instruction(name: str, a: list[int]) -> int:
    match name:
        case "mov.b32":
            return a[0]
        case "shr.b32":
            return a[0] >> a[1]
        case "and.b32":
            return a[0] & a[1]
        case "or.b32":
            return a[0] | a[1]
        case "lop3.b32":
            assert a[3] == 0xEA
            return a[0] & a[1] | a[2]
        case "prmt.b32":
            both = (a[0] | a[1] << 32).to_bytes(8, "little")
            assert not a[2] & 0x8888, "no sign is spread"
            return int.from_bytes(bytes(both[a[2] >> 4 * i & 7] for i in range(4)), "little")
        case "fma.rn.f16x2":
            return rounded(halves(a[0]) * halves(a[1]) + halves(a[2]))
        case "mul.rn.f16x2":
            return rounded(halves(a[0]) * halves(a[1]))
        case "add.rn.f16x2":
            return rounded(halves(a[0]) + halves(a[1]))
    raise AssertionError(name)


@pytest.mark.parametrize("type", list(FORMS))
def test_values_are_rounded_once_and_so_are_scales_of_sub_blocks(type: QuantType) -> None:
    form = FORMS[type]
    stored = random_blocks(type, ROWS, COLS, np.random.default_rng(int(type)))
    got = unpacked(type, repack(type, ROWS, COLS, stored))
    want = reference.dequantize(type, stored, ROWS, COLS).numpy()
    scale, minimum = (part.repeat(form.group, axis=1) for part in grouped(type, repack(type, ROWS, COLS, stored)))
    if not form.sub:
        assert np.array_equal(got, want.astype(np.float16))
        return
    level = np.rint((want - minimum) / np.where(scale == 0, 1, scale))
    s, m = scale.astype(np.float16).astype(np.float64), minimum.astype(np.float16).astype(np.float64)
    assert np.array_equal(got, (level * s + m).astype(np.float16))
    error = np.abs(got - want) / (np.abs(scale * level) + np.abs(minimum) + 2.0**-13)
    assert error.max() < 2.0**-10
    assert error.mean() < 2.0**-12, "of bf16 values it would be eight times as much"


def unpacked(type: QuantType, planes: dict[str, np.ndarray]) -> np.ndarray:
    """f16 [ROWS, COLS], as a program's threads unpack them."""
    form = FORMS[type]
    got = np.zeros((ROWS, COLS), np.uint16)
    for row, tile, lane, pair in np.ndindex(ROWS, COLS // form.tile, 4, form.words // 8):
        at, step = tile % (form.depth // form.tile), tile * form.tile // form.depth
        k = tile * form.tile + pair * 8 * form.fields + 2 * lane
        words = slice(lane * form.words // 4 + 2 * pair, lane * form.words // 4 + 2 * pair + 2)
        inputs = [planes["codes"][tile, row, words].copy().view(np.uint32)[0]]
        if form.high:
            inputs += [int(planes["high"][step, row, words].copy().view(np.uint16)[0]) | 0xABCD0000] * 2
        if form.sub:
            numbers = planes["subs"][tile, row, pair * form.numbers : (pair + 1) * form.numbers].tolist()
            inputs += [planes["scale"][k // form.block, row].copy().view(np.uint32)[0]] * 2
            inputs += [int.from_bytes(bytes([*numbers, 0xAB, 0xCD, 0xEF][:4]), "little")] * 2
        else:
            for name in ("scale", "minimum") if form.affine else ("scale",):
                scale = planes[name][tile, row, k % form.tile // form.block]
                half = np.float16(np.ldexp(1.0, int(scale) - 128) if form.exponent else scale)
                inputs.append(int(half.view(np.uint16)) * 0x00010001)
        registers = {f"${form.fields + i}": int(number) for i, number in enumerate(inputs)}
        assert len(inputs) + form.fields == len(unpack.constraints(form).split(","))
        run(unpack.assembly(form, at), registers)
        for field in range(form.fields):
            both = registers[f"${field}"]
            got[row, k + 8 * field : k + 8 * field + 2] = both & 0xFFFF, both >> 16
    return got.view(np.float16)


def grouped(type: QuantType, planes: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """f32 [ROWS, groups] scales and minima, not rounded."""
    form = FORMS[type]
    if not form.sub:
        return tuple(np.ones((ROWS, COLS // form.group), np.float32) for _ in range(2))  # type: ignore[return-value]
    blocks = planes["scale"].transpose(1, 0, 2).repeat(form.block // form.group, axis=1).astype(np.float32)
    subs = planes["subs"].transpose(1, 0, 2).reshape(ROWS, -1)
    scales, minima = (subs[:, 0::2], subs[:, 1::2]) if form.affine and form.sub == 32 else (subs, subs)
    if form.affine and form.sub == 16:
        scales, minima = scales & 15, minima >> 4
    minimum = blocks[:, :, 1] * minima.astype(np.float32)
    return blocks[:, :, 0] * (scales.astype(np.float32) - form.sub_zero), minimum if form.affine else 0 * minimum
