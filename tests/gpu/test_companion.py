"""What drafters add to a step, on the GPU: values, rows' own bits, and captured chains."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.ops import BLOCK, Batch
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import attention, conv, embed, linear, logprobs, moves, norm, rope, sample
from power_lab.kernels.triton.operand import WHOLE, narrow
from tests.kernels.triton.matrices import operand, rounded, weight
from tests.kernels.triton.sampling import Row, controls, scores

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
WIDTH, VOCABULARY, SAID = 576, 49152, 16384


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def poison(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=kind, device="cuda")


def whole(values: list[int] | np.ndarray | torch.Tensor, kind: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.as_tensor(values).to("cuda", kind)


def some_ids(count: int, vocabulary: int) -> torch.Tensor:
    return whole(np.sort(np.random.default_rng(count).permutation(vocabulary)[:count]))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    return one.shape == other.shape and torch.equal(*(x.contiguous().view(torch.uint8) for x in (one, other)))


def captured(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("width", [1, 40, 576, 1536, 4096])
@pytest.mark.parametrize("parts", ["x", "delta", "post"])
def test_taps_have_the_bits_that_the_norm_reads(width: int, parts: str) -> None:
    x, delta, post = normal(300, width), normal(300, width, seed=1), normal(width, seed=2)
    slots = torch.randperm(400, device="cuda", generator=torch.Generator("cuda").manual_seed(3))[:300]
    slots[7], slots[8] = -1, 2**40
    given = (None if parts == "x" else delta, post if parts == "post" else None)
    summed, normed = x.clone(), poison(300, width, kind=torch.bfloat16)
    if parts != "x":
        norm.norm(summed, *given, post, 1e-5, normed)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        out, want = poison(400, 3 * width, kind=kind), poison(400, 3 * width, kind=kind)
        kept = [row for row in range(300) if row not in (7, 8)]
        want[slots[kept], width : 2 * width] = narrow(summed[kept], kind)
        moves.tap(x, *given, 1e-5, out, width, slots)
        if kind != torch.float32 or parts != "post":  # what is written decides how threads share the squares
            assert same(out, want)
        else:
            torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6, equal_nan=True)
        plain = poison(300, 3 * width, kind=kind)
        moves.tap(x, *given, 1e-5, plain, width, None)
        assert same(plain[kept], out[slots[kept]])
        alone = poison(1, 3 * width, kind=kind)
        moves.tap(x[100:101], *(p if p is None or p is post else p[100:101] for p in given), 1e-5, alone, width, None)
        assert same(alone[0], plain[100])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [40, 576, 2304])
def test_rows_are_taken(width: int, kind: torch.dtype) -> None:
    table, out = normal(1000, width).to(kind), poison(515, width, kind=kind)
    index = torch.randint(-3, 1000, (514,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    index[3], index[4] = 1000, 2**40
    moves.take(table, index, out[:514])
    want = torch.where(index[:, None] < 0, torch.zeros((), dtype=kind, device="cuda"), table[index.clamp(0, 999)])
    want[3:5] = torch.nan
    assert torch.equal(out[:514].isnan(), want.isnan()) and torch.equal(out[:514].nan_to_num(), want.nan_to_num())
    assert out[514].isnan().all()


@pytest.mark.parametrize(
    ("number", "vocabulary"), [(1, 100), (SAID, VOCABULARY), (VOCABULARY, VOCABULARY), (100000, 262144), (999, 151937)]
)
@pytest.mark.parametrize("rows", [1, 16, 120])
def test_logits_of_some_tokens_among_those_of_all(number: int, vocabulary: int, rows: int) -> None:
    values, ids, out = normal(rows, number), some_ids(number, vocabulary), poison(rows + 1, vocabulary)
    moves.scatter_columns(values, ids, out[:rows])
    want = torch.full((rows, vocabulary), -torch.inf, device="cuda")
    want[:, ids.long()] = values
    assert torch.equal(out[:rows], want) and out[rows].isnan().all()


@pytest.mark.parametrize(("width", "groups", "taps"), [(576, 36, 2), (4096, 256, 2), (48, 3, 3)])
@pytest.mark.parametrize("side", [0, 1])
def test_convolutions(width: int, groups: int, taps: int, side: int) -> None:
    x, coef, base = normal(128, width), normal(128, 2 * taps * groups, seed=1), normal(2, taps, width, seed=2)
    before = whole([r - 1 if r % 16 else -1 for r in range(128)])
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        given, out = narrow(x, kind), poison(129, width)
        conv.dynamic_conv(given, coef, base, side, before, out[:128])
        meant = given.float() * (WHOLE.value if kind == torch.float16 else 1)
        want = reference.dynamic_conv(meant.cpu(), coef.cpu(), base.cpu(), side, before.tolist())
        torch.testing.assert_close(out[:128].double().cpu(), want, rtol=1e-5, atol=1e-5)
        assert out[128].isnan().all()
        for other in (torch.bfloat16, torch.float16):
            few = poison(128, width, kind=other)
            conv.dynamic_conv(given, coef, base, side, before, few)
            assert same(few, narrow(out[:128], other))
        part, alone = slice(48, 64), poison(16, width)
        conv.dynamic_conv(given[part], coef[part], base, side, before[:16], alone)
        assert same(alone, out[part])
        turned = torch.arange(128, device="cuda").view(8, 16).T.flatten()
        by_position = whole([r - 8 if r >= 8 else -1 for r in range(128)])
        alone = poison(128, width)
        conv.dynamic_conv(given[turned].contiguous(), coef[turned].contiguous(), base, side, by_position, alone)
        assert same(alone, out[:128][turned])


@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.BF16])
@pytest.mark.parametrize(("n", "k"), [(SAID, 32), (SAID, 64), (1, 608), (1, 576), (1, 32)])
def test_products_of_little_depth_and_width(type: QuantType, n: int, k: int) -> None:
    stored, values = weight(type, n, k, device="cuda")
    work, (x, meant), out = linear.Workspace.on("cuda"), operand(normal(300, k), type), poison(301, n)
    linear.linear(x, (stored,), out[:300], work)
    want = meant.double() @ rounded(values, type).double().T
    size = meant.double().abs() @ values.double().abs().T
    assert ((out[:300] - want).abs() <= 1e-5 * size + 1e-6).all() and out[300].isnan().all()
    for rows in (1, 8, 16, 128):
        alone = poison(rows, n)
        linear.linear(x[100 : 100 + rows], (stored,), alone, work)
        assert same(alone, out[100 : 100 + rows])
    few, wide = poison(3, k, kind=x.dtype), poison(3, k)
    ids = whole([n - 1, 0, n // 2])
    embed.embed(stored, ids, few)
    embed.embed(stored, ids, wide)
    assert torch.equal(wide, values[ids.long()]) and same(few, narrow(wide, x.dtype))


def test_sums_alone_of_wide_rows() -> None:
    x, delta = normal(16, VOCABULARY), normal(16, VOCABULARY, seed=1)
    want = x + delta
    norm.norm(x, delta, None, None, 0.0, None)
    assert same(x, want)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("places", [1, 8, 20])  # by the kernel of few rows, of few and of many
def test_blocks_see_all_of_themselves(places: int, by_position: bool) -> None:
    heads, kv_heads, dim, block, pages = 9, 3, 64, 16, 20
    rng = np.random.default_rng(places)
    anchors = rng.integers(0, pages * BLOCK - block, places)
    tables = whole(rng.permutation(places * pages).reshape(places, pages) + 1)
    keys, values = rope.kv_cache(places * pages + 1, kv_heads, dim, torch.device("cuda"))
    keys.copy_(normal(*keys.shape, seed=1)), values.copy_(normal(*values.shape, seed=2))
    order = np.arange(places * block).reshape(places, block)
    order = order.T.ravel() if by_position else order.ravel()
    request, row = order // block, order % block
    positions, last = whole(anchors[request] + row), whole(anchors[request] + block - 1)
    slots = tables[whole(request).long(), positions.long() // BLOCK].long() * BLOCK + positions.long() % BLOCK
    own = Batch(last[:0], positions, slots, whole(request), tables, last[:0])
    seen = Batch(last[:0], last, slots, whole(request), tables, last[:0])
    turn = reference.rope_tables(pages * BLOCK, reference.frequencies(dim, 1e4)).float().cuda()
    qkv = normal(places * block, 15 * dim, seed=3)
    queries, kv = qkv[:, : heads * dim].contiguous(), qkv[:, heads * dim :].contiguous()
    norms = normal(dim, seed=4), normal(dim, seed=5)
    rope.rope_write(kv, own, turn, False, 0, keys, values, norms, 1e-5)
    kept = keys.clone(), values.clone()
    rope.rope_write(queries, own, turn, False, heads, keys, values, norms, 1e-5)
    assert same(keys, kept[0]) and same(values, kept[1])
    rope.rope_write(qkv, own, turn, False, heads, keys, values, norms, 1e-5)
    assert same(keys, kept[0]) and same(values, kept[1])
    assert same(rope.queries(qkv, heads, dim), rope.queries(queries, heads, dim))

    def attend(rows: slice, given: torch.Tensor) -> torch.Tensor:
        count = len(given[rows])
        batch = Batch(last[:0], seen.positions[rows], slots[rows], seen.table_of[rows], tables, last[:0])
        batch = attention.group(
            batch, [(heads, kv_heads, dim)], torch.empty(count + 1, dtype=torch.int32, device="cuda")
        )
        scratch = poison(attention.scratch_floats(count, heads, kv_heads, dim, pages))
        out = poison(count, heads * dim)
        attention.attention(given[rows], batch, heads, 0.125, keys, values, out, 0, 0.0, None, scratch)
        return out

    out = attend(slice(None), qkv)
    assert same(out, attend(slice(None), queries))
    for r in range(0, len(order), 7):
        assert same(attend(slice(r, r + 1), qkv)[0], out[r])
        table = tables[int(request[r])].long()
        past = [
            part[table].transpose(1, 2).flatten(0, 1)[: int(last[r]) + 1].float() for part in (keys, values)
        ]  # [positions, KV heads, dim]
        want = reference.attention(rope.queries(qkv, heads, dim)[r].float(), *past, 0.125).flatten()
        torch.testing.assert_close(out[r].double(), want, rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("row", [Row(temperature=0.0), Row(), Row(top_k=40), Row(top_p=0.9), Row(min_p=0.02)], ids=repr)
def test_tokens_outside_the_draft_vocabulary_are_never_drawn(row: Row) -> None:
    values, ids, full = normal(8, SAID) * 2, some_ids(SAID, VOCABULARY), poison(8, VOCABULARY)
    moves.scatter_columns(values, ids, full)
    rows, tokens = controls([row] * 8, "cuda"), whole([-7] * 8)
    sample.sample(full, rows, tokens, sample.Scratch.allocate(8, VOCABULARY, "cuda"))
    assert tokens.tolist() == [int(scores(line, row).argmax()) for line in full]
    chosen, best, log = logprobs.logprobs(full, tokens, 16)
    want = torch.log_softmax(values.double(), 1)
    torch.testing.assert_close(
        chosen.double(), want.gather(1, torch.searchsorted(ids, tokens)[:, None])[:, 0], rtol=0, atol=4e-6
    )
    top = values.sort(dim=1, descending=True, stable=True).indices[:, :16]
    assert torch.equal(best, ids[top])
    torch.testing.assert_close(log.double(), want.gather(1, top), rtol=0, atol=4e-6)


def test_log_probabilities_in_a_graph() -> None:
    """Their counters are 0 again at each replay, and their results lie where they lay."""
    logits, tokens, kept = normal(16, VOCABULARY), whole(range(16)), []
    graph = captured(lambda: kept.append(logprobs.logprobs(logits, tokens, 16)))
    for seed in range(1, 4):
        logits.copy_(normal(16, VOCABULARY, seed=seed))
        graph.replay()
        for got, want in zip(kept[-1], logprobs.logprobs(logits, tokens, 16), strict=True):
            assert same(got, want)


def test_a_captured_chain_gives_what_single_launches_give() -> None:
    """Each kernel reads what the one before has just written: one that began too early would read what is not there yet."""
    rows, taps = 8, 4
    table, out_table = poison(64, taps * WIDTH, kind=torch.bfloat16), poison(rows, taps * WIDTH, kind=torch.bfloat16)
    mixed, _ = weight(QuantType.BF16, WIDTH, taps * WIDTH, device="cuda")
    head, _ = weight(QuantType.BF16, SAID, WIDTH, device="cuda")
    coefs, _ = weight(QuantType.BF16, 144, WIDTH, device="cuda")
    work, ids = linear.Workspace.on("cuda"), some_ids(SAID, VOCABULARY)
    x, delta, gain, base = normal(rows, WIDTH), normal(rows, WIDTH), 1 + normal(WIDTH) / 9, normal(2, 2, WIDTH) / 9
    h, narrow, coef = (
        poison(rows, n, kind=k) for n, k in ((WIDTH, torch.bfloat16), (WIDTH, torch.bfloat16), (144, torch.float32))
    )
    said, full, tokens = poison(rows, SAID), poison(rows, VOCABULARY), whole([0] * rows)
    slots, before = torch.arange(rows, device="cuda") * 7 % 64, whole([-1, 0, 1, 2, -1, 4, 5, 6])
    draws, scratch = (
        controls([Row(seed=i) for i in range(rows)], "cuda"),
        sample.Scratch.allocate(rows, VOCABULARY, "cuda"),
    )
    kept, begun = torch.zeros(20, rows, dtype=torch.int32, device="cuda"), (x.clone(), delta.clone())

    def run(single: bool) -> None:
        x.copy_(begun[0]), delta.copy_(begun[1])
        for step in range(20):
            calls = [
                lambda: moves.tap(x, None, None, 0.0, table, 0, slots),
                lambda: moves.tap(x, delta, None, 0.0, table, WIDTH, slots),
                lambda: moves.tap(delta, None, None, 0.0, table, 2 * WIDTH, slots),
                lambda: moves.tap(x, delta, gain, 1e-5, table, 3 * WIDTH, slots),
                lambda: moves.take(table, slots, out_table),
                lambda: linear.linear(out_table, (mixed,), delta, work),
                lambda: norm.norm(x, delta, gain, gain, 1e-5, h),
                lambda: linear.linear(h, (coefs,), coef, work),
                lambda: conv.dynamic_conv(h, coef, base, 0, before, narrow),
                lambda: conv.dynamic_conv(x, coef, base, 1, before, delta),
                lambda: linear.linear(narrow, (head,), said, work),
                lambda: moves.scatter_columns(said, ids, full),
                lambda: sample.sample(full, draws, tokens, scratch),
                lambda s=step: kept[s].copy_(tokens),
            ]
            for call in calls:
                call()
                if single:
                    torch.cuda.synchronize()

    run(single=True)
    history = kept.clone()
    assert len(set(map(tuple, history.tolist()))) > 5 and int(history.min()) >= 0
    graph = captured(lambda: run(single=False))
    for _ in range(3):
        for array in (table, out_table, h, narrow, coef, said, full):
            array.fill_(torch.nan)
        kept.fill_(-5)
        graph.replay()
        assert torch.equal(kept, history)
