"""Embedding rows: the values of every storage type."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.quants import QuantType
from tests.kernels import data

CASES = [(type, *shape) for type, shapes in data.SHAPES.items() for shape in shapes]


@pytest.mark.parametrize(("type", "n", "k"), CASES)
def test_values_are_ggufs(ops: NumbaOps, type: QuantType, n: int, k: int) -> None:
    weight, values = data.weight(type, n, k)
    oracle = gguf.quants.dequantize(weight.data, gguf.GGMLQuantizationType(int(type))).reshape(n, k)
    ids = np.random.default_rng(0).permutation(n).astype(np.int32)
    out = data.poison(n + 1, k)
    ops.embed(weight, ids, out[:n])
    assert out[:n].tobytes() == oracle[ids].tobytes()
    assert np.isnan(out[n]).all(), "a row behind the output was written"
    assert values.numpy().tobytes() == oracle.tobytes()
    assert ops.vector(type, weight.data[:1]).tobytes() == oracle[0].tobytes()


def test_values_are_scaled_in_f32(ops: NumbaOps) -> None:
    weight, values = data.weight(QuantType.Q8_0, 96, 576)
    out, scale = data.poison(3, 576), 576**0.5
    ops.embed(weight, np.array([5, 95, 5], np.int32), out, scale)
    assert np.array_equal(out, values.numpy()[[5, 95, 5]] * np.float32(scale))


def test_ids_below_zero_are_tokens_of_the_step_before(ops: NumbaOps) -> None:
    weight, values = data.weight(QuantType.Q8_0, 96, 64)
    ids, drawn, out = np.array([5, -1, -3], np.int32), np.array([7, 95, 0], np.int32), data.poison(3, 64)
    ops.embed(weight, ids, out, drawn=drawn)
    assert np.array_equal(out, values.numpy()[[5, 7, 0]])
    graph, _ = ops.capture(lambda: ops.embed(weight, ids, out, drawn=drawn))  # type: ignore[misc]
    drawn[:] = 3, 0, -1
    ids[0] = -2
    ops.replay(graph)
    assert np.array_equal(out[:2], values.numpy()[[0, 3]])
    assert np.isnan(out[2]).all(), "a token that could not be drawn"
    ids[:] = -4, -(2**31), 96
    ops.replay(graph)
    assert np.isnan(out).all()
    with pytest.raises(IndexError, match=r"token id outside -3\.\.95"):
        ops.embed(weight, np.array([-4], np.int32), out[:1], drawn=drawn)


def test_a_token_outside_the_table_is_an_error(ops: NumbaOps) -> None:
    weight, _ = data.weight(QuantType.Q4_1, 37, 64)
    for token in (37, -1):
        with pytest.raises(IndexError, match="token id"):
            ops.embed(weight, np.array([token], np.int32), data.poison(1, 64))
