"""Faults inside steps: 1,000 random cancels, interrupts and raised errors leave the blocks sound and the next answer exact."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from power_lab.engine.engine import Engine, Ticket
from power_lab.engine.request import SamplingParams
from power_lab.errors import CapacityError, ConfigError, EngineClosed, QueueFull
from power_lab.kernels.ops import Ops
from tests import tiny
from tests.engine.test_exactness import prompt_of

FAULTS = 1000


class FaultyOps:
    """An operation table in which the n-th operation from now raises what it was told to."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.countdown = -1
        self.error: Callable[[], BaseException] = RuntimeError

    def arm(self, countdown: int, error: Callable[[], BaseException]) -> None:
        self.countdown, self.error = countdown, error

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._ops, name)
        if not callable(target) or name in ("empty", "asarray", "tohost", "digest"):
            return target

        def call(*args: Any) -> Any:
            if self.countdown == 0:
                self.countdown = -1
                raise self.error()
            self.countdown -= 1
            return target(*args)

        return call


def submit(engine: Engine, rng: random.Random) -> Ticket:
    params = SamplingParams(
        max_tokens=rng.randrange(1, 40),
        temperature=rng.choice([0.0, 0.9]),
        seed=rng.randrange(100),
        speculate=rng.choice(["off", "lookup", "ngram"]),
        ignore_eos=True,
    )
    return engine.submit(prompt_of(rng.randrange(5), rng.randrange(1, 150)), params)


def test_a_thousand_faults_leave_blocks_sound_and_answers_exact(numba_ops: Callable[[int], Ops]) -> None:
    rng = random.Random(11)
    ops = FaultyOps(numba_ops(2))
    engine = tiny.engine(tiny.Shape(layers=1), ops, kv_tokens=512, step_tokens=100, max_batch=4)  # type: ignore[arg-type]
    question = prompt_of(77, 140)
    params = SamplingParams(max_tokens=30, speculate="ngram", ignore_eos=True)
    want = engine.submit(question, params).result().tokens
    tickets: list[Ticket] = []
    counts = {"cancel": 0, "error": 0, "memory": 0, "interrupt": 0, "sigint": 0}
    for fault in range(FAULTS):
        while len(tickets) < 5:
            tickets.append(submit(engine, rng))
        kind = rng.choice(list(counts))
        if kind == "cancel":
            rng.choice(tickets).cancel()
            engine.step()
        elif kind == "sigint":
            _step_under_sigint(engine, rng)
        else:
            error = {"error": RuntimeError, "memory": MemoryError, "interrupt": KeyboardInterrupt}[kind]
            ops.arm(rng.randrange(14), error)
            try:
                for _ in range(3):
                    engine.step()
            except KeyboardInterrupt:
                assert kind == "interrupt"
            ops.arm(-1, error)
        counts[kind] += 1
        engine.check()
        tickets = [t for t in tickets if not t._live.done.is_set()]
        if fault % 50 == 49:
            assert engine.submit(question, params).result().tokens == want
    for ticket in tickets:
        assert ticket.result().finish == "length"
    engine.check()
    assert engine.status().used_blocks == 0
    assert min(counts.values()) > FAULTS / 10


def _step_under_sigint(engine: Engine, rng: random.Random) -> None:
    """A real SIGINT from another thread, somewhere in a few steps: in planning, in a kernel, in the commit."""
    timer = threading.Timer(rng.random() * 0.004, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        for _ in range(500):
            engine.step()
            if not timer.is_alive() and engine.status().running == 0:
                break
        timer.join()
        for _ in range(1000):
            pass  # a signal is delivered between bytecodes
    except KeyboardInterrupt:
        timer.join()


def test_an_interrupted_step_is_simply_run_again(numba_ops: Callable[[int], Ops]) -> None:
    ops = FaultyOps(numba_ops(2))
    engine = tiny.engine(tiny.Shape(layers=1), ops)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    want = engine.submit([1, 2, 3], params).result().tokens
    ticket = engine.submit([1, 2, 3], params)
    for at in range(60):
        ops.arm(at % 12, KeyboardInterrupt)
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
        if ticket._live.done.is_set():
            break
    ops.arm(-1, KeyboardInterrupt)
    assert ticket.result().tokens == want


def test_a_failed_step_ends_its_requests_with_a_typed_error(numba_ops: Callable[[int], Ops]) -> None:
    ops = FaultyOps(numba_ops(2))
    engine = tiny.engine(tiny.Shape(layers=1), ops)  # type: ignore[arg-type]
    ticket = engine.submit([1, 2, 3])
    ops.arm(3, lambda: RuntimeError("planted"))
    engine.step()
    record = ticket.result()
    assert record.finish == "error" and "StepFailed" not in record.finish_detail and "planted" in record.finish_detail
    assert engine.submit([1, 2, 3], SamplingParams(max_tokens=3)).result().finish in ("length", "stop")


def test_bad_input_is_refused_by_key_and_changes_nothing(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2), kv_tokens=256, queue_limit=2)
    for bad, error, words in [
        (lambda: engine.submit([]), ConfigError, "prompt"),
        (lambda: engine.submit([99999]), ConfigError, "vocabulary"),
        (lambda: engine.submit([1], SamplingParams(stop_tokens=(-1,))), ConfigError, "stop_tokens"),
        (lambda: engine.submit([1] * 200, SamplingParams(max_tokens=57)), CapacityError, "56 or less"),
        (lambda: engine.submit([1], cache_key=" x"), ConfigError, "cache_key"),
        (lambda: engine.submit([1], deadline_s=-1.0), ConfigError, "deadline_s"),
        (lambda: engine.submit([1], chat=True), ConfigError, "chat"),
        (lambda: SamplingParams(temperature=float("nan")), ConfigError, "temperature"),
        (lambda: SamplingParams(top_p=0.0), ConfigError, "top_p"),
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
