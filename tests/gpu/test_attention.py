"""Rotation, paged write and attention on the GPU: values against the reference in f64, and one row's bits in any company and chunking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.ops import BLOCK, Batch
from power_lab.kernels.triton import attention, norm, rope

TOKENS = 2 * 256 + BLOCK + 5
PAGES = 16  # of a table: more than any sequence here fills
EPS = 1e-6
DEVICE = "cuda"
Row = tuple[int, int]  # sequence, position


@dataclass(frozen=True)
class Layer:
    """Query heads, KV heads and head width, and what the layer does beyond plain attention."""

    heads: tuple[int, int, int]
    window: int = 0
    softcap: float = 0.0
    norm: str = ""
    temperature: bool = False
    rope: bool = True
    sinks: bool = False


SMOLLM2, GEMMA, LARGE = (9, 3, 64), (4, 1, 256), (32, 8, 128)
LAYERS = [
    Layer(SMOLLM2),
    Layer(GEMMA, norm="head"),
    Layer(LARGE, norm="head"),
    Layer((6, 2, 80)),
    Layer((4, 2, 16)),
    Layer((4, 2, 32), window=70),
    Layer((8, 8, 96), norm="width"),
    Layer((40, 1, 64)),
    Layer(GEMMA, window=512, norm="head"),
    Layer(SMOLLM2, window=1),
    Layer(SMOLLM2, window=BLOCK),
    Layer(LARGE, window=100, softcap=2.0),
    Layer((8, 4, 128), window=300, softcap=50.0),
    Layer(SMOLLM2, window=511, norm="width", temperature=True),
    Layer(GEMMA, softcap=0.5, norm="head", rope=False),
    Layer(LARGE, rope=False, temperature=True),
    Layer((64, 8, 64), window=128, sinks=True),
    Layer((64, 8, 64), sinks=True),
]


class Bench:
    """Sequences of one layer: the same projections, whatever step a row is computed in."""

    def __init__(self, layer: Layer, lengths: Sequence[int]) -> None:
        q_heads, kv_heads, dim = self.heads = layer.heads
        self.layer, self.lengths = layer, lengths
        random = torch.Generator(DEVICE).manual_seed(7)
        width = (q_heads + 2 * kv_heads) * dim
        self.qkv = [torch.randn(n, width, device=DEVICE, generator=random) for n in lengths]
        self.rope = (
            reference.rope_tables(TOKENS, reference.frequencies(dim, 1e4)).float().to(DEVICE) if layer.rope else None
        )
        self.temperature = (1 + torch.arange(TOKENS, device=DEVICE) % 7 / 10) if layer.temperature else None
        self.sinks = torch.linspace(-3.0, 6.0, q_heads, device=DEVICE) if layer.sinks else None
        self.norms = None
        if layer.norm:
            sizes = (dim, dim) if layer.norm == "head" else (q_heads * dim, kv_heads * dim)
            self.norms = tuple(1 + 0.3 * torch.randn(n, device=DEVICE, generator=random) for n in sizes)

    def start(self, seed: int) -> None:
        """Empty pages, full of NaN, in another order for each seed."""
        count = len(self.lengths) * PAGES
        pages = np.random.default_rng(seed).permutation(count).astype(np.int32).reshape(-1, PAGES) + 1
        for table, length in zip(pages, self.lengths, strict=True):
            table[-(-length // BLOCK) :] = 0
        self.tables = torch.from_numpy(pages).to(DEVICE)
        self.keys, self.values = rope.kv_cache(count + 1, self.heads[1], self.heads[2], DEVICE)
        self.keys.fill_(torch.nan), self.values.fill_(torch.nan)

    def batch(self, rows: Sequence[Row]) -> Batch:
        sequence, position = torch.tensor(rows, dtype=torch.int32).to(DEVICE).T.contiguous()
        page = self.tables[sequence.long(), position.long() // BLOCK].long()
        return Batch(sequence, position, page * BLOCK + position % BLOCK, sequence, self.tables, sequence)

    def step(self, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer does: (treated projections, attention's output)."""
        (q_heads, kv_heads, dim), layer, batch = self.heads, self.layer, self.batch(rows)
        qkv = torch.stack([self.qkv[s][p] for s, p in rows])
        rope.rope_write(qkv, batch, self.rope, False, q_heads, self.keys, self.values, self.norms, EPS)
        need = attention.scratch_floats(len(rows), q_heads, kv_heads, dim, PAGES)
        scratch = torch.full((need,), torch.nan, device=DEVICE)
        out = torch.full((len(rows) + 1, q_heads * dim), torch.nan, device=DEVICE, dtype=torch.bfloat16)
        room = torch.full((len(rows) + 1,), -1, device=DEVICE, dtype=torch.int32)
        attention.attention(
            qkv, attention.group(batch, [layer.heads], room), q_heads, dim**-0.5, self.keys, self.values, out[:-1], layer.window,
            layer.softcap, self.temperature, scratch, sinks=self.sinks,
        )  # fmt: skip
        assert out[-1].isnan().all(), "written behind the end"
        return qkv, out[:-1]

    def run(self, steps: Iterable[Sequence[Row]], seed: int) -> list[torch.Tensor]:
        """Outputs of every sequence, bf16 [length, q_heads * dim], computed in these steps."""
        self.start(seed)
        outs = [
            torch.full((n, self.heads[0] * self.heads[2]), torch.nan, device=DEVICE, dtype=torch.bfloat16)
            for n in self.lengths
        ]
        for rows in steps:
            _, out = self.step(rows)
            for sequence, result in enumerate(outs):
                mine = [i for i, (s, _) in enumerate(rows) if s == sequence]
                if mine:
                    result[[rows[i][1] for i in mine]] = out[mine]
        return outs


