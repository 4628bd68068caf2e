"""Bit layouts against the gguf package, on any bytes that a file might hold."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.kernels.dequantise import CHUNK, dequantise
from power_lab.kernels.layouts import LAYOUTS, pack, unpack
from power_lab.kernels.quants import GEOMETRY, QuantType, row_bytes


def noise(type: QuantType, rows: int, blocks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * GEOMETRY[type][1]), dtype=np.uint8)


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    return bool(((got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))).all())


@pytest.mark.parametrize("type", QuantType)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_values_are_those_of_the_gguf_package(type: QuantType, rows: int, blocks: int, seed: int) -> None:
    raw = noise(type, rows, blocks, seed)
    with np.errstate(all="ignore"):
        want = gguf.dequantize(raw, gguf.GGMLQuantizationType(int(type))).reshape(rows, -1)
    got = dequantise(raw, type, blocks * GEOMETRY[type][0])
    assert got.dtype == np.float32
    assert same_bits(got, want)


@pytest.mark.parametrize("type", LAYOUTS)
@given(st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_pack_undoes_unpack_on_any_bytes(type: QuantType, blocks: int, seed: int) -> None:
    raw = noise(type, blocks, 1, seed)
    assert np.array_equal(pack(type, unpack(type, raw)), raw)


@pytest.mark.parametrize("type", LAYOUTS)
def test_every_bit_belongs_to_one_number(type: QuantType) -> None:
    size = GEOMETRY[type][1]
    single = np.packbits(np.eye(size * 8, dtype=np.uint8), axis=1, bitorder="little")
    bits = [np.unpackbits(np.ascontiguousarray(f).reshape(len(single), -1).view(np.uint8), axis=1).sum(axis=1)
            for f in unpack(type, single)]  # fmt: skip
    assert (np.sum(bits, axis=0) == 1).all()


def test_chunks_join() -> None:
    raw = noise(QuantType.Q4_K, 2 * CHUNK // 256 + 3, 1, 0)
    parts = [dequantise(part, QuantType.Q4_K, 256) for part in np.array_split(raw, 7)]
    assert same_bits(dequantise(raw, QuantType.Q4_K, 256), np.concatenate(parts))


@pytest.mark.parametrize(
    ("type", "dtype"), [(QuantType.F32, np.float32), (QuantType.F16, np.float16), (QuantType.BF16, np.uint16)]
)
def test_plain_types_come_in_their_own_dtype_or_as_bytes(type: QuantType, dtype: type) -> None:
    raw = noise(type, 3, 8, 1) & np.uint8(0x3B)  # small finite numbers
    assert same_bits(dequantise(raw.view(dtype), type, 8), dequantise(raw, type, 8))


@pytest.mark.parametrize("shape", [(2, 143), (2, 145), (144,)])
def test_bytes_that_are_no_such_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are not rows of 256 Q4_K values"):
        dequantise(np.zeros(shape, np.uint8), QuantType.Q4_K, 256)


def test_geometry_follows_from_the_layouts() -> None:
    for type, layout in LAYOUTS.items():
        fields = unpack(type, noise(type, 2, 1, 0))
        assert pack(type, fields).shape == (2, row_bytes(type, GEOMETRY[type][0]))
        assert fields.codes.max() < len(layout.levels)
