"""The quantiser against gguf, llama.cpp and brute force."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from power_lab.engine.weights.gguf import GgufFile
from power_lab.engine.weights.quantise import QuantError, error, quantise, recipe
from power_lab.engine.weights.quantise.affine import _spans
from power_lab.engine.weights.quantise.levels import IntegerLevels, TableLevels
from power_lab.engine.weights.quantise.plain import bf16
from power_lab.engine.weights.quantise.search import fit_affine, fit_scale
from power_lab.engine.weights.quantise.symmetric import _peaks
from power_lab.engine.weights.source import FileSource
from power_lab.errors import ConfigError
from power_lab.kernels.dequantise import dequantise
from power_lab.kernels.layouts import IQ4_LEVELS
from power_lab.kernels.quants import QuantType, row_bytes
from tests.engine.weights import llama_cpp
from tests.engine.weights.quantised import write_gguf

Q = QuantType
AS_GGUF = (Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.MXFP4, Q.F16, Q.BF16)
SEARCHED = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS)
BOUND = {  # relative rmse on Gaussian values: what was measured, and 2 %
    Q.F32: 0, Q.F16: 0.00022, Q.BF16: 0.0017, Q.Q8_0: 0.0055, Q.Q6_K: 0.0170, Q.Q5_K: 0.0354, Q.Q5_1: 0.0387, Q.Q5_0: 0.0436,
    Q.Q4_K: 0.0717, Q.IQ4_NL: 0.0747, Q.IQ4_XS: 0.0755, Q.Q4_1: 0.0799, Q.Q4_0: 0.0876, Q.MXFP4: 0.1172, Q.Q3_K: 0.1463, Q.Q2_K: 0.269,
}  # fmt: skip


@pytest.fixture
def llama() -> ModuleType:
    """llama.cpp's quantiser."""
    pytest.importorskip("xllamacpp")
    return llama_cpp


