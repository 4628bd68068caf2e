"""The sampler chain and log-probabilities on the GPU: the reference's tokens, the CPU kernels' noise, and a row's own result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numba import njit, types

from power_lab.kernels import reference
from power_lab.kernels.numba import noise as cpu_noise
from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.ops import SampleRows
from power_lab.kernels.triton import logprobs, noise
from power_lab.kernels.triton.sample import sample
from tests.kernels.triton.sampling import CHAINS, Row, controls, draw, poisoned, scores

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

VOCABULARIES = [258, 49152, 262144]
EVERY_PLAN = [{"BLOCK": 1024, "num_warps": 4}, {"BLOCK": 2048, "num_warps": 8}, {"BLOCK": 4096, "num_warps": 8}]


def random_row(rng: np.random.Generator, vocabulary: int) -> Row:
    """Settings as requests have them, and some at their edges."""
    some = lambda count: tuple(rng.integers(0, vocabulary, rng.integers(0, count)).tolist())  # noqa: E731
    penalties = rng.random() < 0.3
    return Row(
        temperature=rng.choice([0.0, 0.2, 0.7, 1.0, 1.5, 20.0]),
        top_k=int(rng.choice([0, 0, 1, 2, 20, 50, 1000, vocabulary // 2, vocabulary, 10**6])),
        top_p=float(rng.choice([1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.95, 0.999])),
        min_p=float(rng.choice([0.0, 0.0, 0.02, 0.2, 1.0])),
        repetition=float(rng.choice([0.9, 1.0, 1.3])) if penalties else 1.0,
        presence=float(rng.choice([-0.5, 0.0, 1.5])) if penalties else 0.0,
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        position=int(rng.integers(0, 2**40)),
        before=some(700) if penalties else (),
        generated=some(200) if penalties else (),
        bias={token: float(rng.normal() * 5) for token in some(40)} if rng.random() < 0.2 else {},
    )


def random_logits(rng: np.random.Generator, rows: int, vocabulary: int) -> torch.Tensor:
    """Peaked, flat, rounded (many ties) and masked rows."""
    generator = torch.Generator("cuda").manual_seed(int(rng.integers(2**31)))
    x = torch.randn(rows, vocabulary, device="cuda", generator=generator)
    x *= torch.tensor(rng.choice([0.0, 0.5, 2.0, 6.0], rows), dtype=torch.float32, device="cuda")[:, None]
    x[::3] = torch.round(x[::3] * 4) / 4
    x[1::5, 100 : vocabulary - 100] = -torch.inf
    return x


def test_chains_of_the_interpreters_suite() -> None:
    logits = torch.randn(len(CHAINS), 1000, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * 3
    assert draw(logits, CHAINS) == [int(scores(*pair).argmax()) for pair in zip(logits, CHAINS, strict=True)]


@pytest.mark.parametrize(("vocabulary", "count"), [(258, 2000), (49152, 1500), (262144, 700)])
def test_tokens_are_the_references(vocabulary: int, count: int) -> None:
    rng, wrong, close = np.random.default_rng(vocabulary), [], 0
    for first in range(0, count, 100):
        rows = [random_row(rng, vocabulary) for _ in range(100)]
        logits = random_logits(rng, 100, vocabulary)
        for i, token in enumerate(draw(logits, rows)):
            want = scores(logits[i], rows[i])
            if token != int((want == want.max()).nonzero()[0]):
                # The kernel's f32 rounds: tokens that are as good may change places.
                near = token >= 0 and bool(want.max() - want[token] < 1e-5 + 4e-6 / (rows[i].temperature or 1))
                close += near
                wrong += [] if near else [(first + i, token, int(want.argmax()), rows[i])]
    print(f"\nV {vocabulary}: {count} rows, {close} tokens within rounding of the reference's")
    assert not wrong
    assert close <= count // 500


def test_every_split_gives_every_row_the_same_token() -> None:
    """In company, alone, in any split, with a list that is too short, and from what an earlier call left in the scratch."""
    for vocabulary in VOCABULARIES:
        rng = np.random.default_rng(1)
        rows, logits = [random_row(rng, vocabulary) for _ in range(64)], random_logits(rng, 64, vocabulary)
        logits[5, 77], logits[6, 200], logits[7] = torch.nan, torch.inf, -torch.inf
        rows[5:8] = [replace(row, before=(), generated=(), bias={}) for row in rows[5:8]]
        want, used = draw(logits, rows), poisoned(64, vocabulary, "cuda")
        assert want[5:8] == [-1] * 3
        assert min(want[:5] + want[8:]) >= 0
        for meta in EVERY_PLAN:
            assert draw(logits, rows, used, meta=meta) == want
        assert draw(logits, rows, poisoned(64, vocabulary, "cuda", listed=64)) == want
        turned = list(reversed(range(64)))
        assert draw(logits[turned], [rows[i] for i in turned], used) == [want[i] for i in turned]
        for i in range(64):
            assert draw(logits[i : i + 1], rows[i : i + 1], used) == want[i : i + 1]


def test_a_captured_graph_takes_new_controls() -> None:
    vocabulary, rng = 49152, np.random.default_rng(3)
    logits, scratch = random_logits(rng, 8, vocabulary), poisoned(8, vocabulary, "cuda")
    first, lists = controls([Row()] * 8, "cuda"), ("history", "bias_ids", "bias_values")
    static = replace(
        first, **{name: torch.zeros(40_000, dtype=getattr(first, name).dtype, device="cuda") for name in lists}
    )
    tokens = torch.full((8,), -7, dtype=torch.int32, device="cuda")
    sample(logits, static, tokens, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, static, tokens, scratch)
    for turn in range(20):
        rows = [random_row(rng, vocabulary) for _ in range(8)]
        logits.copy_(random_logits(rng, 8, vocabulary))
        new = controls(rows, "cuda")
        for field in fields(SampleRows):
            values = getattr(new, field.name)
            getattr(static, field.name)[: len(values)].copy_(values)
        graph.replay()
        assert tokens.tolist() == draw(logits, rows), turn


@triton.jit
def _write_noise(out, key, BLOCK: tl.constexpr):
    counter = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = noise.words(counter, tl.load(key), tl.load(key + 1))
    for w in tl.static_range(4):
        tl.store(out + counter // 16 * 64 + 16 * w + counter % 16, noise.gumbel(words[w]))


def _emit_noise(b: v.Builder, out: v.Value, groups: v.Value, seed: v.Value, position: v.Value) -> None:
    with v.loop(b, groups) as group:
        start = b.add(out, b.mul(group, v.i64(256)))
        for w, word in enumerate(cpu_noise.group_words(b, group, seed, position)):
            v.store(b, cpu_noise.gumbel(b, word), v.at(b, start, w * 64))


emit_noise = v.routine("gpu_test_noise", types.void, [types.int64] * 4, _emit_noise)


@njit
def write_noise(out, seed, position):
    emit_noise(v.address(out), out.size // 64, seed, position)


@pytest.mark.parametrize("position", [3, 2**40 + 5])
def test_noise_has_the_cpus_bits(position: int) -> None:
    count, seed = 2**24, -1234567890123456789
    host, out = np.empty(count, np.float32), torch.full((count,), torch.nan, device="cuda")
    write_noise(host, seed, position)
    key = torch.tensor([seed, position], device="cuda")
    _write_noise[(count // 4096,)](out, key, BLOCK=1024, enable_fp_fusion=False)
    assert np.array_equal(out.cpu().numpy().view(np.uint32), host.view(np.uint32))


def test_tokens_are_the_cpus(numba_sample: Callable[[np.ndarray, list[Row]], list[int]]) -> None:
    """Bit for bit the same scores, so the same tokens. Only sums of masses differ in their last bits, and decide nothing here."""
    for vocabulary in (258, 49152, 262144):
        rng = np.random.default_rng(5)
        rows = [random_row(rng, vocabulary) for _ in range(200)]
        logits = random_logits(rng, 200, vocabulary)
        assert draw(logits, rows) == numba_sample(logits.cpu().numpy(), rows)


@pytest.fixture(scope="module")
def numba_sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[np.ndarray, list[Row]], list[int]]:
    ops = NumbaOps(tmp_path_factory.mktemp("kernels"), 8)

    def run(logits: np.ndarray, rows: list[Row]) -> list[int]:
        c, tokens = controls(rows), np.full(len(rows), -7, np.int32)
        ops.sample(logits, SampleRows(*(getattr(c, field.name).numpy() for field in fields(SampleRows))), tokens)
        return tokens.tolist()

    return run


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_logprobs(vocabulary: int) -> None:
    logits = (
        torch.round(torch.randn(33, vocabulary, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) * 30)
        / 10
    )
    tokens = (torch.arange(33, device="cuda") * 1711 % vocabulary).int()
    chosen, ids, values = log_probabilities(logits, tokens, 20)
    want = reference.logprobs(logits)
    order = torch.sort(-logits, dim=1, stable=True).indices[:, :20]
    assert torch.equal(ids.long(), order)
    torch.testing.assert_close(chosen.double(), want.gather(1, tokens.long()[:, None])[:, 0], rtol=0, atol=4e-6)
    torch.testing.assert_close(values.double(), want.gather(1, order), rtol=0, atol=4e-6)
    for i in range(0, 33, 4):
        for top in (20, 1, 0):
            alone = log_probabilities(logits[i : i + 1], tokens[i : i + 1], top)
            for one, all in zip(alone, (chosen[i : i + 1], ids[i : i + 1, :top], values[i : i + 1, :top]), strict=True):
                assert torch.equal(one.view(torch.int32), all.contiguous().view(torch.int32))


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
    rows, vocabulary = logits.shape
    scratch = logprobs.Scratch.allocate(rows, vocabulary, top, "cuda")
    scratch.largest.fill_(torch.nan), scratch.sums.fill_(torch.nan), scratch.keys.fill_(-1)
    chosen, values = (torch.full(shape, torch.nan, device="cuda") for shape in ((rows,), (rows, top)))
    ids = torch.full((rows, top), -7, dtype=torch.int32, device="cuda")
    logprobs.launch(logits, tokens, chosen, ids, values, scratch)
    assert not scratch.arrived.any()
    return chosen, ids, values
