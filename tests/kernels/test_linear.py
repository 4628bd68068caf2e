"""Linear, gated and embedding kernels against the reference; one row's bits in any company."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.errors import ModelFileError
from power_lab.kernels import reference
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.ops import Activation
from power_lab.kernels.quants import QuantType
from tests.kernels import data

CASES = [(type, *shape) for type, shapes in data.SHAPES.items() for shape in shapes]
ROWS = (1, 2, 3, 4, 5, 8, 9, 13, 70)
BIAS = data.normal(130, seed=3)


@pytest.mark.parametrize(("type", "n", "k"), CASES)
@pytest.mark.parametrize("rows", ROWS)
def test_linear(ops: NumbaOps, type: QuantType, n: int, k: int, rows: int) -> None:
    weight, values = data.weight(type, n, k)
    x, bias = data.normal(rows, k), data.normal(2 * n)
    out = data.poison(rows + 1, 2 * n)
    ops.linear(x, (weight, weight), out[:rows], bias)
    want = reference.linear(torch.from_numpy(x), torch.cat([values, values]), torch.from_numpy(bias)).numpy()
    assert np.abs(out[:rows] - want).max() < 1e-5 * _size(x, values) + 1e-6
    assert np.isnan(out[rows]).all(), "a row behind the output was written"
    plain = data.poison(rows, 2 * n)
    ops.linear(x, (weight, weight), plain)
    assert np.array_equal(out[:rows], plain + bias)


def _size(x: np.ndarray, values: torch.Tensor) -> float:
    """The largest sum of absolute products: what an f32 sum's error is relative to."""
    return float(reference.linear(torch.from_numpy(np.abs(x)), values.abs()).max())


