"""The lens finds the very draw of a run: its token from recomputed logits and noise, at any sampler chain, with any drafter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from power_lab.engine.engine import Engine
from power_lab.engine.request import SamplingParams
from power_lab.engine.trace import RunRecord
from power_lab.engine.vitals import LensAsk, LensReport
from power_lab.errors import ConfigError, DeadlineExceeded, RequestCancelled
from power_lab.kernels.ops import Ops
from tests import drafting, tiny


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


SHAPE = tiny.Shape(layers=2, seed=2)
FEW = dict.fromkeys(range(65, 77), 12.0)  # favoured tokens: some drafts are right
PROMPTS = [  # and what is favoured there, so that some drafts are right: the last one leaves no choice
    (prompt_of(3, 65), FEW),
    ([65, 66, 67, 65] * 15, dict.fromkeys(range(65, 68), 14.0)),
    ([65] * 60, {65: 60.0}),
]
CHAINS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.8},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "all": {
        "temperature": 1.1,
        "top_p": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "logit_bias": {7: 3.0},
    },
}


def asked(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "ignore_eos": True, "seed": 11, **changes})


@pytest.mark.parametrize("chain", CHAINS)
def test_every_token_of_a_run_is_chosen_again(chain: str, numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(SHAPE, numba_ops(1))
    record = engine.generate(prompt_of(1, 70), asked(speculate="lookup", **CHAINS[chain]), cache_key="k")
    for index, token in enumerate(record.tokens):
        report = engine.lens(LensAsk.of(record, 70 + index, top=5))
        assert report.exact and report.chosen == report.said == token and report.index == index
        best = max((one for one in report.candidates if one.score is not None), key=lambda one: one.score or 0.0)
        assert best.token == token
        assert (best.noise is None) == (not record.params["temperature"])
    sums = report.candidates
    assert [one.raw for one in sums[:5]] == sorted((one.raw for one in sums[:5]), reverse=True)
    beyond = engine.lens(LensAsk.of(record, 100))
    assert beyond.said == -1 and beyond.exact


def test_probabilities_are_those_that_the_engine_reports(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(SHAPE, numba_ops(1))
    record = engine.generate(prompt_of(1, 20), asked(logprobs=5, temperature=0.7))
    logprobs = [one for round_ in record.rounds for one in round_.logprobs]
    for index, one in enumerate(logprobs):
        report = engine.lens(LensAsk.of(record, 20 + index, top=5))
        assert [c.token for c in report.candidates[:5]] == list(one.top_ids)
        np.testing.assert_allclose(np.log([c.raw for c in report.candidates[:5]]), one.top_values, atol=1e-5)


def test_the_chain_removes_what_it_should(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(SHAPE, numba_ops(1))
    record = engine.generate(prompt_of(2, 20), asked(temperature=0.9, top_k=3))
    report = engine.lens(LensAsk.of(record, 25, top=10))
    alive = [one for one in report.candidates if one.score is not None]
    assert len(alive) == 3 and {one.token for one in alive} == {one.token for one in report.candidates[:3]}
    assert sum(one.probability for one in alive) == pytest.approx(1.0)
    assert all(one.probability == 0 for one in report.candidates if one.score is None)


@pytest.mark.parametrize("chain", ["greedy", "sampled"])
@pytest.mark.parametrize("drafter", drafting.DRAFTERS)
def test_drafts_are_those_of_the_run(drafter: str, chain: str, numba_ops: Callable[[int], Ops]) -> None:
    engine = drafting.engine(drafter, SHAPE, numba_ops(1), kv_tokens=2048, step_tokens=64, max_batch=4, context=512)
    kept = refused = 0
    for prompt, favoured in PROMPTS:
        params = asked(
            max_tokens=60, speculate=drafter, width=5, controller="fixed", logit_bias=favoured, **CHAINS[chain]
        )
        record = engine.generate(prompt, params)
        for round_ in record.rounds:
            for row in range(min(len(round_.drafted), len(round_.emitted))):
                report = engine.lens(LensAsk.of(record, round_.start + row))
                assert report.exact and report.draft is not None and report.draft.drafter == drafter
                assert report.draft.chosen == round_.drafted[row], report.draft.why
                assert report.draft.kept == (row < round_.accepted)
                assert report.draft.why.startswith("Kept" if report.draft.kept else "Not kept")
                assert {report.chosen, report.draft.chosen} <= {one.token for one in report.candidates}
                tells_its_distribution(drafter, report)
                kept, refused = kept + report.draft.kept, refused + (not report.draft.kept)
    assert kept and refused, "one kind alone would prove little"


def tells_its_distribution(drafter: str, report: LensReport) -> None:
    draft = report.draft
    assert draft is not None
    if drafter == "draft-model":
        probabilities = [one[2] for one in draft.candidates[:10]]
        assert probabilities == sorted(probabilities, reverse=True) and len(probabilities) == 10
        assert draft.probability is not None
    elif drafter in ("lookup", "ngram") or (drafter == "hybrid" and "copied" in draft.why):
        assert not draft.candidates and "no distribution" in draft.why
    else:
        assert draft.candidates and "not its whole distribution" in draft.why


def test_without_speculation_the_report_says_so(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(SHAPE, numba_ops(1))
    record = engine.generate([1, 2, 3], asked(max_tokens=3))
    report = engine.lens(LensAsk.of(record, 4))
    assert report.draft is None and "did not speculate" in report.why
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=LensReport) == report


def test_neighbours_and_other_observers_are_not_disturbed(numba_ops: Callable[[int], Ops]) -> None:
    seen: list[int] = []
    engine = tiny.engine(SHAPE, numba_ops(1), observer=lambda plan, logits: seen.append(len(logits)))
    record = engine.generate(prompt_of(1, 20), asked())
    alone = engine.generate(prompt_of(5, 30), asked(temperature=1.0)).tokens
    ticket = engine.submit(prompt_of(5, 30), asked(temperature=1.0))
    count = len(seen)
    assert engine.lens(LensAsk.of(record, 25)).exact
    assert len(seen) > count, "who watched before still does"
    assert ticket.result().tokens == alone
    count = len(seen)
    engine.generate([1], asked(max_tokens=1))
    assert len(seen) == count + 1
    engine.check()


def test_a_look_that_nobody_wants_any_more_ends_at_the_next_step(
    numba_ops: Callable[[int], Ops], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("power_lab.engine.lens.ASK_S", 0.0)  # the steps are those that are made below
    engine = tiny.engine(SHAPE, numba_ops(1), step_tokens=16, prefix_cache=False)
    record = engine.generate(prompt_of(1, 200), asked(max_tokens=4))
    begun = engine.status().steps

    def after_three() -> bool:
        return engine.status().steps == begun + 3 or not engine.step()

    with pytest.raises(RequestCancelled):
        engine.lens(LensAsk.of(record, 202), after_three)
    while engine.step():
        continue
    assert engine.status().steps == begun + 3, "200 tokens would be 13 steps"
    assert engine.vitals().running == 0
    assert engine.lens(LensAsk.of(record, 202), lambda: bool(engine.step()) and False).exact
    engine.check()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"position": 0}, "position"),
        ({"position": 99}, "position"),
        ({"prompt": 99}, "prompt"),
        ({"top": 0}, "top"),
        ({"top": 65}, "top"),
        ({"known": 0}, "known"),
        ({"known": 6}, "known"),
        ({"tokens": (1, 99999, 3)}, "prompt"),
    ],
)
def test_bad_questions_are_refused(changes: dict[str, Any], key: str, numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(SHAPE, numba_ops(1))
    ask = LensAsk(**{"tokens": (1, 2, 3, 4, 5), "prompt": 2, "position": 3, "params": asked(), **changes})
    with pytest.raises(ConfigError, match=key):
        engine.lens(ask)
    assert engine.vitals().running == engine.vitals().waiting == 0


LONG = 10_000


def long_engine(drafter: str, ops: Ops, **options: Any) -> tuple[Engine, RunRecord]:
    """An engine with room for 10,000 tokens, and a run that ends there."""
    engine = drafting.engine(drafter, SHAPE, ops, kv_tokens=320 * 64, step_tokens=512, max_batch=2, **options)
    params = asked(max_tokens=40, speculate=drafter, width=5, controller="fixed", temperature=0.8, logit_bias=FEW)
    return engine, engine.generate(prompt_of(4, LONG - 40), params)


def rows_of(engine: Engine, look: Callable[[], object]) -> int:
    """Token rows that the target computed meanwhile."""
    before = engine.steps()[-1].number
    look()
    return sum(step.rows for step in engine.steps() if step.number > before)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "CONTEXT", LONG + 64)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("drafter", ["lookup", "mtp"])
def test_a_long_run_is_not_computed_again_while_its_prefix_is_held(
    drafter: str, numba_ops: Callable[[int], Ops]
) -> None:
    engine, record = long_engine(drafter, numba_ops(1))
    entry = next(entry for entry in reversed(record.rounds) if entry.drafted)
    ask = LensAsk.of(record, entry.start)
    report = engine.lens(ask)
    assert report.exact and report.draft is not None and report.draft.chosen == entry.drafted[0]
    assert len(report.context) <= 200 and len(msgspec.msgpack.encode(report)) < 8_000
    assert rows_of(engine, lambda: engine.lens(ask)) <= 4 * 64
    engine.drop_prefixes()
    assert rows_of(engine, lambda: engine.lens(ask)) <= LONG + 4 * 64, (
        "once, not for the target and again for its draft"
    )
    engine.check()


@pytest.mark.usefixtures("room")
def test_a_look_that_takes_too_long_says_so_and_goes_on_when_asked_again(numba_ops: Callable[[int], Ops]) -> None:
    ticks = itertools.count()
    engine, record = long_engine("lookup", numba_ops(1), clock=lambda: float(next(ticks)))  # a slow machine: seconds
    engine.drop_prefixes()
    ask, times = LensAsk.of(record, LONG - 3), []
    while True:
        try:
            report = engine.lens(ask)
            break
        except DeadlineExceeded as error:
            assert "more than 60 s" in str(error) and "Look again" in str(error)
            times.append(engine.lookup(list(ask.tokens[:-1])).served)
    assert report.exact and times, "one minute was enough"
    assert times == sorted(set(times)), "each look begins where the one before ended"
