"""Sampling is right, not only equal: what speculation emits at temperature 1 is distributed as the target's softmax says.

A mask leaves a few tokens, so that the exact probability of every whole output is known from transformers' own forward pass of the same
weights. Each draw has its own seed. What is tested is Pearson's chi-square of whole outputs: tokens of one window that depended on each
other in a way that the target's do not would show in it. Seeds are fixed, so a verdict never changes by itself; that a right engine had
failed on them had a chance of 1e-7 a test.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from power_lab.engine import live
from power_lab.engine.engine import Engine
from power_lab.engine.request import Finish, SamplingParams
from power_lab.engine.scheduler import Outcome
from power_lab.engine.speculation.transaction import Terminal
from power_lab.engine.trace import RunRecord
from power_lab.kernels.ops import Ops
from tests import drafting, tiny
from tests.engine.test_exactness import prompt_of

SHAPE = tiny.Shape(scale=0.8)
ALLOWED = (7, 42, 99, 200)
EMIT = 4  # the first token is the prompt's round's, the others come from windows
DRAWS = 4000
CHANCE = 1e-7
LEAST = 5.0  # expected outputs in a cell; rarer ones share one
PROMPT = [*prompt_of(1, 20), *(ALLOWED[i] for i in np.random.default_rng(0).integers(0, 4, 40))]
UNMASKED = (
    "dflash2",
)  # its candidates are the likeliest of all tokens, none of which the mask may leave: all drafts are refused then
Counts = Counter[tuple[int, ...]]


@lru_cache(maxsize=1)
def expected() -> dict[tuple[int, ...], float]:
    """Every output's probability, by the reference."""
    model = tiny.reference_model(SHAPE)
    chance: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(EMIT):
        prefixes = list(itertools.product(ALLOWED, repeat=length))
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])).logits[:, -1, list(ALLOWED)]
        following = torch.softmax(logits.double(), -1).tolist()
        chance |= {
            (*prefix, token): chance[prefix] * share
            for prefix, shares in zip(prefixes, following, strict=True)
            for token, share in zip(ALLOWED, shares, strict=True)
        }
    return {output: value for output, value in chance.items() if len(output) == EMIT}


def likelihood(counts: Counts) -> float:
    """How probable it is that outputs of these probabilities are as far from them as these are: Pearson's chi-square."""
    total, cells, rare = counts.total(), [], [0.0, 0.0]
    for output, share in expected().items():
        cell = [counts[output], share * total]
        if cell[1] < LEAST:
            rare = [rare[0] + cell[0], rare[1] + cell[1]]
        else:
            cells.append(cell)
    cells += [rare] if rare[1] >= LEAST else []
    far = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    tail = torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2).double(), torch.tensor(far / 2).double())
    return float(tail)


def draw(engine: Engine, drafter: str, width: int, draws: int = DRAWS, **params: Any) -> tuple[Counts, list[RunRecord]]:
    """So many outputs, each with its own seed."""
    mask = {token: -1000.0 for token in range(tiny.tokenizer().vocab_size) if token not in ALLOWED}
    settings = {"controller": "fixed", "logit_bias": mask} | params
    records = []
    for first in range(0, draws, 64):
        tickets = [
            engine.submit(
                PROMPT,
                SamplingParams(
                    max_tokens=EMIT,
                    temperature=1.0,
                    seed=seed,
                    speculate=drafter,
                    width=width,
                    ignore_eos=True,
                    **settings,
                ),
            )
            for seed in range(first, min(first + 64, draws))
        ]
        records += [ticket.result() for ticket in tickets]
    return Counter(tuple(record.tokens) for record in records), records


def of_windows(records: Sequence[RunRecord]) -> tuple[int, int]:
    """Drafts that were refused and that were accepted."""
    rounds = [r for record in records for r in record.rounds]
    return sum(len(r.rejected) for r in rounds), sum(r.accepted for r in rounds)


def engine_for(drafter: str, ops: Ops) -> Engine:
    return drafting.engine(drafter, SHAPE, ops, max_batch=64, step_tokens=512, kv_tokens=64 * 256)


def test_the_reference_leaves_something_to_chance() -> None:
    shares = sorted(expected().values())
    assert sum(shares) == pytest.approx(1.0)
    assert len(shares) == len(ALLOWED) ** EMIT and shares[-1] < 0.5
    assert sum(share * DRAWS >= LEAST for share in shares) > 20


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("drafter", drafting.DRAFTERS)
def test_what_speculation_emits_is_distributed_as_the_target(
    drafter: str, width: int, numba_ops: Callable[[int], Ops]
) -> None:
    counts, records = draw(engine_for(drafter, numba_ops(2)), drafter, width)
    refused, accepted = of_windows(records)
    assert accepted + refused > DRAWS / 4
    assert accepted > DRAWS / 20 or drafter in UNMASKED
    assert likelihood(counts) > CHANCE


def test_without_speculation_too(numba_ops: Callable[[int], Ops]) -> None:
    counts, _ = draw(engine_for("ngram", numba_ops(2)), "off", 1)
    assert likelihood(counts) > CHANCE


def test_the_default_controller_changes_no_share(numba_ops: Callable[[int], Ops]) -> None:
    counts, _ = draw(engine_for("ngram", numba_ops(2)), "ngram", 15, controller="cost")
    assert likelihood(counts) > CHANCE


def test_a_sampler_that_keeps_one_wrong_draft_in_ten_is_caught(
    numba_ops: Callable[[int], Ops], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that speculation invites: a draft is emitted though the target drew something else."""
    kept, right = itertools.count(1), live.match

    def lenient(drafts: Sequence[int], targets: Sequence[int], terminal: Terminal) -> Outcome:
        if drafts and drafts[0] != targets[0] and next(kept) % 10 == 0:
            targets = [drafts[0], *targets[1:]]
        return right(drafts, targets, terminal)

    monkeypatch.setattr(live, "match", lenient)
    counts, _ = draw(engine_for("lookup", numba_ops(2)), "lookup", 3)
    assert likelihood(counts) < CHANCE


def test_a_bonus_token_that_repeats_the_last_draft_at_times_is_caught(
    numba_ops: Callable[[int], Ops], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault inside windows only, which every token's own share would hardly show."""
    right, turn = live.match, itertools.count(1)

    def repeating(drafts: Sequence[int], targets: Sequence[int], terminal: Callable[[int], Finish | None]) -> Outcome:
        if drafts and tuple(drafts) == tuple(targets[:-1]) and next(turn) % 3 == 0:
            targets = [*targets[:-1], drafts[-1]]
        return right(drafts, targets, terminal)

    monkeypatch.setattr(live, "match", repeating)
    counts, _ = draw(engine_for("ngram", numba_ops(2)), "ngram", 1)
    assert likelihood(counts) < CHANCE