def chunks(length: int, size: int, sequence: int = 0) -> list[list[Row]]:
    edges = [*range(0, length, size), length]
    return [[(sequence, p) for p in range(a, b)] for a, b in pairwise(edges)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16)) and not bool(a.isnan().any())


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_values(layer: Layer) -> None:
    (q_heads, kv_heads, dim), heads = layer.heads, layer.heads[0] + layer.heads[1]
    bench = Bench(layer, [TOKENS])
    bench.start(1)
    qkv, out = bench.step(chunks(TOKENS, TOKENS)[0])
    raw = bench.qkv[0].view(TOKENS, -1, dim)
    turned = raw[:, :heads].double()
    if bench.norms is not None:
        halves = zip((turned[:, :q_heads], turned[:, q_heads:]), bench.norms, strict=True)
        parts = [
            reference.rms_norm(x if layer.norm == "head" else x.flatten(1), w, EPS).reshape(x.shape) for x, w in halves
        ]
        turned = torch.cat(parts, dim=1)
    if bench.rope is not None:
        turned = reference.rope(turned, bench.rope.double(), False)
    q = rope.queries(qkv, q_heads, dim)
    torch.testing.assert_close(q.double(), turned[:, :q_heads], rtol=2**-8, atol=1e-5)
    pages = bench.tables[0, : -(-TOKENS // BLOCK)].long()
    k, v = (x[pages].transpose(1, 2).flatten(0, 1)[:TOKENS] for x in (bench.keys, bench.values))
    torch.testing.assert_close(k.double(), turned[:, q_heads:], rtol=2**-8, atol=1e-5)
    assert same(v, raw[:, heads:].bfloat16()) and torch.equal(qkv.view(TOKENS, -1, dim)[:, q_heads:], raw[:, q_heads:])
    behind = torch.stack([cache[pages[-1], :, TOKENS % BLOCK :] for cache in (bench.keys, bench.values)])
    assert behind.isnan().all() and bench.keys[0].isnan().all() and bench.values[0].isnan().all(), "written elsewhere"

    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(q_heads // kv_heads, 1)) * dim**-0.5
    if bench.temperature is not None:
        scores *= bench.temperature.double()[None, :, None]
    if layer.softcap:
        scores = reference.softcap(scores, layer.softcap)
    at = torch.arange(TOKENS, device=DEVICE)
    seen = at[None, :] <= at[:, None]
    if layer.window:
        seen &= at[None, :] > at[:, None] - layer.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if bench.sinks is not None:
        scores = torch.cat([scores, bench.sinks.double()[:, None, None].expand(-1, TOKENS, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :TOKENS]
    want = torch.einsum("hqk,khd->qhd", weights, v.double().repeat_interleave(q_heads // kv_heads, 1)).flatten(1)
    error = (out.double() - want).norm(dim=1) / want.norm(dim=1)
    assert float(error.max()) < 6e-3, "two roundings to bf16 are about 3e-3"


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_chunks_and_verify_windows_have_equal_bits(layer: Layer) -> None:
    bench = Bench(layer, [TOKENS])
    whole = bench.run(chunks(TOKENS, TOKENS), 1)[0]
    for size in (257, 65, 64, 16, 7, 1):
        assert same(bench.run(chunks(TOKENS, size), size)[0], whole), f"chunks of {size}"
    edge = TOKENS - 40
    for window in (2, 8, 17):  # all rows but the first are rejected and computed again in the next step
        bench.start(window)
        bench.step([(0, p) for p in range(edge)])
        for first in range(edge, TOKENS):
            last = min(first + window, TOKENS)
            assert same(bench.step([(0, p) for p in range(first, last)])[1], whole[first:last]), f"windows of {window}"


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_batches_have_equal_bits(layer: Layer) -> None:
    bench = Bench(layer, [TOKENS, 1, 64, 300, 255, 513, 90])
    alone = bench.run((step for s, n in enumerate(bench.lengths) for step in chunks(n, n, s)), 1)
    rng = np.random.default_rng(0)
    for kind in ("together", "shuffled", "mixed"):
        done, steps = [0] * len(bench.lengths), []
        while any(d < n for d, n in zip(done, bench.lengths, strict=True)):
            rows: list[Row] = []
            for s in rng.permutation(len(done)).tolist():
                most = {"together": TOKENS, "shuffled": 60, "mixed": int(rng.choice([1, 1, 5, 200]))}[kind]
                count = min(most, bench.lengths[s] - done[s])
                rows += [(s, p) for p in range(done[s], done[s] + count)]
                done[s] += count
            steps.append([rows[i] for i in rng.permutation(len(rows))] if kind == "shuffled" else rows)
        for s, result in enumerate(bench.run(steps, 5)):
            assert same(result, alone[s]), f"sequence {s}, {kind}"


PLANS: tuple[dict[str, int], ...] = (
    {"described": False, "stages": 1},
    {"described": True, "stages": 2},
    {"bare": False},
    {"programs": 7},
)


@pytest.mark.parametrize("layer", [LAYERS[i] for i in (0, 1, 2, 3, 8, 11, 16)], ids=repr)
def test_plans_have_equal_bits(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that share splits, read in either way and cut anywhere. More rows would not share any, and have no scratch for it."""
    bench = Bench(layer, [TOKENS])
    whole, plan = bench.run(chunks(TOKENS, TOKENS), 1)[0], attention.plan
    for change in PLANS:
        monkeypatch.setattr(attention, "plan", lambda *shape, change=change: replace(plan(*shape), **change))
        for size in (attention.FULL - 1, 1):
            assert same(bench.run(chunks(TOKENS, size), size)[0], whole), f"{change}, chunks of {size}"


@pytest.mark.parametrize("layer", [LAYERS[i] for i in (0, 2, 11, 16)], ids=repr)
def test_a_full_batch_of_short_sequences_has_equal_bits(layer: Layer) -> None:
    lengths = [130 + 7 * s % 190 for s in range(60)] + [TOKENS, 1]
    bench = Bench(layer, lengths)
    alone = bench.run((step for s, n in enumerate(lengths) for step in chunks(n, n, s)), 1)
    _, out = bench.step([(s, n - 1) for s, n in enumerate(lengths)])
    assert same(out, torch.stack([rows[-1] for rows in alone]))


def test_a_captured_step_serves_other_batches_of_its_shape() -> None:
    bench = Bench(Layer(LARGE), [TOKENS, 300])
    whole = bench.run([*chunks(TOKENS, TOKENS), *chunks(300, 300, 1)], 1)
    (q_heads, kv_heads, dim) = bench.heads
    narrow = ([(0, 500), (1, 20), (1, 21)], [(0, 7), (0, 8), (1, 299)])
    for first, second in (narrow, (_wide(0), _wide(90))):
        scratch = torch.full(
            (attention.scratch_floats(len(first), q_heads, kv_heads, dim, PAGES),), torch.nan, device=DEVICE
        )
        room = torch.full((len(first) + 1,), -1, device=DEVICE, dtype=torch.int32)
        still, out = (
            bench.batch(first),
            torch.full((len(first), q_heads * dim), torch.nan, device=DEVICE, dtype=torch.bfloat16),
        )
        qkv = torch.zeros(len(first), bench.qkv[0].shape[1], device=DEVICE)

        def step(
            qkv: torch.Tensor = qkv,
            still: Batch = still,
            out: torch.Tensor = out,
            scratch: torch.Tensor = scratch,
            room: torch.Tensor = room,
        ) -> None:
            rope.rope_write(qkv, still, bench.rope, False, q_heads, bench.keys, bench.values)
            grouped = attention.group(still, [bench.heads], room)
            attention.attention(qkv, grouped, q_heads, dim**-0.5, bench.keys, bench.values, out, 0, 0.0, None, scratch)

        qkv.copy_(torch.stack([bench.qkv[s][p] for s, p in first]))
        step()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for rows in (second, first):
            for target, source in zip(vars_of(still), vars_of(bench.batch(rows)), strict=True):
                target.copy_(source)
            qkv.copy_(torch.stack([bench.qkv[s][p] for s, p in rows]))
            graph.replay()
            assert same(out, torch.stack([whole[s][p] for s, p in rows]))


def _wide(first: int) -> list[Row]:
    return [*((0, p) for p in range(first, first + 90)), (1, first), *((1, p) for p in range(100, 150))]


def vars_of(batch: Batch) -> tuple[torch.Tensor, ...]:
    return batch.positions, batch.slots, batch.table_of


@pytest.mark.parametrize("width", [24, 576, 640, 4096, 5376])
@pytest.mark.parametrize("post", [False, True])
def test_norms(width: int, post: bool) -> None:
    random = torch.Generator(DEVICE).manual_seed(3)
    x, delta = (torch.randn(300, width, device=DEVICE, generator=random) for _ in range(2))
    before, weight = (torch.randn(width, device=DEVICE, generator=random) for _ in range(2))
    first, out = x.clone(), torch.full((301, width), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    norm.norm(first, delta, before if post else None, weight, EPS, out[:300])
    summed = x.double() + (reference.rms_norm(delta, before, EPS) if post else delta.double())
    torch.testing.assert_close(first.double(), summed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[:300].double(), reference.rms_norm(summed, weight, EPS), rtol=2**-8, atol=1e-5)
    assert out[300].isnan().all()
    for r in (0, 7, 299):
        one, alone = x[r : r + 1].clone(), torch.full((1, width), torch.nan, device=DEVICE, dtype=torch.bfloat16)
        norm.norm(one, delta[r : r + 1], before if post else None, weight, EPS, alone)
        assert same(alone[0], out[r]) and torch.equal(one[0], first[r])


def test_softcap() -> None:
    x = torch.randn(65, 1777, device=DEVICE) * 40
    x[0, :3] = torch.tensor([0.0, 1e30, -1e30])
    want = reference.softcap(x, 30.0)
    norm.softcap(x, 30.0)
    torch.testing.assert_close(x.double(), want, rtol=3e-6, atol=6e-6)
