"""What drafters ask of the operations that models have: narrow products, keys without queries, blocks that see themselves."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.ops import SampleRows
from power_lab.kernels.quants import QuantType
from tests.kernels import data


@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.BF16, QuantType.F32])
@pytest.mark.parametrize(("n", "k"), [(2000, 32), (2000, 64), (1, 608), (3, 64)])
def test_products_of_little_depth_and_width(ops: NumbaOps, type: QuantType, n: int, k: int) -> None:
    weight, values = data.weight(type, n, k)
    x, out = data.normal(70, k), data.poison(71, n)
    ops.linear(x, (weight,), out[:70])
    want = reference.linear(torch.from_numpy(x), values).numpy()
    size = reference.linear(torch.from_numpy(np.abs(x)), values.abs()).numpy()
    assert (np.abs(out[:70] - want) <= 1e-5 * size + 1e-6).all() and np.isnan(out[70]).all()
    for rows in (1, 5, 16):
        alone = data.poison(rows, n)
        data.one_thread().linear(x[:rows], (weight,), alone)
        assert alone.tobytes() == out[:rows].tobytes()


@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.BF16])
def test_rows_of_a_narrow_table(ops: NumbaOps, type: QuantType) -> None:
    weight, values = data.weight(type, 2000, 32)
    ids, out = np.array([1999, 0, 7], np.int32), data.poison(3, 32)
    ops.embed(weight, ids, out)
    assert np.array_equal(out, values.numpy()[ids])


def test_keys_and_values_without_queries(ops: NumbaOps) -> None:
    """Keys and values alone have the bits that they have beside queries."""
    kv_heads, dim, tables = 3, 64, np.array([[2, 1]], np.int32)
    qkv, rows = data.normal(70, 15 * dim), data.batch(np.arange(70), tables)
    table = ops.rope_tables(70, reference.frequencies(dim, 1e4), 1.0)
    for sizes in ((dim, dim), (9 * dim, kv_heads * dim)):
        norms = data.normal(sizes[0], seed=1), data.normal(sizes[1], seed=2)
        whole, alone = (data.poisoned_cache(ops, 3, kv_heads, dim) for _ in range(2))
        ops.rope_write(qkv.copy(), rows, table, False, 9, whole, norms, 1e-5)
        ops.rope_write(np.ascontiguousarray(qkv[:, 9 * dim :]), rows, table, False, 0, alone, norms, 1e-5)
        assert alone.keys.tobytes() == whole.keys.tobytes() and alone.values.tobytes() == whole.values.tobytes()


def test_queries_alone(ops: NumbaOps) -> None:
    """They are treated, and see, as they would beside keys and values; none are written."""
    heads, kv_heads, dim, tables = 9, 3, 64, np.array([[2, 1]], np.int32)
    qkv, rows = data.normal(70, 15 * dim), data.batch(np.arange(70), tables)
    for size in (1, heads):
        norms = data.normal(size * dim, seed=1), data.normal((kv_heads if size > 1 else 1) * dim, seed=2)
        table, cache = (
            ops.rope_tables(70, reference.frequencies(dim, 1e4), 1.0),
            data.poisoned_cache(ops, 3, kv_heads, dim),
        )
        whole, alone, written = qkv.copy(), np.ascontiguousarray(qkv[:, : heads * dim]), data.poison(2, 70, heads * dim)
        ops.rope_write(whole, rows, table, False, heads, cache, norms, 1e-5)
        before = cache.keys.tobytes(), cache.values.tobytes()
        ops.rope_write(alone, rows, table, False, heads, cache, norms, 1e-5)
        assert (cache.keys.tobytes(), cache.values.tobytes()) == before
        assert np.array_equal(alone, whole[:, : heads * dim])
        ops.attention(whole, rows, heads, 0.125, cache, written[0])
        ops.attention(alone, rows, heads, 0.125, cache, written[1])
        assert written[0].tobytes() == written[1].tobytes() and np.isfinite(written).all()
    with pytest.raises(ValueError, match="width of queries"):
        ops.rope_write(data.normal(70, 10 * dim), rows, table, False, heads, cache)
    with pytest.raises(ValueError, match="9 query heads"):
        ops.attention(data.normal(70, 8 * dim), rows, heads, 0.125, cache, written[0])


@pytest.mark.parametrize("interleaved_blocks", [False, True])
@pytest.mark.parametrize("window", [0, 40])
def test_rows_of_a_block_see_all_of_it(ops: NumbaOps, window: int, interleaved_blocks: bool) -> None:
    """Rows of one table share one position; what is behind it is not read."""
    heads, kv_heads, dim, block = 9, 3, 64, 8
    anchors = np.array([60, 5, 300])  # the block goes over a page's end, begins a sequence, is in a second split
    tables = np.arange(1, 3 * 5 + 1, dtype=np.int32).reshape(3, 5)
    cache = data.poisoned_cache(ops, 16, kv_heads, dim)
    table = ops.rope_tables(400, reference.frequencies(dim, 1e4), 1.0)
    known = []
    for i, anchor in enumerate(anchors):
        positions = np.arange(anchor + block)
        qkv = data.normal(len(positions), 15 * dim, seed=i)
        ops.rope_write(qkv, data.batch(positions, tables, np.full(len(positions), i)), table, False, heads, cache)
        known.append(torch.from_numpy(qkv).view(len(positions), 15, dim))
    order = np.arange(3 * block).reshape(3, block)
    order = order.T.ravel() if interleaved_blocks else order.ravel()
    request, row = order // block, order % block
    last = anchors[request] + block - 1
    batch = data.batch(last, tables, request)
    queries = np.stack([known[i][anchors[i] + r].numpy().ravel() for i, r in zip(request, row, strict=True)])
    out, alone = data.poison(3 * block, heads * dim), data.poison(1, heads * dim)
    ops.attention(queries, batch, heads, dim**-0.5, cache, out, window)
    for at, (i, r) in enumerate(zip(request, row, strict=True)):
        seen = known[i]
        q, k, v = seen[anchors[i] + r, :heads], seen[:, heads : heads + kv_heads], seen[:, heads + kv_heads :]
        want = reference.attention(q, k, v, dim**-0.5, window).numpy().ravel()
        np.testing.assert_allclose(out[at], want, rtol=1e-4, atol=2e-6)
        one = replace(batch, positions=batch.positions[at : at + 1], table_of=batch.table_of[at : at + 1])
        ops.attention(queries[at : at + 1], one, heads, dim**-0.5, cache, alone, window)
        assert alone[0].tobytes() == out[at].tobytes()


@pytest.mark.parametrize("limits", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.01}])
def test_tokens_outside_the_draft_vocabulary_are_never_drawn(ops: NumbaOps, limits: dict[str, float]) -> None:
    """Their logits are -inf; draws of the others are what they are among themselves, with the noise of their ids."""
    ids, vocabulary = np.sort(np.random.default_rng(0).permutation(5000)[:700]).astype(np.int32), 5000
    values, full = data.normal(32, 700) * 3, data.poison(32, vocabulary)
    ops.scatter_columns(values, ids, full)
    tokens = np.full(32, -7, np.int32)
    ops.sample(full, data.sampling(32, **limits), tokens)  # type: ignore[arg-type]
    assert np.isin(tokens, ids).all()
    for row in range(0, 32, 8):
        z = reference.scatter_columns(
            torch.from_numpy(values[row : row + 1]).double(), torch.from_numpy(ids), vocabulary
        )
        controls = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | limits
        assert tokens[row] == reference.sample(z[0], seed=7, position=row, **controls)  # type: ignore[arg-type]
    chosen, best, log = ops.logprobs(full, tokens, 16)
    among, few, narrow = ops.logprobs(values, np.searchsorted(ids, tokens).astype(np.int32), 16)
    assert np.array_equal(best, ids[few])
    np.testing.assert_allclose(chosen, among, atol=3e-6)
    np.testing.assert_allclose(log, narrow, atol=3e-6)


def test_draws_of_leading_rows(ops: NumbaOps) -> None:
    """A chain's steps draw from slices of one array of logits, with slices of all controls."""
    logits, rows = data.normal(12, 500) * 2, data.sampling(12, seed=3)
    tokens, some = np.full(12, -7, np.int32), np.full(12, -7, np.int32)
    ops.sample(logits, rows, tokens)
    for first, last in ((0, 5), (5, 12)):
        per_row = {
            field.name: getattr(rows, field.name)[first:last]
            for field in fields(SampleRows)
            if field.name not in ("history", "bias_ids", "bias_values")
        }
        ops.sample(logits[first:last], replace(rows, **per_row), some[first:last])
    assert np.array_equal(tokens, some)
