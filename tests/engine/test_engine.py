"""The engine's face: what it refuses, callbacks, threads, timeouts, closing."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from bench.measure import Wrong
from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.plan import StepPlan
from power_lab.engine.request import Request, SamplingParams
from power_lab.engine.runner import Launched, Sampled
from power_lab.engine.speculation.recorded import RecordedCosts
from power_lab.engine.trace import RunRecord
from power_lab.errors import CapacityError, ConfigError, EngineClosed, PowerLabError, QueueFull
from power_lab.kernels.ops import Ops
from tests import tiny
from tests.engine.test_exactness import prompt_of


def test_bad_input_is_refused_by_key_and_changes_nothing(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2), kv_tokens=256, queue_limit=2)
    for bad, error, words in [
        (lambda: engine.submit([]), ConfigError, "prompt"),
        (lambda: engine.submit([99999]), ConfigError, "vocabulary"),
        (lambda: engine.submit([1], SamplingParams(stop_tokens=(-1,))), ConfigError, "stop_tokens"),
        (lambda: engine.submit([1] * 200, SamplingParams(max_tokens=57)), CapacityError, "56 or less"),
        (lambda: engine.submit([1], cache_key=" x"), ConfigError, "cache_key"),
        (lambda: engine.submit([1], cache_key="\ud800"), ConfigError, "cache_key"),
        (lambda: engine.submit([1], deadline_s=-1.0), ConfigError, "deadline_s"),
        (lambda: engine.submit([1], chat=True), ConfigError, "chat"),
        (lambda: SamplingParams(temperature=float("nan")), ConfigError, "temperature"),
        (lambda: SamplingParams(top_p=0.0), ConfigError, "top_p"),
        (lambda: SamplingParams(temperature=1e-39), ConfigError, "temperature.*Use 0"),
        (lambda: SamplingParams(temperature="1"), ConfigError, "temperature: '1' is not a number"),  # type: ignore[arg-type]
        (lambda: SamplingParams(max_tokens=10.5), ConfigError, "max_tokens: 10.5 is not a whole"),  # type: ignore[arg-type]
        (lambda: SamplingParams(max_tokens=np.int64(3)), ConfigError, "max_tokens"),  # type: ignore[arg-type]
        (lambda: SamplingParams(logprobs=True), ConfigError, "logprobs"),
        (lambda: SamplingParams(ignore_eos=np.True_), ConfigError, "ignore_eos"),  # type: ignore[arg-type]
        (lambda: SamplingParams(speculate="magic"), ConfigError, "speculate: 'magic'.*lookup"),  # type: ignore[arg-type]
        (lambda: SamplingParams(gate=1.5), ConfigError, r"gate: 1.5 is outside 0.0..1.0"),
        (lambda: SamplingParams(gate=float("nan")), ConfigError, "gate: nan is outside"),
        (lambda: SamplingParams(gate=None), ConfigError, "gate: None is not a number"),  # type: ignore[arg-type]
        (lambda: SamplingParams(stop="END"), ConfigError, "stop: 'END' is not a tuple"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(error, match=words):
            bad()
    assert engine.status().waiting == 0
    for _ in range(2):
        engine.submit([1])
    with pytest.raises(QueueFull):
        engine.submit([1])
    engine.close()
    with pytest.raises(EngineClosed):
        engine.submit([1])


def test_deadline_and_cancel_give_the_partial_output(numba_ops: Callable[[int], Ops]) -> None:
    now = [0.0]
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2), clock=lambda: now[0])
    full = engine.submit([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True)).result().tokens
    late = engine.submit([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True), deadline_s=5.0)
    for _ in range(4):
        engine.step()
    now[0] = 5.0
    record = late.result()
    assert record.finish == "deadline" and record.tokens == full[:4]
    gone = engine.submit([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    gone.cancel()
    record = gone.result()
    assert record.finish == "cancelled" and record.tokens == full[:1]
    assert engine.status().used_blocks == 0


def test_a_listener_that_raises_costs_its_own_request_only(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2))

    def listen(_: object) -> None:
        raise BrokenPipeError("gone")

    params = SamplingParams(max_tokens=10, ignore_eos=True)
    bad = engine.submit([1, 2], params, on_delta=listen)
    good = engine.submit([1, 2], params)
    assert bad.result().finish == "cancelled"
    assert good.result().finish == "length"


def test_the_engine_thread_serves_many_callers(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2), threaded=True)
    try:
        params = SamplingParams(max_tokens=15, ignore_eos=True, speculate="lookup")
        want = engine.submit([5, 6, 7], params).result(60).tokens
        results: list[tuple[int, ...]] = []
        threads = [
            threading.Thread(target=lambda: results.append(engine.submit([5, 6, 7], params).result(60).tokens))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == [want] * 6
    finally:
        engine.close()


@pytest.mark.parametrize("hook", ["on_delta", "on_done"])
def test_a_callback_that_exits_does_not_end_the_engine_thread(hook: str, numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2), threaded=True)
    try:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        other = engine.submit([1, 2], params)
        bad = engine.submit([1, 2], params, **{hook: lambda _: sys.exit(3)})  # type: ignore[arg-type]
        assert bad.result(60).finish == ("cancelled" if hook == "on_delta" else "length")
        assert other.result(60).finish == "length"
        assert engine.submit([1, 2], params).result(60).finish == "length"
    finally:
        engine.close()


def test_an_observer_that_exits_ends_requests_but_not_the_engine_thread(numba_ops: Callable[[int], Ops]) -> None:
    exits = [True]

    def observe(plan: StepPlan, logits: np.ndarray) -> None:
        if exits.pop():
            exits.append(False)
            sys.exit(3)
        exits.append(False)

    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2), threaded=True, observer=observe)
    try:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        assert engine.submit([1, 2], params).result(60).finish == "error"
        assert engine.submit([1, 2], params).result(60).finish == "length"
    finally:
        engine.close()


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("hook", ["on_delta", "on_done"])
def test_close_in_a_callback_ends_every_request(hook: str, threaded: bool, numba_ops: Callable[[int], Ops]) -> None:
    """Requests of the same step, before and behind the one that closes, finish or are cancelled with text that fits their tokens."""
    want = tiny.engine(tiny.Shape(layers=1), numba_ops(2)).submit([1, 2], SamplingParams(max_tokens=1)).result()
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2), threaded=threaded)
    with engine._lock:  # so that all three are admitted by one step
        long = engine.submit([3, 4, 5], SamplingParams(max_tokens=900, ignore_eos=True))
        closer = engine.submit([1, 2], SamplingParams(max_tokens=1), **{hook: lambda _: engine.close()})  # type: ignore[arg-type]
        short = engine.submit([1, 2], SamplingParams(max_tokens=1))
    for ticket in (closer, short):
        record = ticket.result(60)
        assert (record.finish, record.finish_detail) == ("length", "1 tokens")
        assert (record.tokens, record.text) == (want.tokens, want.text)
    record = long.result(60)
    assert (record.finish, len(record.tokens)) == ("cancelled", 1) and "closed" in record.finish_detail
    engine.check()
    with pytest.raises(EngineClosed):
        engine.submit([1])
    if engine._thread is not None:
        engine._thread.join(60)
        assert not engine._thread.is_alive()


@pytest.mark.parametrize("threaded", [False, True])
def test_a_callback_cannot_wait_for_its_own_engine(threaded: bool, numba_ops: Callable[[int], Ops]) -> None:
    """On the engine thread it would wait for ever; without one it would run a step inside a step and mix up texts."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    want = tiny.engine(tiny.Shape(layers=1), numba_ops(2)).submit([3, 4, 5], params).result()
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2), threaded=threaded)
    refused: list[str] = []

    def wait(_: RunRecord) -> None:
        with pytest.raises(PowerLabError, match="callback") as caught:
            later.result(5)
        refused.append(caught.value.message)

    with engine._lock:
        first = engine.submit([1, 2], SamplingParams(max_tokens=1), on_done=wait)
        later = engine.submit([3, 4, 5], params)
    assert first.result(60).finish == "length"
    record = later.result(60)
    assert (record.tokens, record.text) == (want.tokens, want.text)
    assert len(refused) == 1
    engine.close()