def gaussian(rows: int = 32, cols: int = 512, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def heavy(rows: int = 32, cols: int = 512, seed: int = 0) -> np.ndarray:
    """Student's t with 4 degrees of freedom, rows of scales from 1e-3 to 1."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, (rows, cols)) * 10.0 ** rng.uniform(-3, 0, (rows, 1))).astype(np.float32)


def by_gguf(stored: np.ndarray, type: QuantType, cols: int) -> np.ndarray:
    return gguf.dequantize(stored.view(np.uint8), gguf.GGMLQuantizationType(int(type))).reshape(len(stored), cols)


def rmse(values: np.ndarray, type: QuantType, importance: np.ndarray | None = None) -> float:
    return error(values, quantise(values, type, importance), type).rmse


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    """[1-2, 256-512] of any finite f32: drawn one by one, or of any distribution, magnitude, offset and sparsity."""
    shape = (draw(st.integers(1, 2)), draw(st.sampled_from([256, 512])))
    if draw(st.booleans()):
        numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
        return draw(arrays.arrays(np.float32, shape, elements=numbers, fill=numbers))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = draw(st.sampled_from([rng.standard_normal, rng.standard_cauchy, rng.random]))(shape)
    values = values + draw(st.sampled_from([0, 0, 1, -1, 1000, -1000]))
    values = values * (rng.random(shape) < draw(st.sampled_from([1, 0.1, 0.004])))
    largest = np.finfo(np.float32).max
    scaled = np.ldexp(values, draw(st.integers(-150, 128)))
    return np.clip(scaled, -largest, largest).astype(np.float32)


@pytest.mark.parametrize("type", QuantType)
@given(matrices())
@settings(max_examples=50, deadline=None)
def test_any_finite_matrix_becomes_valid_blocks(type: QuantType, values: np.ndarray) -> None:
    stored = quantise(values, type)
    assert stored.nbytes == len(values) * row_bytes(type, values.shape[1])
    want = by_gguf(stored, type, values.shape[1])
    assert np.isfinite(want).all()
    assert np.array_equal(dequantise(stored, type, values.shape[1]).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("type", QuantType)
@given(matrices())
@settings(max_examples=50, deadline=None)
def test_a_zero_stays_near_zero_and_nothing_grows_far(type: QuantType, values: np.ndarray) -> None:
    """No value leaves its row's range by more than a coarse level, however the row looks."""
    got = dequantise(quantise(values, type), type, values.shape[1]).astype(np.float64)
    assert (np.abs(got).max(axis=1) <= 1.34 * np.abs(values.astype(np.float64)).max(axis=1) + 1e-5).all()


@pytest.mark.parametrize("type", QuantType)
def test_stored_form_is_that_of_a_weight_source(type: QuantType, tmp_path: Path) -> None:
    values = gaussian(3, 256)
    want = write_gguf(tmp_path / "a.gguf", {"a.weight": (values, type), "b.weight": (values[0], Q.F32)})
    source = FileSource(GgufFile.open(tmp_path / "a.gguf"))
    kind, data = source.matrix("a.weight", 3, 256)
    assert (kind, data.dtype, data.shape) == (type, want["a.weight"].dtype, want["a.weight"].shape)
    assert np.array_equal(data.view(np.uint8), want["a.weight"].view(np.uint8))
    assert np.array_equal(source.vector("b.weight", 256)[1], values[0])


@pytest.mark.parametrize("type", AS_GGUF)
@given(matrices(), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_bytes_of_the_gguf_package(type: QuantType, values: np.ndarray, seed: int) -> None:
    """Where the others' arithmetic is defined: scales that f16 and the exponent byte hold. Ties are drawn often."""
    rng = np.random.default_rng(seed)
    halves = rng.integers(-254, 255, values.shape).astype(np.float32) / 2
    for matrix in (np.clip(values, -65504, 65504), halves, np.where(rng.random(values.shape) < 0.1, halves, 0)):
        matrix = np.where(np.abs(matrix) < 1e-30, np.float32(0), matrix).astype(np.float32)
        want = gguf.quantize(matrix, gguf.GGMLQuantizationType(int(type)))
        assert np.array_equal(quantise(matrix, type).view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("type", AS_GGUF)
def test_bytes_of_llama_cpp(type: QuantType, llama: ModuleType) -> None:
    for values in (gaussian(), heavy()):
        assert np.array_equal(quantise(values, type).view(np.uint8), llama.quantise(values, type))


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_bf16_of_any_bits(bits: int) -> None:
    value = np.array([[bits]], np.uint32).view(np.float32)
    want = gguf.quantize(value, gguf.GGMLQuantizationType.BF16).view(np.uint16)
    if np.isfinite(value).all() and want & 0x7FFF == 0x7F80:
        want = want - np.uint16(1)  # finite values do not become infinite
    assert bf16(value) == want


@pytest.mark.parametrize("type", QuantType)
def test_error_on_gaussian_values(type: QuantType) -> None:
    figures = error(gaussian(), quantise(gaussian(), type), type)
    assert figures.rmse <= BOUND[type]
    assert figures.cosine >= 1 - figures.rmse**2
    assert figures.bits_per_weight == 8 * row_bytes(type, 256) / 256


def test_more_bits_are_always_better() -> None:
    order = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q8_0, Q.F16)
    for values in (gaussian(), heavy(), 0.02 * gaussian() + 0.01):
        figures = [rmse(values, type) for type in order]
        assert figures == sorted(figures, reverse=True)
        assert len(set(figures)) == len(figures)


@pytest.mark.parametrize("type", SEARCHED)
def test_no_worse_than_llama_cpp(type: QuantType, llama: ModuleType) -> None:
    samples = {"Gaussian": gaussian(), "heavy": heavy(), "offset": 0.02 * gaussian() + 0.01, "small": 1e-4 * heavy()}
    for name, values in samples.items():
        theirs = error(values, llama.quantise(values, type), type).rmse
        assert rmse(values, type) <= theirs, name


@pytest.mark.parametrize("type", (*SEARCHED, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1))
def test_importance_moves_the_error_and_is_no_worse_than_llama_cpp(type: QuantType, llama: ModuleType) -> None:
    values = gaussian()
    importance = np.random.default_rng(1).lognormal(0, 1.5, values.shape[1])

    def weighted(stored: np.ndarray) -> float:
        return float((importance * (values - dequantise(stored, type, values.shape[1])) ** 2).sum())

    ours = weighted(quantise(values, type, importance))
    assert ours < weighted(quantise(values, type))
    assert ours <= weighted(llama.quantise(values, type, importance))


@pytest.mark.parametrize("type", (Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.MXFP4))
def test_other_types_make_nothing_of_importance(type: QuantType) -> None:
    values = gaussian()
    importance = np.arange(values.shape[1], dtype=np.float64)
    assert np.array_equal(quantise(values, type, importance), quantise(values, type))


@pytest.mark.parametrize("type", SEARCHED)
def test_columns_without_importance_do_not_break_the_search(type: QuantType) -> None:
    values = gaussian(4)
    importance = np.zeros(values.shape[1])
    assert rmse(values, type, importance) == rmse(values, type)
    importance[300] = 1e30
    got = dequantise(quantise(values, type, importance), type, values.shape[1])
    assert np.isfinite(got).all()
    assert np.allclose(got[:, 300], values[:, 300], atol=0.02 * np.abs(values).max())


@pytest.mark.parametrize("type", QuantType)
def test_zeros(type: QuantType) -> None:
    stored = quantise(np.zeros((2, 512), np.float32), type)
    assert error(np.zeros((2, 512), np.float32), stored, type) == QuantError(8 * row_bytes(type, 256) / 256, 0, 0, 1)


@pytest.mark.parametrize("type", QuantType)
@pytest.mark.parametrize("value", [1.0, -1.0, 0.3, -1000.7, 3e-5])
def test_constant_rows(type: QuantType, value: float) -> None:
    values = np.full((2, 512), value, np.float32)
    assert rmse(values, type) <= (0.25 if type == Q.MXFP4 else 0.05)  # its scales are powers of two


@pytest.mark.parametrize("type", QuantType)
@pytest.mark.parametrize("value", [1.0, -0.7])
def test_one_value_among_zeros(type: QuantType, value: float) -> None:
    values = np.zeros((256, 256), np.float32)
    np.fill_diagonal(values, value)
    figures = error(values, quantise(values, type), type)
    assert figures.rmse <= (0.25 if type == Q.MXFP4 else 0.15 if type in (Q.IQ4_NL, Q.IQ4_XS) else 0.01)


@pytest.mark.parametrize("type", QuantType)
def test_tiny_values_end_within_the_scale_that_f16_has(type: QuantType) -> None:
    """Subnormal rows: nothing is worse than zeroing, but for half of f16's least step times the levels."""
    for magnitude in (1e-44, 1e-40, 1e-30, 1e-8):
        values = (magnitude * gaussian(4)).astype(np.float32)
        got = dequantise(quantise(values, type), type, values.shape[1])
        assert (np.abs(got - values) <= np.abs(values) + 2.0**-24 * 128).all()


def test_small_scales_are_not_lost() -> None:
    """At 1e-5 a K-quant's super-block scale would round to 0 in f16, and all its values with it."""
    values = 1e-6 * gaussian()
    assert rmse(values, Q.Q4_K) < 0.4
    assert rmse(values, Q.Q6_K) < 0.4


def test_what_is_beyond_f16_saturates_and_shows() -> None:
    values = np.full((1, 256), 1e6, np.float32)
    for type in (Q.F16, Q.Q4_K, Q.Q6_K, Q.Q8_0):
        assert np.allclose(dequantise(quantise(values, type), type, 256), 65504, rtol=0.01)
        assert error(values, quantise(values, type), type).rmse > 0.9
    for type in (Q.F32, Q.BF16, Q.MXFP4):
        assert rmse(values, type) < 0.25


@pytest.mark.parametrize("levels", [IntegerLevels(-4, 3), IntegerLevels(-32, 31), TableLevels(IQ4_LEVELS)])
def test_scale_search_against_brute_force(levels: IntegerLevels | TableLevels) -> None:
    values, weights = gaussian(40, 16), np.random.default_rng(1).random((40, 16), dtype=np.float32) + 0.1
    scale = fit_scale(values, weights, levels, _peaks(levels))

    def squares(scale: np.ndarray) -> np.ndarray:
        rest = scale[:, None] * levels.nearest(values / scale[:, None]) - values
        return (weights * rest * rest).sum(axis=1)

    grid = np.linspace(0.6, 1.6, 2000)
    ends = np.abs(values).max(axis=1) / np.float32(levels.high)
    best = np.min([squares(sign * at * ends) for at in grid for sign in (1, -1)], axis=0)
    assert squares(scale).sum() <= 1.1 * best.sum()  # a grid of 4,000 candidates beside our 18


@pytest.mark.parametrize("top", [3, 15])
@pytest.mark.parametrize("free", [False, True])
def test_affine_search_against_brute_force(top: int, free: bool) -> None:
    values = gaussian(12, 16) + np.float32(0.5)
    weights = np.random.default_rng(1).random(values.shape, dtype=np.float32) + 0.1
    scale, minimum = fit_affine(values, weights, top, _spans(top), free)
    assert free or (minimum <= 0).all()

    def squares(s: np.ndarray, m: np.ndarray) -> np.ndarray:
        rest = s * np.clip(np.rint((values - m) / s), 0, top) + m - values
        return (weights * rest * rest).sum(axis=1)

    low = values.min(axis=1, keepdims=True) if free else np.minimum(values.min(axis=1, keepdims=True), 0)
    span = values.max(axis=1, keepdims=True) - low
    best = np.min(
        [
            squares(span * length / top, np.minimum(low + offset * span, np.inf if free else 0))
            for length in np.linspace(0.5, 1.2, 120)
            for offset in np.linspace(-0.2, 0.4, 90)
        ],
        axis=0,
    )
    assert (
        squares(scale[:, None], minimum[:, None]).sum() <= 1.15 * best.sum()
    )  # a grid of 10,800 candidates beside our 20


@given(arrays.arrays(np.float32, 200, elements=st.floats(-300, 300, width=32)))
@settings(deadline=None)
def test_nearest_level_of_a_table(values: np.ndarray) -> None:
    levels = TableLevels(IQ4_LEVELS)
    table = np.array(IQ4_LEVELS, np.float32)
    found = levels.nearest(values)
    assert np.array_equal(np.abs(found - values), np.abs(table - values[:, None]).min(axis=1))
    assert np.array_equal(table[levels.codes(found)], found)


def test_rows_do_not_depend_on_each_other_or_on_chunks() -> None:
    values, importance = heavy(600, 256), np.random.default_rng(2).random(256)
    for type in (Q.Q4_K, Q.Q6_K, Q.IQ4_NL, Q.Q8_0, Q.BF16):
        whole = quantise(values, type, importance)
        parts = [quantise(part, type, importance) for part in np.array_split(values, 7)]
        assert np.array_equal(whole, np.concatenate(parts))
        assert np.array_equal(quantise(np.asfortranarray(values), type, importance), whole)


def test_memory_is_bounded_and_progress_told() -> None:
    values = gaussian(2048, 1024)
    calls: list[tuple[int, int]] = []
    tracemalloc.start()
    quantise(values, Q.Q4_K, progress=lambda done, total: calls.append((done, total)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < values.nbytes + (8 << 20)
    assert calls[-1] == (values.size, values.size)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_what_is_wrong_is_named() -> None:
    values = gaussian(3, 256)
    with pytest.raises(ConfigError, match=r"values: float64 .* is not a matrix of float32"):
        quantise(values.astype(np.float64), Q.Q8_0)
    with pytest.raises(ConfigError, match=r"values: float32 \[256\] is not a matrix"):
        quantise(values[0], Q.Q8_0)
    with pytest.raises(ConfigError, match=r"type: Q4_K stores blocks of 256 values, but a row has 224.*recipe"):
        quantise(values[:, :224], Q.Q4_K)
    for wrong in (np.nan, np.inf, -np.inf):
        values[2, 17] = wrong
        for type in QuantType:
            with pytest.raises(ConfigError, match=f"values: the value at row 2, column 17 is {wrong}"):
                quantise(values, type)
    with pytest.raises(ConfigError, match=r"importance: shape \[255\]"):
        quantise(gaussian(), Q.Q4_K, np.ones(255))
    for wrong in (np.nan, -1):
        with pytest.raises(ConfigError, match="importance: has entries"):
            quantise(gaussian(), Q.Q4_K, np.full(512, wrong))
    with pytest.raises(ConfigError, match=r"stored: \[3, 144\] uint8 for values \[3, 512\]"):
        error(gaussian(3), quantise(gaussian(3, 256), Q.Q4_K), Q.Q4_K)


def test_figures_of_a_known_case() -> None:
    values = np.array([[3.0] * 16 + [-4.0] * 16], np.float32)
    stored = quantise(np.zeros((1, 32), np.float32), Q.Q8_0)
    assert error(values, stored, Q.Q8_0) == QuantError(8.5, 1.0, 4 / np.sqrt(12.5), 0.0)
    same = error(values, values, Q.F32)
    assert (same.rmse, same.largest) == (0, 0)
    assert same.cosine == pytest.approx(1)
    assert error(np.zeros_like(values), quantise(values, Q.Q8_0), Q.Q8_0).rmse == np.inf


def test_recipe() -> None:
    assert recipe("blk.0.attn_norm.weight", (2048,), Q.Q4_K) == Q.F32
    assert recipe("blk.0.attn_q.weight", (2048, 2048), Q.Q4_K) == Q.Q4_K
    assert recipe("blk.0.attn_q.weight", (576, 576), Q.Q4_K) == Q.Q5_0
    assert recipe("blk.0.attn_q.weight", (576, 48), Q.Q4_K) == Q.F16
    assert recipe("blk.0.attn_q.weight", (576, 40), Q.Q8_0) == Q.F16
    assert recipe("token_embd.weight", (49152, 576), Q.Q4_K) == Q.Q5_1
    assert recipe("output.weight", (49152, 2048), Q.Q4_K) == Q.Q5_K
    assert recipe("blk.0.ffn_down.weight", (576, 1536), Q.F32) == Q.F32
    for base in QuantType:
        for name in ("token_embd.weight", "blk.3.ffn_up.weight"):
            for cols in (1, 32, 96, 256, 512):
                type = recipe(name, (8, cols), base)
                assert quantise(gaussian(8, cols), type).nbytes == 8 * row_bytes(type, cols)
                assert row_bytes(type, cols) * 256 >= row_bytes(base, 256) * cols or type == Q.F16
