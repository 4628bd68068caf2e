"""Recorded operations: the same bits as called ones, on whatever their arrays hold when they run."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.kernels.numba import program
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.quants import QuantType
from tests.kernels import data


def layer(ops: NumbaOps, x: np.ndarray, out: np.ndarray, logits: np.ndarray) -> Callable[[], np.ndarray]:
    """A few operations in a row that read x and fill `logits`."""
    (gate, _), (up, _) = data.weight(QuantType.Q8_0, 96, 576), data.weight(QuantType.Q4_1, 96, 576)
    norm = data.normal(576, seed=1)

    def forward() -> np.ndarray:
        normed = ops.empty(x.shape, "float32")  # lives as long as the graph, although nobody else knows it
        ops.rms_norm(x, norm, 1e-5, normed)
        ops.linear(normed, (gate, up), out)
        ops.gate_up(normed, gate, gate, logits, "gelu_tanh")
        ops.softcap(logits, 2.0)
        return logits

    return forward


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_replays_are_what_calls_are(ops: NumbaOps, rows: int) -> None:
    x, out, logits = data.normal(rows, 576), data.poison(rows, 192), data.poison(rows, 96)
    forward = layer(ops, x, out, logits)
    captured = ops.capture(forward)
    assert captured is not None and np.isnan(out).all() and np.isnan(logits).all(), "recording runs nothing"
    graph, result = captured
    assert result is logits and graph.nbytes > 0
    gc.collect()
    for seed in range(3):
        x[:] = data.normal(rows, 576, seed=seed)
        forward()
        want = out.tobytes(), logits.tobytes()
        out[:], logits[:] = np.nan, np.nan
        ops.replay(graph)
        assert (out.tobytes(), logits.tobytes()) == want


def test_an_error_while_recording_leaves_nothing_recorded(ops: NumbaOps) -> None:
    x, out = data.normal(2, 24), data.poison(2, 24)

    def forward() -> np.ndarray:
        ops.rms_norm(x, np.ones(24, np.float32), 1e-5, out)
        raise MemoryError

    with pytest.raises(MemoryError):
        ops.capture(forward)
    ops.rms_norm(x, np.ones(24, np.float32), 1e-5, out)
    assert np.isfinite(out).all(), "called again, not recorded"


def test_numbers_that_change_behind_a_graph_read_nothing_else(ops: NumbaOps) -> None:
    """A called operation refuses them; a replayed one cannot, and answers NaN."""
    table, values = data.weight(QuantType.F32, 70, 64)
    ids, rows, x, y = np.array([3, 5], np.int32), np.array([1], np.int32), data.poison(2, 64), data.poison(2, 64)
    zeros, ones, normed, out = (
        np.zeros((2, 64), np.float32),
        np.ones(64, np.float32),
        data.poison(2, 64),
        data.poison(1, 64),
    )

    def forward() -> np.ndarray:
        ops.embed(table, ids, x)
        ops.embed(table, ids, y)
        ops.rms_norm(x, ones, 1e-5, normed)
        ops.gather_rms_norm(y, zeros, None, ones, 1e-5, rows, out)
        return out

    graph, _ = ops.capture(forward)  # type: ignore[misc]
    ops.replay(graph)
    assert np.array_equal(x, values[[3, 5]].numpy()) and np.array_equal(out[0], normed[1])
    ids[1] = 70
    ops.replay(graph)
    assert np.array_equal(x[0], values[3].numpy()) and np.isnan(x[1]).all()
    ids[1], rows[0] = 5, -1
    ops.replay(graph)
    assert np.isnan(out).all() and not np.isnan(x).any()
    with pytest.raises(IndexError, match=r"row outside 0\.\.1"):
        forward()


@pytest.mark.parametrize("bad", [np.zeros((4, 4), np.float64), np.zeros((4, 8), np.float32)[:, ::2]])
def test_addresses_are_taken_of_plain_arrays_only(bad: np.ndarray) -> None:
    with pytest.raises(TypeError, match="in one piece"):
        program.f32(bad)


def test_an_address_is_what_numpy_says_of_every_array() -> None:
    """Also of those that lend no buffer: read-only ones, and ones without elements."""
    fixed = data.normal(3, 4)
    fixed.flags.writeable = False
    for array in (data.normal(3, 4), data.normal(3, 4)[1:], fixed, np.empty((0, 4), np.float32)):
        assert program.f32(array) == program.address(array) == array.__array_interface__["data"][0]
    strided = data.normal(3, 4)[:, ::2]
    assert program.address(strided) == strided.__array_interface__["data"][0]


@given(st.floats(width=64, allow_nan=False, min_value=-3e38, max_value=3e38))
def test_bits_are_those_of_the_nearest_f32(value: float) -> None:
    assert program.bits(value) == int(np.float32(value).view(np.uint32))
