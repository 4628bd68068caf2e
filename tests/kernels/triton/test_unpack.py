"""The PTX that unpacks codes, run by a small machine for its dozen instructions, against the stored values."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.probe import random_blocks
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import unpack
from power_lab.kernels.triton.planes import FORMS, repack

ROWS, COLS = 5, 512


def run(ptx: str, registers: dict[str, int]) -> None:
    """Change `registers` (32 bits each) as the instructions say."""

    def value(operand: str) -> int:
        if operand in registers:
            return registers[operand]
        number = float(operand) if "." in operand else None
        return bits(number) if number is not None else int(operand, 0) & 0xFFFFFFFF

    for line in re.sub(r"[{}]|\.reg[^;]*;", "", ptx).replace("\n", " ").split(";"):
        if not line.strip():
            continue
        name, rest = line.split(maxsplit=1)
        to, *operands = (part.strip() for part in rest.split(","))
        registers[to] = instruction(name, [value(operand) for operand in operands])


def bits(number: float | np.float32) -> int:
    return int(np.float32(number).view(np.uint32))


def instruction(name: str, a: list[int]) -> int:
    f = [np.uint32(x).view(np.float32) for x in a]
    match name:
        case "mov.b32":
            return a[0]
        case "shr.b32":
            return a[0] >> a[1]
        case "shl.b32":
            return a[0] << a[1] & 0xFFFFFFFF
        case "and.b32":
            return a[0] & a[1]
        case "or.b32":
            return a[0] | a[1]
        case "prmt.b32":
            both = (a[0] | a[1] << 32).to_bytes(8, "little")
            assert not a[2] & 0x8888, "no sign is spread"
            return int.from_bytes(bytes(both[a[2] >> 4 * i & 7] for i in range(4)), "little")
        case "fma.rn.f32":  # a product of f32 is exact in f64, and these sums are, too
            return bits(np.float32(float(f[0]) * float(f[1]) + float(f[2])))
        case "mul.rn.f32":
            return bits(f[0] * f[1])
        case "sub.rn.f32":
            return bits(f[0] - f[1])
        case "add.rn.f32":
            return bits(f[0] + f[1])
        case "cvt.rn.bf16x2.f32":
            high, low = (torch.tensor(float(x)).bfloat16().view(torch.int16).item() & 0xFFFF for x in f)
            return int(high) << 16 | int(low)
    raise AssertionError(name)


@pytest.mark.parametrize("type", list(FORMS))
def test_pairs_are_the_stored_values_rounded_once(type: QuantType) -> None:
    form = FORMS[type]
    stored = random_blocks(type, ROWS, COLS, np.random.default_rng(int(type)))
    planes = repack(type, ROWS, COLS, stored)
    want = reference.dequantize(type, stored, ROWS, COLS).bfloat16()
    scales, minima = grouped(type, planes)
    for row in range(ROWS):
        got = np.zeros(COLS, np.uint16)
        for tile, pair in np.ndindex(COLS // form.tile, form.words // 2):
            half, step = tile % (form.depth // form.tile), tile * form.tile // form.depth
            lane, pair = divmod(pair, form.words // 8)
            word = slice(lane * form.words // 4 + 2 * pair, lane * form.words // 4 + 2 * pair + 2)
            inputs = [int(planes["codes"][tile, row, word].copy().view(np.uint32)[0])]
            if form.high:
                inputs.append(int(planes["high"][step, row, word].astype(np.uint16).view(np.uint32)[0]))
            at = tile * form.tile + pair * 8 * form.fields
            groups = at // form.group + np.arange(unpack.scales_of_pair(form))
            inputs += [bits(s) for s in scales[row, groups].repeat(2)]
            if unpack.fused(form):
                inputs += [
                    bits(s * np.float32(-(unpack.base(form) + form.zero))) for s in scales[row, groups].repeat(2)
                ]
            if form.affine:
                inputs += [bits(m) for m in minima[row, groups].repeat(2)]
            registers = {f"${form.fields + i}": number for i, number in enumerate(inputs)}
            assert len(inputs) + form.fields == len(unpack.constraints(form).split(","))
            run(unpack.assembly(form, half), registers)
            for field in range(form.fields):
                k = at + 8 * field + 2 * lane
                got[k], got[k + 1] = registers[f"${field}"] & 0xFFFF, registers[f"${field}"] >> 16
        assert torch.equal(torch.from_numpy(got.view(np.int16)).view(torch.bfloat16), want[row])


def grouped(type: QuantType, planes: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """f32 [ROWS, groups] scales and minima."""
    form = FORMS[type]

    def spread(name: str) -> np.ndarray:
        plane = planes[name]
        return (
            plane.T.repeat(form.block // form.group, axis=1)
            if plane.ndim == 2
            else plane.transpose(1, 0, 2).reshape(ROWS, -1)
        )

    scales = spread("scale")
    scales = np.ldexp(np.float32(1), scales.astype(np.int32) - 128) if form.exponent else scales.astype(np.float32)
    minima = spread("minimum").astype(np.float32) if form.affine else scales
    if form.sub:
        subs = spread("subs")
        if form.affine:
            whole = spread("sub_minima") if form.sub == 32 else subs >> 4
            minima = -(minima * whole.astype(np.float32))
            subs = subs if form.sub == 32 else subs & 15
        scales = scales * subs.astype(np.float32)
    return scales, minima
