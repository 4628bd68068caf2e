"""Faults inside steps: 1,000 random cancels, interrupts and raised errors leave the blocks sound and the next answer exact."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from power_lab.engine.engine import Engine, Ticket
from power_lab.engine.interrupts import Interrupts
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters import DraftAsk
from power_lab.kernels.ops import Ops
from tests import tiny
from tests.engine.test_exactness import prompt_of

FAULTS = 1000


class FaultyOps:
    """An operation table in which the n-th operation from now raises what it was told to.

    Without graphs a step fails in the middle, after some of its operations have run.
    """

    def __init__(self, ops: Ops, graphs: bool = False) -> None:
        self._ops = ops
        self._graphs = graphs
        self.countdown = -1
        self.error: Callable[[], BaseException] = RuntimeError

    def arm(self, countdown: int, error: Callable[[], BaseException]) -> None:
        self.countdown, self.error = countdown, error

    def capture(self, forward: Callable[[], Any]) -> Any:
        return self._ops.capture(forward) if self._graphs else None

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


@pytest.mark.parametrize("graphs", [False, True])
def test_a_thousand_faults_leave_blocks_sound_and_answers_exact(graphs: bool, numba_ops: Callable[[int], Ops]) -> None:
    rng = random.Random(11)
    ops = FaultyOps(numba_ops(2), graphs)
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
    gc.disable()  # Hypothesis times collections, where an interrupt would vanish
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
    finally:
        gc.enable()


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


class BadDrafter:
    """Answers with what is no draft, and raises when a request ends."""

    name = "bad"

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None: ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[Any]:
        return [None] * len(asks)

    def commit(self, request_id: int, emitted: Sequence[int]) -> None: ...

    def end(self, request_id: int) -> None:
        raise RuntimeError("planted")


def test_a_bad_drafter_costs_its_drafts_only(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2))
    engine._proposer._make = lambda _: BadDrafter()
    params = SamplingParams(max_tokens=5, ignore_eos=True, controller="fixed")
    other = engine.submit([1, 2], params)
    record = engine.submit([1, 2], msgspec.structs.replace(params, speculate="ngram")).result()
    assert record.tokens == other.result().tokens and record.finish == "length"
    assert "bad failed: AttributeError" in record.rounds[1].note


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(("handler", "code"), [("SIG_DFL", -signal.SIGINT), ("SIG_IGN", 0), ("default_int_handler", 7)])
def test_an_interrupt_that_was_held_back_is_delivered(handler: str, code: int, watched: bool) -> None:
    script = (
        "import contextlib, signal, sys; from power_lab.engine.interrupts import Interrupts\n"
        f"signal.signal(signal.SIGINT, signal.{handler})\n"
        "interrupts = Interrupts()\n"
        "try:\n"
        f"    with interrupts.watching() if {watched} else contextlib.nullcontext():\n"
        "        with interrupts.held(), interrupts.held():\n"
        "            signal.raise_signal(signal.SIGINT); print('inside', flush=True)\n"
        "        print('behind', flush=True)\n"
        "except KeyboardInterrupt:\n"
        f"    assert signal.getsignal(signal.SIGINT) is signal.{handler}\n"
        "    sys.exit(7)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("inside\n" + "behind\n" * (code == 0), code)


def test_an_interrupt_between_sections_is_delivered_at_once() -> None:
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt), interrupts.watching():
            with interrupts.held():
                pass
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("not delivered")
        assert signal.getsignal(signal.SIGINT) is before


def test_interrupts_at_any_line_of_a_section_leave_the_handler_as_it_was() -> None:
    """Signals that come while handlers are being changed, too."""
    interrupts, before = Interrupts(), signal.getsignal(signal.SIGINT)
    own = sys.modules[Interrupts.__module__].__file__

    def fire_at(count: int) -> bool:
        lines = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            if frame.f_code.co_filename == own and event == "line":
                lines += 1
                if lines == count:
                    signal.raise_signal(signal.SIGINT)
            return trace if frame.f_code.co_filename == own or frame.f_code.co_name == "run" else None

        def run() -> None:
            with interrupts.watching(), interrupts.held(), interrupts.held():
                pass

        sys.settrace(trace)
        try:
            run()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    assert sum(fire_at(count) for count in range(1, 60)) > 15
    with interrupts.held():  # a signal in just the line that gives the handler back leaves it until the next time
        assert signal.getsignal(signal.SIGINT) == interrupts._arrived
    assert signal.getsignal(signal.SIGINT) is before and not interrupts._sections


def test_logits_that_are_not_finite_cost_their_own_request_only(numba_ops: Callable[[int], Ops]) -> None:
    """A row's fate must not depend on who shares the batch, a bad one included."""

    class Poisoned(FaultyOps):
        """Rows whose hidden state came from the token 255 get NaN logits."""

        def linear(self, x: Any, weights: Any, out: Any, bias: Any = None) -> None:
            self._ops.linear(x, weights, out, bias)
            if out.shape[1] == self.vocab and self.poison is not None:
                out[self.poison] = np.nan

        vocab = tiny.tokenizer().vocab_size
        poison: int | None = None

    ops = Poisoned(numba_ops(2))
    engine = tiny.engine(tiny.Shape(layers=1), ops)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)
    want = engine.submit([1, 2, 3], params).result()
    good, bad = engine.submit([1, 2, 3], params), engine.submit([4, 5], params)
    for _ in range(4):
        engine.step()
    ops.poison = 1
    engine.step()
    ops.poison = None
    record = bad.result()
    assert record.finish == "error" and "NaN" in record.finish_detail and len(record.tokens) == 4
    got = good.result()
    assert got.tokens == want.tokens
    assert [p for r in got.rounds for p in r.logprobs] == [p for r in want.rounds for p in r.logprobs]
    engine.check()
    assert engine.status().used_blocks == 0
