"""The sampler chain through Triton's interpreter, against the reference. Large vocabularies and exact bits are the GPU suite's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.kernels import reference
from tests.kernels.triton.sampling import CHAINS, Row, at, draw, noise, penalised, poisoned, scores

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def reference_token(logits: torch.Tensor, row: Row) -> int:
    f32 = lambda x: float(np.float32(x))  # noqa: E731
    filters = row.top_k, f32(row.top_p), f32(row.min_p)
    return reference.sample(penalised(logits, row), f32(row.temperature), *filters, row.seed, row.position)


def test_noise_of_many_tokens_is_the_references() -> None:
    """The other tests' yardstick."""
    for seed, position in ((0, 0), (2**64 - 1, 2**40 + 5)):
        want = [reference.gumbel(seed, position, token) for token in range(200)]
        np.testing.assert_allclose(noise(seed, position, 200, torch.device("cpu")).numpy(), want, rtol=1e-12)


def test_tokens_are_the_references() -> None:
    logits = normal(len(CHAINS), 1000) * 3
    rows = [replace(at(row, i * 2**34), seed=2**64 - 1 - i) for i, row in enumerate(CHAINS)]
    assert draw(logits, rows) == [reference_token(*pair) for pair in zip(logits, rows, strict=True)]


@pytest.mark.parametrize("row", [Row(top_k=100, top_p=0.8), Row(top_p=0.6), Row(top_k=300), Row(top_k=5)], ids=str)
def test_a_row_is_split_over_programs(row: Row) -> None:
    logits = normal(1, 2500) * 2
    want = [int(scores(logits[0], row).argmax())]
    assert draw(logits, [row]) == want
    assert draw(logits, [row], poisoned(1, 2500, listed=16)) == want, "more keys matter than the list holds"
    assert draw(logits, [row], meta={"BLOCK": 4096, "num_warps": 4}) == want


@pytest.mark.parametrize("listed", [8192, 4])
def test_random_limits_of_peaked_flat_and_masked_rows(listed: int) -> None:
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(rng.standard_normal((24, 700)).astype(np.float32))
    logits *= torch.from_numpy(rng.choice([0.0, 0.5, 4.0, 20.0], 24).astype(np.float32))[:, None]
    logits[::3] = torch.round(logits[::3] * 4) / 4
    logits[1::5, 50:600] = -torch.inf
    rows = [
        Row(
            temperature=float(rng.choice([0.01, 0.7, 1.0, 30.0])),
            top_k=int(rng.choice([0, 0, 1, 20, 400, 699])),
            top_p=float(rng.choice([0.0, 0.1, 0.5, 0.9, 0.99, 0.9999999])),
            min_p=float(rng.choice([0.0, 0.0, 0.05])),
            seed=i,
        )
        for i in range(24)
    ]
    want = [int(scores(*pair).argmax()) for pair in zip(logits, rows, strict=True)]
    assert draw(logits, rows, poisoned(24, 700, listed=listed)) == want


def test_passes_that_no_row_needs_may_be_left_out() -> None:
    logits, greedy, plain = normal(4, 300), [Row(temperature=0.0)] * 4, [at(Row(min_p=0.01), i) for i in range(4)]
    assert draw(logits, greedy, random=False) == draw(logits, greedy) == logits.argmax(1).tolist()
    assert draw(logits, plain, limited=False) == draw(logits, plain)
    assert draw(logits, plain, limited=False, penalised=False) == draw(logits, plain)


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.integers(0, 49), max_size=20),
    st.lists(st.integers(0, 49), max_size=20),
    st.sampled_from([1.0, 1.3, 0.8]),
    st.sampled_from([0.0, 0.7, -0.4]),
    st.dictionaries(st.integers(0, 49), st.sampled_from([-100.0, 0.5, 4.0, -np.inf]), max_size=5),
    st.sampled_from([0.0, 0.9]),
)
def test_penalties_and_bias(
    before: list[int],
    generated: list[int],
    repetition: float,
    presence: float,
    bias: dict[int, float],
    temperature: float,
) -> None:
    logits = normal(1, 50, seed=len(before)) * 2
    row = Row(temperature, 0, 1.0, 0.0, repetition, presence, 7, 0, tuple(before), tuple(generated), bias)
    assert draw(logits, [row]) == [reference_token(logits[0], row)]