@pytest.mark.parametrize(("type", "n", "k"), CASES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_up(ops: NumbaOps, type: QuantType, n: int, k: int, rows: int, activation: Activation) -> None:
    (gate, gate_values), (up, up_values) = data.weight(type, n, k), data.weight(QuantType.F32, n, k)
    x = data.normal(rows, k) / 4
    out = data.poison(rows + 1, n)
    ops.gate_up(x, gate, up, out[:rows], activation)
    want = reference.gate_up(torch.from_numpy(x), gate_values, up_values, activation).numpy()
    assert np.abs(out[:rows] - want).max() < 1e-5 * _size(x, gate_values) * _size(x, up_values)
    assert np.isnan(out[rows]).all(), "a row behind the output was written"


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_over_their_whole_range(ops: NumbaOps, activation: Activation) -> None:
    gates = np.concatenate([np.linspace(-12, 12, 4001), [-1e30, -200, 200, 1e30, 0, -0.0]]).astype(np.float32)
    one = ops.weight(QuantType.F32, 1, 2, np.array([[1, 0]], np.float32))
    up = ops.weight(QuantType.F32, 1, 2, np.array([[0, 1]], np.float32))
    x, out = np.stack([gates, np.ones_like(gates)], axis=1), data.poison(len(gates), 1)
    ops.gate_up(x, one, up, out, activation)
    g = torch.from_numpy(gates).double()
    active = torch.nn.functional.silu(g) if activation == "silu" else torch.nn.functional.gelu(g, approximate="tanh")
    np.testing.assert_allclose(out[:, 0], active.numpy(), rtol=2e-6, atol=1e-6)


def test_stacked_weights_of_different_types(ops: NumbaOps) -> None:
    """As Gemma's attention has them: queries and keys in Q5_0, values in Q8_0."""
    parts = [
        data.weight(QuantType.Q5_0, 96, 576),
        data.weight(QuantType.Q8_0, 33, 576),
        data.weight(QuantType.F16, 7, 576),
    ]
    for rows in (1, 3, 11):
        x = data.normal(rows, 576)
        out = data.poison(rows, 136)
        ops.linear(x, tuple(w for w, _ in parts), out)
        want = torch.cat([reference.linear(torch.from_numpy(x), values) for _, values in parts], dim=1).numpy()
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("type", [QuantType.F16, QuantType.Q4_0, QuantType.Q6_K])
def test_rows_of_a_larger_matrix_are_a_weight(ops: NumbaOps, type: QuantType) -> None:
    """Fused projections: each is a run of rows of one stored matrix."""
    n, k = 96, 768
    whole, _ = data.weight(type, n, k)
    x, together = data.normal(9, k), data.poison(9, n)
    ops.linear(x, (whole,), together)
    parts = [ops.weight(type, last - first, k, whole.data[first:last]) for first, last in pairwise((0, 32, 33, 70, n))]
    assert all(np.shares_memory(part.data, whole.data) for part in parts)
    out, alone = data.poison(9, n), data.poison(1, n)
    ops.linear(x, tuple(parts), out)
    assert out.tobytes() == together.tobytes()
    ops.linear(x[4:5], tuple(parts), alone)
    assert alone.tobytes() == together[4].tobytes()


@st.composite
def companies(draw: st.DrawFn) -> tuple[QuantType, int, int, list[int], list[int]]:
    """A weight, an order of some rows, and the sizes of the chunks in which they are computed."""
    type, n, k = draw(st.sampled_from(CASES))
    order = draw(st.lists(st.integers(0, 63), min_size=1, max_size=64, unique=True))
    cuts = draw(st.lists(st.integers(1, len(order)), max_size=6))
    return type, n, k, order, sorted({0, len(order), *cuts})


@settings(deadline=None, max_examples=150)
@given(companies(), st.sampled_from(["silu", "gelu_tanh"]))
def test_a_rows_bits_do_not_depend_on_its_company(
    case: tuple[QuantType, int, int, list[int], list[int]], activation: Activation
) -> None:
    type, n, k, order, cuts = case
    ops, (weight, _) = data.two_threads(), data.weight(type, n, k)
    x, (alone, gated) = data.normal(64, k, seed=1), _alone(type, n, k, activation)
    for first, last in pairwise(cuts):
        rows = order[first:last]
        out = data.poison(len(rows), n)
        ops.linear(x[rows], (weight,), out, BIAS[:n])
        assert out.tobytes() == alone[rows].tobytes()
        ops.gate_up(x[rows], weight, weight, out, activation)
        assert out.tobytes() == gated[rows].tobytes()


@lru_cache(maxsize=256)
def _alone(type: QuantType, n: int, k: int, activation: Activation) -> tuple[np.ndarray, np.ndarray]:
    """Every row computed by itself, by one thread."""
    weight, _ = data.weight(type, n, k)
    x, linear, gated = data.normal(64, k, seed=1), data.poison(64, n), data.poison(64, n)
    for r in range(64):
        data.one_thread().linear(x[r : r + 1], (weight,), linear[r : r + 1], BIAS[:n])
        data.one_thread().gate_up(x[r : r + 1], weight, weight, gated[r : r + 1], activation)
    return linear, gated


@pytest.mark.parametrize(("type", "n", "k"), [(type, *shapes[0]) for type, shapes in data.SHAPES.items()])
def test_every_row_count_gives_the_same_bits(type: QuantType, n: int, k: int) -> None:
    weight, _ = data.weight(type, n, k)
    x, (alone, gated) = data.normal(64, k, seed=1), _alone(type, n, k, "silu")
    for count in range(1, 41):
        for ops in (data.one_thread(), data.two_threads()):
            out = data.poison(count, n)
            ops.linear(x[:count], (weight,), out, BIAS[:n])
            assert out.tobytes() == alone[:count].tobytes()
            ops.gate_up(x[:count], weight, weight, out)
            assert out.tobytes() == gated[:count].tobytes()


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
    with pytest.raises(ValueError, match="shape of the result"):
        ops.linear(data.normal(1, 64), (weight,), data.poison(1, 36))
    with pytest.raises(ValueError, match="bias width"):
        ops.linear(data.normal(1, 64), (weight,), data.poison(1, 37), data.normal(1))
    with pytest.raises(TypeError):
        ops.linear(np.zeros((1, 64)), (weight,), data.poison(1, 37))  # f64: entries take exactly their types


def test_gathered_norms_are_those_of_their_rows(ops: NumbaOps) -> None:
    x, delta, weight, rows = (
        data.normal(5, 24),
        data.normal(5, 24, seed=1),
        data.normal(24),
        np.array([4, 0, 4], np.int32),
    )
    all_rows, out = data.poison(5, 24), data.poison(3, 24)
    ops.add_rms_norm(x.copy(), delta, None, weight, 1e-5, all_rows)
    ops.gather_rms_norm(x.copy(), delta, None, weight, 1e-5, rows, out)
    assert np.array_equal(out, all_rows[rows])
    with pytest.raises(IndexError, match="row"):
        ops.gather_rms_norm(x, delta, None, weight, 1e-5, np.array([5], np.int32), out[:1])
