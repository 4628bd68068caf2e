"""Linear, gated and embedding kernels against the reference; one row's bits in any company."""

from __future__ import annotations

from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.errors import ModelFileError
from power_lab.kernels import reference
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.quants import QuantType
from tests.kernels import data

CASES = [(type, *shape) for type, shapes in data.SHAPES.items() for shape in shapes]
ROWS = (1, 2, 3, 4, 5, 8, 9, 13, 70)


@pytest.mark.parametrize(("type", "n", "k"), CASES)
def test_values_are_ggufs(ops: NumbaOps, type: QuantType, n: int, k: int) -> None:
    weight, values = data.weight(type, n, k)
    stored = weight.data.view(np.float32) if type == QuantType.F32 else weight.data
    oracle = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType(int(type))).reshape(n, k)
    ids = np.random.default_rng(0).permutation(n).astype(np.int32)
    out = data.poison(n, k)
    ops.embed(weight, ids, out)
    assert np.array_equal(out, oracle[ids])
    assert np.array_equal(values.numpy(), oracle)
    assert np.array_equal(ops.vector(type, weight.data[:1]), oracle[0])


@pytest.mark.parametrize(("type", "n", "k"), CASES)
@pytest.mark.parametrize("rows", ROWS)
def test_linear(ops: NumbaOps, type: QuantType, n: int, k: int, rows: int) -> None:
    weight, values = data.weight(type, n, k)
    x = data.normal(rows, k)
    out = data.poison(rows + 1, 2 * n)
    ops.linear(x, (weight, weight), out[:rows])
    want = reference.linear(torch.from_numpy(x), values).numpy()
    for half in (out[:rows, :n], out[:rows, n:]):
        np.testing.assert_allclose(half, want, rtol=1e-5, atol=2e-6 * k)
    assert np.isnan(out[rows]).all(), "a row behind the output was written"


@pytest.mark.parametrize(("type", "n", "k"), CASES)
@pytest.mark.parametrize("rows", ROWS)
def test_gate_up(ops: NumbaOps, type: QuantType, n: int, k: int, rows: int) -> None:
    (gate, gate_values), (up, up_values) = data.weight(type, n, k), data.weight(QuantType.F32, n, k)
    x = data.normal(rows, k)
    out = data.poison(rows + 1, n)
    ops.gate_up(x, gate, up, out[:rows])
    want = reference.gate_up(torch.from_numpy(x), gate_values, up_values).numpy()
    np.testing.assert_allclose(out[:rows], want, rtol=1e-4, atol=4e-6 * k)
    assert np.isnan(out[rows]).all(), "a row behind the output was written"


def test_stacked_weights_of_different_types(ops: NumbaOps) -> None:
    parts = [
        data.weight(QuantType.Q4_1, 96, 576),
        data.weight(QuantType.Q8_0, 33, 576),
        data.weight(QuantType.F16, 7, 576),
    ]
    x = data.normal(11, 576)
    out = data.poison(11, 136)
    ops.linear(x, tuple(w for w, _ in parts), out)
    want = torch.cat([reference.linear(torch.from_numpy(x), values) for _, values in parts], dim=1).numpy()
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-3)


@st.composite
def companies(draw: st.DrawFn) -> tuple[QuantType, int, int, list[int], list[int]]:
    """A weight, an order of some rows, and the sizes of the chunks in which they are computed."""
    type, n, k = draw(st.sampled_from(CASES))
    order = draw(st.lists(st.integers(0, 63), min_size=1, max_size=64, unique=True))
    cuts = draw(st.lists(st.integers(1, len(order)), max_size=6))
    return type, n, k, order, sorted({0, len(order), *cuts})


@settings(deadline=None, max_examples=80)
@given(companies())
def test_a_rows_bits_do_not_depend_on_its_company(case: tuple[QuantType, int, int, list[int], list[int]]) -> None:
    type, n, k, order, cuts = case
    ops, (weight, _) = data.two_threads(), data.weight(type, n, k)
    x = data.normal(64, k, seed=1)
    alone, gated = data.poison(64, n), data.poison(64, n)
    for r in range(64):
        data.one_thread().linear(x[r : r + 1], (weight,), alone[r : r + 1])
        data.one_thread().gate_up(x[r : r + 1], weight, weight, gated[r : r + 1])
    for first, last in pairwise(cuts):
        rows = order[first:last]
        out = data.poison(len(rows), n)
        ops.linear(x[rows], (weight,), out)
        assert out.tobytes() == alone[rows].tobytes()
        ops.gate_up(x[rows], weight, weight, out)
        assert out.tobytes() == gated[rows].tobytes()


def test_long_chunks_have_the_same_bits(ops: NumbaOps) -> None:
    weight, _ = data.weight(QuantType.Q4_1, 96, 576)
    x = data.normal(600, 576)
    together, alone = data.poison(600, 96), data.poison(600, 96)
    ops.gate_up(x, weight, weight, together)
    for r in range(600):
        ops.gate_up(x[r : r + 1], weight, weight, alone[r : r + 1])
    assert together.tobytes() == alone.tobytes()


def test_read_only_and_odd_files(ops: NumbaOps) -> None:
    stored = data.weight(QuantType.Q4_1, 37, 64)[0].data
    unaligned = np.frombuffer(b"x" + stored.tobytes(), np.uint8)[1:]
    weight = ops.weight(QuantType.Q4_1, 37, 64, unaligned)
    assert np.shares_memory(weight.data, unaligned), "weights are not copied"
    out, want = data.poison(2, 37), data.poison(2, 37)
    ops.linear(data.normal(2, 64), (weight,), out)
    ops.linear(data.normal(2, 64), (data.weight(QuantType.Q4_1, 37, 64)[0],), want)
    assert out.tobytes() == want.tobytes()


def test_what_cannot_be_computed_is_refused(ops: NumbaOps) -> None:
    weight, _ = data.weight(QuantType.Q4_1, 37, 64)
    with pytest.raises(ModelFileError, match="Q4_1"):
        ops.weight(QuantType.Q4_1, 1, 33, np.zeros(20, np.uint8))
    with pytest.raises(ModelFileError, match="99"):
        ops.weight(99, 1, 32, np.zeros(20, np.uint8))  # type: ignore[arg-type]
    with pytest.raises(ModelFileError):
        ops.weight(QuantType.F32, 2, 4, np.zeros(7, np.float32))
    with pytest.raises(ValueError, match="input width is 32, expected 64"):
        ops.linear(data.normal(1, 32), (weight,), data.poison(1, 37))
    with pytest.raises(ValueError, match="output width"):
        ops.linear(data.normal(1, 64), (weight,), data.poison(1, 36))
    with pytest.raises(TypeError):
        ops.linear(np.zeros((1, 64)), (weight,), data.poison(1, 37))  # f64: entries take exactly their types
    with pytest.raises(IndexError, match="token id"):
        ops.embed(weight, np.array([37], np.int32), data.poison(1, 64))


def test_gather(ops: NumbaOps) -> None:
    x, rows = data.normal(5, 24), np.array([4, 0, 4], np.int32)
    out = data.poison(3, 24)
    ops.gather(x, rows, out)
    assert np.array_equal(out, x[rows])
    with pytest.raises(IndexError, match="row"):
        ops.gather(x, np.array([5], np.int32), out)