def test_a_long_history() -> None:
    """Several looks at the history, tokens of several programs."""
    rng = np.random.default_rng(2)
    before, generated = rng.integers(0, 1500, 700).tolist(), rng.integers(0, 1500, 300).tolist()
    logits = normal(2, 1500, seed=3)
    row = Row(repetition=1.5, presence=0.5, before=tuple(before), generated=tuple(generated), bias={1499: 3.0})
    rows = [row, replace(row, temperature=0.0)]
    assert draw(logits, rows) == [reference_token(*pair) for pair in zip(logits, rows, strict=True)]


def test_more_biases_than_are_looked_at_together() -> None:
    """Tokens of two programs, and a history that names tokens which no vocabulary has."""
    rng = np.random.default_rng(4)
    bias = {int(token): float(rng.normal()) for token in rng.permutation(1500)[:150]}
    logits = normal(1, 1500, seed=5)
    for row in (Row(bias=bias), Row(temperature=0.0, presence=-2.0, generated=(1400,), bias=bias)):
        want = reference_token(logits[0], row)
        assert draw(logits, [replace(row, before=(-1, 1500, 2**31 - 1))]) == [want]


def test_survivors_where_values_tie() -> None:
    """Among equal logits the lowest ids survive; noise would choose among all."""
    flat = torch.zeros(8, 77)
    rows = [at(Row(top_k=5), i) for i in range(8)]
    assert draw(flat, rows) == [int(noise(7, i, 77, flat.device)[:5].argmax()) for i in range(8)]
    rows = [at(Row(top_p=0.05), i) for i in range(8)]
    assert draw(flat, rows) == [int(noise(7, i, 77, flat.device)[:4].argmax()) for i in range(8)]
    assert draw(flat[:1], [Row(temperature=0.0)]) == [0]
    steps = torch.tensor([[1, 3, 3, 2, 3, 3, -np.inf, -50]] * 8)
    assert set(draw(steps, [at(Row(top_k=3), i) for i in range(8)])) <= {1, 2, 4}
    assert set(draw(steps, [at(Row(top_k=7, temperature=50.0), i) for i in range(8)])) <= {0, 1, 2, 3, 4, 5, 7}
    assert set(draw(steps, [at(Row(min_p=0.999), i) for i in range(8)])) <= {1, 2, 4, 5}


def test_bad_logits_fail_their_own_row_only() -> None:
    logits = normal(8, 100)
    rows = [Row(temperature=i % 2, top_k=i // 4 * 10) for i in range(8)]
    want = draw(logits, rows)
    for i, bad in ((1, np.nan), (2, np.nan), (4, np.inf), (7, np.inf)):
        logits[i, 99], want[i] = bad, -1
    logits[6], want[6] = -torch.inf, -1
    assert draw(logits, rows) == want


@pytest.mark.parametrize("temperature", [1e-6, 1.0])
def test_equal_logits_are_drawn_equally_at_any_temperature(temperature: float) -> None:
    logits = torch.full((24, 100), -50.0)
    logits[:, [20, 70]] = 20
    words = [noise(7, i, 100, logits.device) for i in range(24)]
    want = [20 if word[20] > word[70] else 70 for word in words]
    assert draw(logits, [at(Row(temperature=temperature), i) for i in range(24)]) == want
    assert 4 < want.count(20) < 20


def test_every_kernel_compiles_for_hopper_without_spills() -> None:
    """In a process of its own, since this one interprets."""
    script = Path(__file__).with_name("compile_sample.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=170, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