def test_a_step_reads_its_own_requests_only(numba_ops: Callable[[int], Ops]) -> None:
    """Others are submitted while it runs: the table of all requests changes under it."""
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2), max_batch=1)
    launch, seen = engine._runner.launch, []

    def watch(plan: StepPlan, requests: Mapping[int, Request], *drafter: Any) -> Launched:
        seen.append(list(requests))
        return launch(plan, requests, *drafter)

    engine._runner.launch = watch
    for _ in range(3):
        engine.submit([1, 2])
    engine.step()
    assert seen == [[0]]


def test_result_gives_up_after_its_timeout_without_a_thread_too(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2))
    ticket = engine.submit([1, 2], SamplingParams(max_tokens=1000, ignore_eos=True))
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="goes on"):
        ticket.result(0.0)
    assert time.monotonic() - begun < 5
    assert ticket.result().finish == "length"


def test_a_model_s_threads_end_between_steps_of_other_engines(
    numba_ops: Callable[[int], Ops], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny.loaded(tiny.Shape(layers=1), numba_ops(2))
    engine = Engine(EngineConfig(kv_tokens=256, step_tokens=64), loaded=loaded, threaded=False)
    monkeypatch.setattr(engine, "_owns_device", True)
    free: list[bool] = []

    def close() -> None:
        other = threading.Thread(target=lambda: free.append(loaded.turn.acquire(blocking=False)))  # type: ignore[attr-defined]
        other.start()
        other.join()

    monkeypatch.setattr(loaded.model.ops, "close", close)
    engine.close()
    assert free == [False]


def test_close_frees_the_kv_pool(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2))
    pool = weakref.ref(engine._runner.caches[0].keys)
    engine.submit([1, 2], SamplingParams(max_tokens=2)).result()
    planned = engine.memory().pool
    engine.close()
    assert pool() is None, "it waits for the garbage collector"
    assert engine.memory().pool == planned > 0


