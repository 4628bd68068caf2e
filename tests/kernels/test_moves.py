"""What drafters add to a step: hidden states laid aside, rows taken, logits spread, a block's rows convolved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.quants import QuantType
from tests.kernels import data


@pytest.mark.parametrize("width", [1, 24, 576])
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("parts", ["x", "delta", "post"])
@pytest.mark.parametrize("placed", [False, True])
def test_tapped_rows_have_the_bits_of_the_residual_stream(
    ops: NumbaOps, width: int, rows: int, parts: str, placed: bool
) -> None:
    x, delta, post = data.normal(rows, width), data.normal(rows, width, seed=1), data.normal(width, seed=2)
    slots = np.random.default_rng(3).permutation(40)[:rows].astype(np.int64) if placed else None
    out, want = data.poison(40, 3 * width + 1), x.copy()
    if parts != "x":
        ops.add_rms_norm(want, delta.copy(), post if parts == "post" else None, None, 1e-5, data.poison(rows, width))
    kept = x.tobytes(), delta.tobytes()
    ops.tap(x, None if parts == "x" else delta, post if parts == "post" else None, 1e-5, out, width + 1, slots)
    places = np.arange(rows) if slots is None else slots
    assert np.array_equal(out[places, width + 1 : 2 * width + 1], want)
    out[places, width + 1 : 2 * width + 1] = np.nan
    assert np.isnan(out).all(), "something beside was written"
    assert (x.tobytes(), delta.tobytes()) == kept


def test_a_row_without_a_slot_goes_nowhere(ops: NumbaOps) -> None:
    out = data.poison(3, 8)
    ops.tap(data.normal(4, 8), None, None, 0.0, out, 0, np.array([-1, 3, 1, 2**40], np.int64))
    assert np.isnan(out[[0, 2]]).all() and np.array_equal(out[1], data.normal(4, 8)[2])


def test_columns_and_rows_that_are_not_there_are_errors(ops: NumbaOps) -> None:
    x = data.normal(4, 8)
    for column in (-1, 9):
        with pytest.raises(ValueError, match="columns from"):
            ops.tap(x, None, None, 0.0, data.poison(4, 16), column, None)
    with pytest.raises(ValueError, match="no place in 3"):
        ops.tap(x, None, None, 0.0, data.poison(3, 16), 0, None)
    with pytest.raises(ValueError, match="shape of what is added"):
        ops.tap(x, x[:3], None, 0.0, data.poison(4, 16), 0, None)


@pytest.mark.parametrize("rows", [1, 50])
def test_rows_are_taken(ops: NumbaOps, rows: int) -> None:
    table, index = data.normal(9, 24), np.random.default_rng(0).integers(-2, 9, rows)
    out = data.poison(rows + 1, 24)
    ops.take(table, index, out[:rows])
    assert np.array_equal(out[:rows], reference.take(torch.from_numpy(table), torch.from_numpy(index)).numpy())
    assert np.isnan(out[rows]).all()
    index[0] = 9
    ops.take(table, index, out[:rows])
    assert np.isnan(out[0]).all()


@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("drawn", [None, np.array([5, 0, -1], np.int32)])
def test_merged_rows_are_norms_of_embeddings_and_states(
    ops: NumbaOps, rows: int, placed: bool, drawn: np.ndarray | None
) -> None:
    rng, width = np.random.default_rng(0), 40
    first, second, states = data.normal(width), data.normal(width, seed=1), data.normal(60, width, seed=2)
    table = ops.weight(QuantType.F32, 9, width, data.normal(9, width, seed=3))
    ids = rng.integers(0 if drawn is None else -2, 9, rows).astype(np.int32)
    index = rng.permutation(60)[:rows] - 1 if placed else None
    out, want, taken = data.poison(rows + 1, 2 * width), data.poison(rows, width), states[:rows]
    ops.embed(table, ids, want, 1.5, drawn)
    if index is not None:
        taken = data.poison(rows, width)
        ops.take(states, index, taken)
    ops.merge(table, ids, 1.5, drawn, first, states, index, second, 1e-5, out[:rows])
    tensors = (torch.from_numpy(part) for part in (want, first, taken, second))
    np.testing.assert_allclose(out[:rows], reference.merge(*tensors, 1e-5).numpy(), rtol=1e-5, atol=1e-6)
    assert np.isnan(out[rows]).all()
    kept = out[rows - 1].copy()
    one = data.poison(1, 2 * width)
    last = states[rows - 1 : rows] if index is None else states
    ops.merge(table, ids[-1:], 1.5, drawn, first, last, None if index is None else index[-1:], second, 1e-5, one)
    assert np.array_equal(one[0], kept), "a row's bits depend on its company"


def test_merged_rows_that_are_not_there(ops: NumbaOps) -> None:
    norm, states, out = data.normal(8), data.normal(3, 8), data.poison(3, 16)
    table = ops.weight(QuantType.F32, 9, 8, data.normal(9, 8, seed=3))
    ops.merge(table, np.array([9, -1, 2], np.int32), 1.0, None, norm, states, np.array([0, -1, 3]), norm, 1e-5, out)
    assert np.isnan(out[:2, :8]).all() and np.isfinite(out[2, :8]).all()
    assert np.isfinite(out[0, 8:]).all() and not out[1, 8:].any() and np.isnan(out[2, 8:]).all()
    ids = np.zeros(4, np.int32)
    for index in (None, np.zeros(3, np.int64)):
        with pytest.raises(ValueError, match="4 rows, and states of 3"):
            ops.merge(table, ids, 1.0, None, norm, states, index, norm, 1e-5, data.poison(4, 16))
    with pytest.raises(ValueError, match="width of the states"):
        ops.merge(table, ids, 1.0, None, norm, data.normal(4, 7), None, norm, 1e-5, data.poison(4, 16))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("ids", [[0, 6, 7, 99], [99], [5], list(range(100)), []])
def test_logits_of_some_tokens_among_those_of_all(ops: NumbaOps, rows: int, ids: list[int]) -> None:
    values, columns, out = data.normal(rows, len(ids)), np.array(ids, np.int32), data.poison(rows + 1, 100)
    ops.scatter_columns(values, columns, out[:rows])
    want = reference.scatter_columns(torch.from_numpy(values), torch.from_numpy(columns), 100)
    assert np.array_equal(out[:rows], want.numpy())
    assert np.isnan(out[rows]).all()


def orders(rows: int) -> dict[str, list[int]]:
    """Blocks of four rows, one behind the other or position by position."""
    blocks = -(-rows // 4)
    return {
        "blocks": [r - 1 if r % 4 else -1 for r in range(rows)],
        "positions": [r - blocks if r >= blocks else -1 for r in range(rows)],
        "alone": [-1] * rows,
    }


@pytest.mark.parametrize("order", ["blocks", "positions", "alone"])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("rows", "width", "groups", "taps"), [(1, 16, 1, 2), (19, 576, 36, 2), (12, 48, 3, 3)])
def test_convolutions(ops: NumbaOps, rows: int, width: int, groups: int, taps: int, side: int, order: str) -> None:
    x, coef = data.normal(rows, width), data.normal(rows, 2 * taps * groups, seed=1)
    base, previous, out = data.normal(2, taps, width, seed=2), orders(rows)[order], data.poison(rows + 1, width)
    ops.dynamic_conv(x, coef, base, side, np.array(previous, np.int32), out[:rows])
    tensors = [torch.from_numpy(array) for array in (x, coef, base)]
    want = reference.dynamic_conv(*tensors, side, previous)
    np.testing.assert_allclose(out[:rows], want.numpy(), rtol=1e-5, atol=1e-5)
    assert np.isnan(out[rows]).all()


def test_a_blocks_bits_do_not_depend_on_company_or_order(ops: NumbaOps) -> None:
    x, coef, base = data.normal(16, 576), data.normal(16, 4 * 36, seed=1), data.normal(2, 2, 576, seed=2)
    together = data.poison(16, 576)
    ops.dynamic_conv(x, coef, base, 1, np.array(orders(16)["blocks"], np.int32), together)
    turned = np.arange(16).reshape(4, 4).T.ravel()
    by_position = data.poison(16, 576)
    ops.dynamic_conv(x[turned], coef[turned], base, 1, np.array(orders(16)["positions"], np.int32), by_position)
    assert by_position.tobytes() == together[turned].tobytes()
    for first in range(0, 16, 4):
        rows, alone = slice(first, first + 4), data.poison(4, 576)
        data.one_thread().dynamic_conv(x[rows], coef[rows], base, 1, np.array([-1, 0, 1, 2], np.int32), alone)
        assert alone.tobytes() == together[rows].tobytes()


def test_convolutions_that_cannot_be_are_errors(ops: NumbaOps) -> None:
    x, coef, base, previous = data.normal(2, 24), data.normal(2, 12), data.normal(2, 2, 24), np.full(2, -1, np.int32)
    with pytest.raises(ValueError, match="another array"):
        ops.dynamic_conv(x, coef, base, 0, previous, x)
    with pytest.raises(ValueError, match="side 2"):
        ops.dynamic_conv(x, coef, base, 2, previous, data.poison(2, 24))
    for wrong in (data.normal(2, 20), data.normal(2, 3), data.normal(1, 12)):
        with pytest.raises(ValueError, match=r"coefficients|groups"):
            ops.dynamic_conv(x, wrong, base, 0, previous, data.poison(2, 24))


def test_replays_are_what_calls_are(ops: NumbaOps) -> None:
    x, table, wide = data.normal(4, 24), data.poison(8, 48), data.poison(4, 60)
    coef, base, previous = data.normal(4, 8, seed=1), data.normal(2, 2, 24, seed=2), np.array([-1, 0, 1, 2], np.int32)
    slots, index, columns = (
        np.array([7, 1, 0, 5], np.int64),
        np.array([7, 1, -1, 5], np.int64),
        np.arange(0, 48, 2, np.int32),
    )

    def forward() -> tuple[np.ndarray, ...]:
        taken, convolved = ops.empty((4, 48), "float32"), ops.empty((4, 24), "float32")
        ops.dynamic_conv(x, coef, base, 0, previous, convolved)
        ops.tap(x, convolved, base[0, 0], 1e-5, table, 0, slots)
        ops.tap(x, None, None, 1e-5, table, 24, slots)
        ops.take(table, index, taken)
        ops.scatter_columns(values, columns, wide)
        return (taken, *ops.logprobs(wide, columns[:4], 3))

    values = data.normal(4, 24, seed=5)
    want, spread = forward(), wide.tobytes()
    graph, results = ops.capture(forward)  # type: ignore[misc]
    assert not any(map(np.array_equal, results, want)), "recording runs nothing"
    table[:], wide[:] = np.nan, np.nan
    ops.replay(graph)
    assert wide.tobytes() == spread and all(a.tobytes() == b.tobytes() for a, b in zip(results, want, strict=True))
    assert np.isfinite(results[0]).all() and not results[0][2].any()


def test_draws_are_not_recorded(ops: NumbaOps) -> None:
    """They would read their controls once."""
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        ops.capture(lambda: ops.sample(data.normal(1, 9), data.sampling(1), np.zeros(1, np.int32)))
