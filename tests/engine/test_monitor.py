"""The ring and the counters against the records of the runs: nothing is counted twice, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.monitor import RING
from power_lab.engine.request import SamplingParams
from power_lab.engine.trace import RunRecord
from power_lab.engine.vitals import EngineVitals, StepRecord, rated
from power_lab.kernels.ops import Ops
from tests import tiny

SHAPE = tiny.Shape(layers=1)


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


def asked(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 3, **changes})


@pytest.fixture(scope="module", params=["plain", "behind"])
def engine(request: pytest.FixtureRequest, numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops]) -> Engine:
    ops = numba_ops(1)
    return tiny.engine(
        SHAPE, behind(ops) if request.param == "behind" else ops, max_batch=4, kv_tokens=1024, step_tokens=96
    )


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # prompts that share their beginning
        st.integers(1, 200),
        st.integers(1, 20),
        st.sampled_from(["off", "lookup", "ngram"]),
        st.sampled_from([0.0, 1.0]),
        st.integers(0, 30) | st.none(),  # steps after which it is cancelled
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(wanted=REQUESTS)
def test_ring_and_counters_are_the_sum_over_run_records(engine: Engine, wanted: list[tuple[Any, ...]]) -> None:
    before, steps_before = engine.vitals(), len(engine.steps())
    tickets, steps = [], 0
    for seed, length, tokens, drafter, temperature, _ in wanted:
        params = asked(max_tokens=tokens, speculate=drafter, temperature=temperature)
        tickets.append(engine.submit(prompt_of(seed, 200)[:length], params))
    while engine.step():
        steps += 1
        for ticket, one in zip(tickets, wanted, strict=True):
            if one[-1] == steps:
                ticket.cancel()
    records = [ticket.result() for ticket in tickets]
    after = engine.vitals()
    rounds = [round_ for record in records for round_ in record.rounds]
    admitted = [record for record in records if record.steps]
    grown = {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
    assert grown["requests"] == len(records)
    assert grown["tokens"] == sum(len(record.tokens) for record in records)
    assert grown["accepted"] == sum(round_.accepted for round_ in rounds)
    assert grown["drafted"] >= sum(len(round_.drafted) for round_ in rounds)
    assert grown["passes"] == len(rounds)
    assert grown["cached_tokens"] == sum(record.cached for record in records)
    assert grown["prompt_tokens"] == sum(len(record.prompt_tokens) for record in records)
    ring = engine.steps()[steps_before:]
    known = {step.step: step for record in admitted for step in record.steps}
    assert [step.number for step in ring] == sorted(known)
    for mine, theirs in zip(ring, (known[step.number] for step in ring), strict=True):
        assert facts(mine) == facts(theirs)
        assert mine.begin <= mine.end and mine.how in ("replay", "capture", "eager")
        assert bool(mine.why) == (mine.how == "eager")
    for number, tokens in by_step(rounds).items():
        assert next(step.tokens for step in ring if step.number == number) == tokens
    assert after.running == after.waiting == 0 and after.runs == ()


COUNTERS = ("requests", "tokens", "accepted", "drafted", "passes", "cached_tokens", "prompt_tokens")
LOAD = ("running", "waiting", "preempted", "free_blocks", "cached_blocks", "used_blocks")


def facts(step: Any) -> tuple[int, ...]:
    return tuple(getattr(step, name) for name in (*LOAD, "prefill_rows", "decode_rows", "verify_rows"))


def by_step(rounds: list[Any]) -> dict[int, int]:
    steps: dict[int, int] = {}
    for round_ in rounds:
        steps[round_.step] = steps.get(round_.step, 0) + len(round_.emitted)
    return steps


def test_the_ring_is_bounded_and_its_first_step_counts_its_own_tokens(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(1))
    records: list[RunRecord] = []
    while engine.vitals().steps < RING + 100:
        records.append(engine.generate([1, 2, 3], asked(max_tokens=500)))
    steps = engine.steps()
    assert len(steps) == RING and steps[-1].number == engine.vitals().steps - 1
    assert {step.tokens for step in steps} == {1}
    assert len(msgspec.msgpack.encode(steps)) < 4 << 20


def test_a_run_is_seen_while_it_goes_on(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(SHAPE, numba_ops(1), max_batch=1, step_tokens=64)
    engine.generate(prompt_of(0, 129), asked(max_tokens=1))
    first, second = (engine.submit(prompt_of(0, 140), asked(speculate="lookup")) for _ in range(2))
    assert [run.state for run in engine.vitals().runs] == ["waiting", "waiting"]
    for _ in range(3):
        engine.step()
    vitals = engine.vitals()
    assert (vitals.running, vitals.waiting) == (1, 1)
    assert [(run.run, run.state, run.cached_tokens) for run in vitals.runs] == [
        (first.id, "running", 128),
        (second.id, "waiting", 0),
    ]
    assert vitals.runs[0].tokens > 0 and vitals.runs[0].drafter == "lookup"
    assert (vitals.cached_tokens, vitals.prompt_tokens) == (128, 129 + 140), "those of the run in flight are in it"
    second.result()
    assert engine.vitals().cached_tokens == 256


def test_rates_are_of_the_time_between_two_samples() -> None:
    blank: dict[str, Any] = dict.fromkeys(("engine", "model", "device", "mode", "state", "stage"), "") | {"clients": ()}
    one = EngineVitals(
        **blank, steps=1, tokens=10, passes=10, drafted=4, accepted=2, prompt_tokens=100, cached_tokens=64
    )
    two = EngineVitals(
        **blank, steps=9, tokens=40, passes=20, drafted=14, accepted=7, prompt_tokens=300, cached_tokens=164
    )
    told = rated(two, one, 2.0)
    assert (told.tokens_per_s, told.prompt_tokens_per_s) == (15.0, 100.0)
    assert (told.acceptance, told.tokens_per_pass, told.hit_rate) == (0.5, 3.0, 0.5)
    idle = rated(two, two, 2.0)
    assert (idle.tokens_per_s, idle.acceptance, idle.tokens_per_pass, idle.hit_rate) == (0.0, None, None, None)
    assert rated(one, None, 0.0) == one
    assert rated(one, two, 2.0) == one, "an engine that was loaded anew began again"


def test_steps_cross_the_socket_unchanged(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(SHAPE, numba_ops(1))
    engine.generate([1, 2, 3], asked())
    steps = engine.steps()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(steps), type=tuple[StepRecord, ...]) == steps
    assert msgspec.json.decode(msgspec.json.encode(engine.shapes()), type=type(engine.shapes())) == engine.shapes()


def test_a_subscription_in_this_process_ends_with_its_engine(numba_ops: Callable[[int], Ops]) -> None:
    from tests.hosting import eventually

    engine = tiny.engine(SHAPE, numba_ops(1), threaded=True)
    seen: list[Any] = []
    handles = [engine.subscribe(seen.append, 20) for _ in range(2)]
    engine.generate([1, 2, 3], asked(max_tokens=50))
    eventually(lambda: len(seen) > 4 and seen[-1].engines[0].tokens == 50)
    handles[0].close()
    engine.close()
    eventually(lambda: not any(handle._thread.is_alive() for handle in handles))  # noqa: SLF001


def test_shapes_tell_of_graphs_and_plan_better_buckets(numba_ops: Callable[[int], Ops]) -> None:
    on, off = tiny.engine(SHAPE, numba_ops(1)), tiny.engine(SHAPE, numba_ops(1), graph_mb=0)
    for engine in (on, off):
        assert engine.shapes().planned is None, "nothing was asked for yet"
        engine.generate(prompt_of(1, 100), asked())
    report = on.shapes()
    assert report.enabled and not report.why and report.captures and report.budget == EngineConfig().graph_mb << 20
    assert report.captures + report.replays + report.eager == report.steps == len(report.history)
    assert sum(row.captures + row.replays + row.eager for row in report.shapes) == report.steps
    assert sum(hit for _, hit in report.history) == sum(row.replays for row in report.shapes)
    live = on.vitals()
    assert (live.captures, live.replays, live.eager) == (report.captures, report.replays, report.eager)
    assert report.planned is not None and set(report.demand) <= set(range(1, 257))
    assert report.planned.padding_rows <= report.planned.declared_padding_rows
    assert not off.shapes().enabled and "graph_mb" in off.shapes().why and off.shapes().captures == 0