def test_a_step_shows_the_load_that_it_was_planned_with(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2), max_batch=1)
    ticket = engine.submit([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.submit([1, 2])
    steps = ticket.result().steps
    assert [(s.running, s.waiting, s.used_blocks) for s in steps] == [(1, 1, 1), (1, 1, 1)]


def test_callers_on_several_threads_may_drive_one_engine(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    want = engine.submit([1, 2], params).result().tokens
    tickets = [engine.submit([1, 2], params) for _ in range(4)]
    results: list[tuple[int, ...]] = []
    threads = [threading.Thread(target=lambda t=t: results.append(t.result(60).tokens)) for t in tickets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [want] * 4


def test_two_engines_may_share_a_loaded_model(numba_ops: Callable[[int], Ops]) -> None:
    """They take turns: the thread team serves one kernel call at a time."""
    loaded, params, prompt = tiny.loaded(tiny.Shape(), numba_ops(2)), SamplingParams(max_tokens=40), prompt_of(1, 200)
    config = EngineConfig(kv_tokens=1024, prefix_cache=False)
    want = Engine(config, loaded=loaded, threaded=False).submit(prompt, params).result().tokens
    engines = [Engine(config, loaded=loaded) for _ in range(2)]
    try:
        for _ in range(5):
            tickets = [engine.submit(prompt, params) for engine in engines]
            assert [ticket.result(60).tokens for ticket in tickets] == [want] * 2
    finally:
        for engine in engines:
            engine.close()


def test_a_bias_that_its_caller_changes_afterwards_stays_as_it_was_submitted(
    numba_ops: Callable[[int], Ops],
) -> None:
    bias = {5: 1000.0}
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2))
    ticket = engine.submit([1], SamplingParams(max_tokens=4, ignore_eos=True, logit_bias=bias))
    engine.step()
    bias |= {5: -1000.0, 6: 1000.0}
    record = ticket.result()
    assert record.tokens == (5, 5, 5, 5) and record.params["logit_bias"] == {"5": 1000.0}


@pytest.mark.parametrize("options", [{"speculate": "ngram", "width": 3}, {"repetition_penalty": 1.3}, {}])
def test_a_device_has_its_next_step_before_anybody_hears_of_the_last(
    options: dict[str, object], numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops]
) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), behind(numba_ops(1)), kv_tokens=1024)
    on_way: list[int] = []
    params = SamplingParams(max_tokens=20, ignore_eos=True, **options)  # type: ignore[arg-type]
    record = engine.submit(
        prompt_of(1, 40), params, on_delta=lambda _: on_way.append(len(engine._stepper._flights))
    ).result()
    assert record.finish == "length" and len(record.tokens) == 20
    assert all(on_way[:-2]), "each step but the last was followed at once"
    want = tiny.engine(tiny.Shape(layers=1), numba_ops(1), kv_tokens=1024).generate(prompt_of(1, 40), params)
    assert record.tokens == want.tokens


