"""Runs recorded for replay: what is recorded of every drafter, replayed, is what a real run does; nobody else is touched by recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.recorded import RecordedCosts
from power_lab.engine.speculation.replay import FROM_TOKENS, replay
from power_lab.engine.trace import RunRecord
from tests import drafting, tiny
from tests.engine.speculation.test_replay import figures, prompt_of

SHAPE = tiny.Shape(layers=2, seed=2)
FEW = {token: 12.0 for token in range(65, 77)}  # favoured tokens: some drafts are right
READERS = tuple(name for name in drafting.DRAFTERS if name not in FROM_TOKENS)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"repetition_penalty": 1.05},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
OPTIONS: dict[str, Any] = {"kv_tokens": 2048, "step_tokens": 64, "max_batch": 4, "context": 512}
Ops = Callable[[int], Any]


def engine_of(drafter: str, ops: Any, **options: Any) -> Engine:
    return drafting.engine(drafter, SHAPE, ops, **{**OPTIONS, **options})


def known(record: RunRecord, **options: Any) -> RunRecord:
    """As a loaded model's record is: with the engine's settings."""
    config = msgspec.to_builtins(EngineConfig(**{**OPTIONS, **options}))
    return msgspec.structs.replace(record, engine=msgspec.structs.replace(record.engine, config=config))


def params_of(sampling: str, **changes: Any) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, "seed": 5, "logit_bias": FEW, "width": 15}
    return SamplingParams(**{**common, **SAMPLINGS[sampling], "controller": "fixed", **changes})


def same(recorded: RunRecord, real: RunRecord, params: SamplingParams) -> None:
    assert recorded.tokens == real.tokens
    assert figures(replay(recorded, params, RecordedCosts.of([recorded]))) == figures(real.rounds)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", READERS)
def test_a_replay_of_every_drafter_is_what_a_real_run_does(drafter: str, sampling: str, numba_ops: Ops) -> None:
    ops, prompt = numba_ops(1), prompt_of(3, 65)
    recorded = known(engine_of(drafter, ops).generate(prompt, params_of(sampling, record="replay")))
    settings = [(width, "fixed") for width in (1, 2, 3, 5, 7, 15)] + [(15, "adaptive")]
    accepted = 0
    for width, controller in settings:
        asked: dict[str, Any] = {"speculate": drafter, "width": width, "controller": controller}
        params = params_of(sampling, **asked)
        real = engine_of(drafter, ops).generate(prompt, params)
        same(recorded, real, params)
        accepted += sum(entry.accepted for entry in real.rounds)
    assert accepted, "windows that are all refused would prove little"
