"""Planes hold a matrix's values and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from power_lab.kernels.dequantise import dequantise
from power_lab.kernels.layouts import IQ4_LEVELS, LAYOUTS
from power_lab.kernels.probe import random_blocks
from power_lab.kernels.quants import GEOMETRY, QuantType, row_bytes
from power_lab.kernels.triton.planes import FORMS, SMALL, at_load, bound, repack


def codes_of(type: QuantType, planes: dict[str, np.ndarray], cols: int) -> np.ndarray:
    """[N, cols] codes, unpacked one by one from what the planes' description says."""
    form, k = FORMS[type], np.arange(cols)
    place, tile = k % form.tile, k // form.tile
    sixteen, half, lane = place // 16, place // 8 % 2, place // 2 % 4
    pair, field = sixteen // (form.fields // 2), sixteen % (form.fields // 2) * 2 + half
    word = lane * (form.words // 4) + 2 * pair + place % 2
    words = planes["codes"].view(np.uint16)[tile, :, word].astype(np.int64)
    codes = words >> (field * form.low)[:, None] & (1 << form.low) - 1
    if form.high:
        fields = tile % (form.depth // form.tile) * form.fields + field
        high = planes["high"][k // form.depth, :, word].astype(np.int64)
        codes |= (high >> (fields * form.high)[:, None] & (1 << form.high) - 1) << form.low
    return codes.T


def values_of(type: QuantType, planes: dict[str, np.ndarray], cols: int) -> np.ndarray:
    """f32 [N, cols]."""
    form, k, one = FORMS[type], np.arange(cols), np.float32

    def grouped(name: str) -> np.ndarray:
        return planes[name][k // form.tile, :, k % form.tile // form.group].T

    def blocks(name: str) -> np.ndarray:
        if form.sub:
            return planes["scale"][k // form.block, :, ("scale", "minimum").index(name)].T
        return grouped(name)

    levels = np.arange(1 << (form.low + form.high)) - form.zero
    if type in (QuantType.IQ4_NL, QuantType.IQ4_XS):
        levels = np.array(IQ4_LEVELS)
    elif type == QuantType.MXFP4:
        levels = np.array(LAYOUTS[type].levels)
    value = levels[codes_of(type, planes, cols)].astype(one)
    scale = blocks("scale")
    scale = np.ldexp(one(1), scale.astype(np.int32) - 128) if type == QuantType.MXFP4 else scale.astype(one)
    minimum = blocks("minimum").astype(one) if form.affine else None
    if form.sub:
        place = k % form.tile // form.group
        apart = 2 if form.affine and form.sub == 32 else 1  # minima behind their scales
        subs = planes["subs"][k // form.tile, :, place * apart].T.astype(int)
        if minimum is not None and apart == 2:
            minimum = minimum * planes["subs"][k // form.tile, :, place * 2 + 1].T.astype(one)
        elif minimum is not None:
            minimum, subs = minimum * (subs >> 4).astype(one), subs & 15
        scale = scale * (subs - (0 if form.affine else 128)).astype(one)
    return scale * value if minimum is None else scale * value + minimum


@pytest.mark.parametrize("type", list(LAYOUTS))
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (5, 3), (70, 2)])
def test_planes_hold_every_value(type: QuantType, rows: int, blocks: int) -> None:
    cols = blocks * GEOMETRY[type][0]
    stored = random_blocks(type, rows, cols, np.random.default_rng(cols))
    planes = repack(type, rows, cols, stored)
    want = dequantise(stored, type, cols)
    got = values_of(type, planes, cols)
    assert got.dtype == np.float32
    assert np.array_equal(got.view(np.int32), want.view(np.int32)) or np.array_equal(got, want)
    for name, plane in planes.items():
        assert plane.flags.c_contiguous, name


@pytest.mark.parametrize("type", list(LAYOUTS))
def test_planes_are_as_small_as_the_file(type: QuantType) -> None:
    for cols in (1024, 2048, 4096):
        nbytes = sum(
            plane.nbytes for plane in repack(type, 8, cols, np.zeros(8 * row_bytes(type, cols), np.uint8)).values()
        )
        assert nbytes <= 1.06 * 8 * row_bytes(type, cols)


def test_large_matrices_are_repacked_in_pieces() -> None:
    """The same planes whether or not a matrix exceeds what is repacked at a time."""
    rows, cols = 700, 2048
    stored = random_blocks(QuantType.Q5_K, rows, cols, np.random.default_rng(0))
    whole = repack(QuantType.Q5_K, rows, cols, stored)
    parts = [repack(QuantType.Q5_K, 100, cols, stored[first : first + 100]) for first in range(0, rows, 100)]
    for name, plane in whole.items():
        assert np.array_equal(plane, np.concatenate([part[name] for part in parts], axis=1))


@pytest.mark.parametrize("type", [QuantType.F32, QuantType.F16, QuantType.BF16])
def test_plain_values_stay(type: QuantType) -> None:
    stored = random_blocks(type, 3, 24, np.random.default_rng(0))
    assert repack(type, 3, 24, stored)["values"].tobytes() == stored.tobytes()


def test_small_matrices_are_held_as_values_and_large_ones_as_planes() -> None:
    rows, cols = SMALL // 1024, 1024
    stored = random_blocks(QuantType.Q4_K, rows + 1, cols, np.random.default_rng(0))
    held, parts = at_load(QuantType.Q4_K, rows, cols, stored[:rows], "float16")
    assert held == QuantType.F32
    assert np.array_equal(parts["values"], dequantise(stored[:rows], QuantType.Q4_K, cols))
    held, parts = at_load(QuantType.Q4_K, rows + 1, cols, stored, "float16")
    assert held == QuantType.Q4_K
    assert "values" not in parts
    held, parts = at_load(QuantType.Q4_K, rows + 1, cols, stored, "bfloat16")
    assert held == QuantType.F32
    assert parts["values"].shape == (rows + 1, cols)
    assert at_load(QuantType.F16, 1, 8, np.zeros((1, 8), np.float16), "float16")[0] == QuantType.F16
    with pytest.raises(ValueError, match="17 bytes are not 1 rows of 32 Q4_0"):
        at_load(QuantType.Q4_0, 1, 32, np.zeros(17, np.uint8), "float16")


def test_what_is_no_such_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="Q4_K"):
        repack(QuantType.Q4_K, 1, 128, np.zeros(72, np.uint8))
    with pytest.raises(ValueError, match="17 bytes are not 1 rows of 32 Q4_0"):
        repack(QuantType.Q4_0, 1, 32, np.zeros(17, np.uint8))


@pytest.mark.parametrize("type", list(LAYOUTS))
def test_no_value_exceeds_the_bound(type: QuantType) -> None:
    stored = random_blocks(type, 40, 512, np.random.default_rng(1))
    largest = np.abs(dequantise(stored, type, 512)).max()
    assert largest <= bound(type, repack(type, 40, 512, stored)) < 40 * largest