@pytest.mark.parametrize("fault", ["plan", "launch"])
def test_a_step_that_cannot_follow_is_told_in_its_turn(
    fault: str, numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was committed before it is published all the same."""
    engine = tiny.engine(tiny.Shape(layers=1), behind(numba_ops(1)), kv_tokens=1024)
    params = SamplingParams(max_tokens=20, ignore_eos=True, speculate="ngram", width=3, controller="fixed")
    want = engine.generate(prompt_of(1, 40), params)
    owner = engine._scheduler if fault == "plan" else engine._runner
    real, calls = getattr(owner, fault), 0

    def failing(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise ValueError("planted")
        return real(*args, **options)

    monkeypatch.setattr(owner, fault, failing)
    record = engine.generate(prompt_of(1, 40), params)
    assert record.finish == "error" and "planted" in record.finish_detail
    assert 0 < len(record.tokens) < 20 and record.tokens == want.tokens[: len(record.tokens)]
    assert sum(len(round_.emitted) for round_ in record.rounds) == len(record.tokens), "each is in the trace"
    monkeypatch.undo()
    engine.check()
    assert engine.generate(prompt_of(1, 40), params).tokens == want.tokens


def test_nothing_of_earlier_requests_is_left_when_prefixes_are_dropped(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(1), kv_tokens=2048)
    params = SamplingParams(max_tokens=60, ignore_eos=True, speculate="ngram", width=4, controller="fixed")
    prompts = prompt_of(1, 30), prompt_of(2, 30)

    def drafted(prompt: list[int]) -> list[tuple[int, ...]]:
        return [round_.drafted for round_ in engine.generate(prompt, params).rounds]

    cold = [drafted(prompt) for prompt in prompts]
    assert drafted(prompts[0]) != cold[0], "its own earlier answer is quoted"
    running = engine.submit(prompts[1], params)
    engine.step()
    engine.drop_prefixes()  # one that is running goes on undisturbed
    assert running.result().finish == "length"
    engine.drop_prefixes()
    assert drafted(prompts[0]) == cold[0]


def test_steps_of_a_request_whose_drafts_rest_overlap(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafts do not pay, decoding goes as fast as without a drafter."""
    params = SamplingParams(max_tokens=150, ignore_eos=True, speculate="ngram", width=8)
    want = tiny.engine(tiny.Shape(layers=1), numba_ops(1), kv_tokens=1024).generate(prompt_of(1, 40), params)
    engine = tiny.engine(tiny.Shape(layers=1), behind(numba_ops(1)), kv_tokens=1024)
    engine._proposer._make = lambda _: Wrong(250)
    engine._proposer._costs = RecordedCosts(
        {rows: 1e-3 * (1 + 0.3 * rows) for rows in range(1, 20)}, {}
    )  # no clock decides
    flights: list[int] = []
    collect = engine._runner.collect

    def counted(launched: Launched, requests: Mapping[int, Request]) -> Sampled:
        flights.append(len(engine._stepper._flights))
        return collect(launched, requests)

    monkeypatch.setattr(engine._runner, "collect", counted)
    record = engine.generate(prompt_of(1, 40), params)
    assert record.tokens == want.tokens
    assert flights.count(2) > len(flights) / 2
    drafted = [len(round_.drafted) for round_ in record.rounds[1:]]
    assert any(drafted[30:]), "and it is tried again"
    engine.check()


def test_an_interrupt_between_a_commit_and_the_next_step_loses_nothing(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, speculate="ngram", width=3, controller="fixed")
    want = tiny.engine(tiny.Shape(layers=1), numba_ops(1), kv_tokens=1024).generate(prompt_of(1, 40), params)
    engine = tiny.engine(tiny.Shape(layers=1), behind(numba_ops(1)), kv_tokens=1024)
    launch, calls = engine._runner.launch, 0

    def interrupted(plan: StepPlan, requests: Mapping[int, Request], *drafter: Any) -> Launched:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyboardInterrupt
        return launch(plan, requests, *drafter)

    monkeypatch.setattr(engine._runner, "launch", interrupted)
    ticket, interrupts = engine.submit(prompt_of(1, 40), params), 0
    while not ticket._live.done.is_set():
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
        engine.check()
    record = ticket.result()
    assert interrupts > 3 and record.finish == "length"
    assert record.tokens == want.tokens and record.text == want.text
    assert [round_.emitted for round_ in record.rounds] == [round_.emitted for round_ in want.rounds]
