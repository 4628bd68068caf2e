"""What drafters ask of the operations that models have, through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.ops import BLOCK, Batch
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import attention, embed, linear, logprobs, moves, rope
from tests.kernels.triton.matrices import rounded, weight
from tests.kernels.triton.sampling import Row, draw, scores
from tests.kernels.triton.test_attention import listed
from tests.kernels.triton.test_linear import WORK, activations, assert_close, poison
from tests.kernels.triton.test_norm import normal

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
NONE = torch.empty(0, dtype=torch.int32)


@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.BF16])
@pytest.mark.parametrize(("n", "k"), [(70, 32), (70, 64), (1, 608), (3, 64)])
@pytest.mark.parametrize("rows", [1, 19, 130])
def test_products_of_little_depth_and_width(type: QuantType, n: int, k: int, rows: int) -> None:
    stored, values = weight(type, n, k)
    (given, x), out = activations(rows, k, type), poison(rows + 1, n)
    linear.linear(given, (stored,), out[:rows], WORK)
    want = reference.linear(x, rounded(values, type))
    assert_close(out[:rows], want, reference.linear(x.abs(), values.abs()))
    assert out[rows].isnan().all()


@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.BF16])
def test_rows_of_a_narrow_table(type: QuantType) -> None:
    table, values = weight(type, 40, 32)
    out = poison(4, 32)
    embed.embed(table, torch.tensor([39, 0, 7], dtype=torch.int32), out[:3])
    assert torch.equal(out[:3], values[[39, 0, 7]]) and out[3].isnan().all()
    narrow = poison(3, 32).bfloat16()
    embed.embed(
        table, torch.tensor([39, -2, 40], dtype=torch.int32), narrow, 1.0, torch.tensor([1, 7], dtype=torch.int32)
    )
    cut = values.view(torch.int32) >> 16 << 16  # the interpreter cuts off where a GPU rounds
    assert torch.equal(narrow[:2].float(), cut.view(torch.float32)[[39, 7]]) and narrow[2].isnan().all()


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_keys_and_values_without_queries(kv_heads: int, wide: bool) -> None:
    """They have the bits that they have beside queries."""
    dim, width = 64, 2 * kv_heads * 64
    positions, slots = torch.tensor([70, 3], dtype=torch.int32), torch.tensor([2 * BLOCK + 5, BLOCK + 63])
    qkv, sizes = normal(2, 9 * dim + width), (9, kv_heads) if wide else (1, 1)
    norms = normal(sizes[0] * dim, seed=1), normal(sizes[1] * dim, seed=2)
    table = reference.rope_tables(80, reference.frequencies(dim, 1e4)).float()
    batch = Batch(NONE, positions, slots, NONE, NONE, NONE)
    caches = [rope.kv_cache(3, kv_heads, dim, "cpu") for _ in range(2)]
    for cache in (*caches[0], *caches[1]):
        cache.fill_(torch.nan)
    alone = qkv[:, 9 * dim :].contiguous()
    rope.rope_write(qkv, batch, table, False, 9, *caches[0], norms, 1e-5)
    rope.rope_write(alone, batch, table, False, 0, *caches[1], norms, 1e-5)
    for whole, few in zip(*caches, strict=True):
        assert torch.equal(whole.view(torch.int16), few.view(torch.int16)) and not few.isnan().all()


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_queries_alone(wide: bool, many: bool) -> None:
    """They are treated, and see, as they would beside keys and values; none are written."""
    heads, kv_heads, dim = 4, 2, 16
    positions, slots = torch.tensor([70, 3], dtype=torch.int32), torch.tensor([2 * BLOCK + 6, BLOCK + 3])
    tables, table_of = torch.tensor([[1, 2], [1, 2]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    batch = Batch(NONE, positions, slots, table_of, tables, NONE)
    whole = normal(2, (heads + 2 * kv_heads) * dim)
    alone = whole[:, : heads * dim].contiguous()
    norms = normal((heads if wide else 1) * dim, seed=1), normal((kv_heads if wide else 1) * dim, seed=2)
    table = reference.rope_tables(80, reference.frequencies(dim, 1e4)).float()
    keys, values = (normal(3, kv_heads, BLOCK, dim, seed=seed).bfloat16() for seed in (3, 4))
    rope.rope_write(whole, batch, table, False, heads, keys, values, norms, 1e-5)
    kept = keys.clone(), values.clone()
    rope.rope_write(alone, batch, table, False, heads, keys, values, norms, 1e-5)
    assert torch.equal(keys, kept[0]) and torch.equal(values, kept[1])
    assert torch.equal(rope.queries(alone, heads, dim), rope.queries(whole, heads, dim))
    cut = replace(attention.plan(1, heads, kv_heads, dim, 2), rows=8, programs=0, stages=2) if many else None
    results = []
    for qkv in (whole, alone):
        scratch, out = poison(attention.scratch_floats(2, heads, kv_heads, dim, 2)), poison(2, heads * dim)
        attention.attention(qkv, listed(batch, 8), heads, 0.25, keys, values, out, 0, 0.0, None, scratch, cut)
        results.append(out)
    assert torch.equal(*results) and results[0].isfinite().all()


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("by_position", [False, True])
def test_rows_of_a_block_see_all_of_it(window: int, by_position: bool, many: bool) -> None:
    """Rows of one table share one position, by either kernel; what is behind it is not read."""
    heads, kv_heads, dim, block, anchors = 4, 2, 16, 4, (62, 0, 127)
    keys, values = rope.kv_cache(13, kv_heads, dim, "cpu")
    keys.fill_(torch.nan), values.fill_(torch.nan)
    tables = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
    known = []
    for i, anchor in enumerate(anchors):
        kv = normal(2, anchor + block, kv_heads, dim, seed=i).bfloat16()
        for cache, part in zip((keys, values), kv, strict=True):
            for position in range(anchor + block):
                cache[tables[i, position // BLOCK], :, position % BLOCK] = part[position]
        known.append(kv)
    order = torch.arange(3 * block).view(3, block)
    request = ((order.T if by_position else order).flatten() // block).int()
    last = (torch.tensor(anchors)[request.long()] + block - 1).int()
    qkv = normal(3 * block, (heads + 2 * kv_heads) * dim, seed=9)
    plain = qkv[:, : heads * dim].view(-1, heads, dim).bfloat16()
    rope.queries(qkv, heads, dim).copy_(plain)
    batch, out = Batch(NONE, last, NONE, request, tables, NONE), poison(3 * block, heads * dim)
    scratch = poison(attention.scratch_floats(3 * block, heads, kv_heads, dim, 4))
    cut = replace(attention.plan(1, heads, kv_heads, dim, 4), rows=8, programs=0, stages=2) if many else None
    attention.attention(
        qkv, listed(batch, 8), heads, dim**-0.5, keys, values, out, window, 0.0, None, scratch, cut
    )  # fmt: skip
    for row, i in enumerate(request.tolist()):
        want = reference.attention(plain[row].float(), *known[i], dim**-0.5, window).flatten()
        np.testing.assert_allclose(out[row].numpy(), want.numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered in subtract:RuntimeWarning"
)  # of two infinities, not used
@pytest.mark.parametrize("row", [Row(temperature=0.0), Row(), Row(top_k=5), Row(top_p=0.9), Row(min_p=0.01)], ids=repr)
def test_tokens_outside_the_draft_vocabulary_are_never_drawn(row: Row) -> None:
    """Whole parts of the vocabulary are -inf."""
    ids = torch.tensor([2500, 2501, 2700, 4095, 4999], dtype=torch.int32)
    values, full = torch.tensor([[0.5, 1.0, 0.7, -1.0, 0.9]]), poison(1, 5000)
    moves.scatter_columns(values, ids, full)
    rows = [replace(row, seed=seed) for seed in range(3)]
    full = full.repeat(3, 1)
    want = [int(scores(line, one).argmax()) for line, one in zip(full, rows, strict=True)]
    assert draw(full, rows) == want
    assert draw(values.repeat(3, 1), rows, ids=ids) == want, "columns that mean tokens"
    tokens = torch.tensor([2501, 4999, 0], dtype=torch.int32)
    chosen, best, log = logprobs.logprobs(full, tokens, 5)
    want = torch.log_softmax(values[0].double(), 0)
    np.testing.assert_allclose(chosen[:2].numpy(), want[[1, 4]].numpy(), atol=3e-6)
    assert chosen[2] == -torch.inf
    assert torch.equal(best, ids[values[0].argsort(descending=True)].expand(3, 5))
    np.testing.assert_allclose(log[0].numpy(), want.sort(descending=True).values.numpy(), atol=3e-6)
