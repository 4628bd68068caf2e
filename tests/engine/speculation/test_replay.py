"""Counterfactual replay: what a recorded run is said to have done under another setting is what a real run with it does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.config import EngineConfig
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.recorded import RecordedCosts
from power_lab.engine.speculation.replay import replay
from power_lab.engine.trace import RunRecord
from power_lab.errors import ReplayRefused
from tests import tiny
from tests.factories import run_record
from tests.pairs import all_pairs

SHAPE = tiny.Shape(layers=1, heads=2, kv_heads=2, head_dim=8, seed=2)
LIMIT = 90
AXES: dict[str, list[Any]] = {
    "recorded": ["off", "lookup", "ngram"],
    "speculate": ["off", "lookup", "ngram"],
    "width": [1, 3, 7, 15],
    "sampling": [{}, {"temperature": 0.8}, {"temperature": 1.0, "repetition_penalty": 1.1}],
    "end": ["max_tokens", "token", "string", "context", "one"],
    "step_tokens": [16, 64, 256],
    "prompt": [1, 2, 17, 65, 129, 150],
    "prefix": ["cold", "warm"],
}
Ops = Callable[[int], Any]
Rounds = list[tuple[int, tuple[int, ...], int, tuple[int, ...], str]]


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    passage = [rng.randrange(256) for _ in range(9)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += passage if rng.random() < 0.6 else [rng.randrange(256) for _ in range(4)]
    return tokens[:length]


class Bench:
    """Fresh engines of one setting, whose records say that setting as loaded models' do."""

    def __init__(self, ops: Any, **options: Any) -> None:
        self.ops, self.options = ops, options

    def run(self, prompt: list[int], params: SamplingParams, *, warm: bool = False) -> RunRecord:
        engine = tiny.engine(SHAPE, self.ops, **self.options)
        if warm:
            engine.generate(prompt, SamplingParams(max_tokens=1))
        record = engine.generate(prompt, params)
        config = msgspec.to_builtins(EngineConfig(**self.options))
        return msgspec.structs.replace(record, engine=msgspec.structs.replace(record.engine, config=config))


def rounds_of(record: RunRecord) -> Rounds:
    return [(r.start, r.drafted, r.accepted, r.emitted, r.note) for r in record.rounds]


def same(bench: Bench, prompt: list[int], before: SamplingParams, after: SamplingParams, warm: bool = False) -> RunRecord:
    """Record with `before`, replay with `after`, run with `after`: equal. Returns the real run."""
    recorded, real = bench.run(prompt, before, warm=warm), bench.run(prompt, after, warm=warm)
    replayed = replay(recorded, after)
    assert [(r.start, r.drafted, r.accepted, r.emitted, r.why) for r in replayed] == rounds_of(real)
    assert [r.rows for r in replayed] == [r.rows for r in real.rounds]
    assert [r.asked for r in replayed] == [r.draft_s > 0 for r in real.rounds]
    return real


def ending(bench: Bench, prompt: list[int], end: str, common: dict[str, Any]) -> dict[str, Any]:
    """Parameters with which the run ends so, within the windows of wide drafts where that can be."""
    said = bench.run(prompt, SamplingParams(max_tokens=LIMIT, ignore_eos=True, **common)).tokens
    at = random.Random(len(prompt)).randrange(20, 70)
    return {
        "max_tokens": {"max_tokens": LIMIT, "ignore_eos": True},
        "one": {"max_tokens": 1},
        "context": {"max_tokens": 256 - len(prompt), "ignore_eos": True},
        "token": {"max_tokens": LIMIT, "stop_tokens": (said[at],)},
        "string": {"max_tokens": LIMIT, "stop": (chr(said[at]) if said[at] < 128 else "\ufffd",), "ignore_eos": True},
    }[end]


@pytest.mark.parametrize("case", all_pairs(AXES), ids=lambda case: "-".join(map(str, case.values())))
def test_a_replay_is_what_a_real_run_does(case: dict[str, Any], numba_ops: Ops) -> None:
    bench = Bench(numba_ops(1), step_tokens=case["step_tokens"], context=256, max_batch=4)
    prompt = prompt_of(case["prompt"], case["prompt"])
    common = {"seed": 5, **case["sampling"]}
    common |= ending(bench, prompt, case["end"], common)
    before = SamplingParams(speculate=case["recorded"], width=6, **common)
    after = SamplingParams(speculate=case["speculate"], width=case["width"], **common)
    same(bench, prompt, before, after, case["prefix"] == "warm")
