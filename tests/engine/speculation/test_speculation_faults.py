"""The transaction under faults: whatever raises, wherever in a round, the engine stands at its last commit and goes on exactly.

Drafters and controllers are never worth a request: it says all that it would have said. What raises in planning, in a pass, in the commit
or behind it ends the requests of that step with what was told before, and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from power_lab.engine import stepping
from power_lab.engine.blocks import BlockPool
from power_lab.engine.engine import Engine
from power_lab.engine.flight import Flight
from power_lab.engine.live import Live
from power_lab.engine.request import SamplingParams
from power_lab.engine.runner import Runner
from power_lab.engine.scheduler import Scheduler
from power_lab.engine.speculation.drafters.suffix import NgramDrafter
from power_lab.engine.speculation.rollback import Rollback
from power_lab.engine.speculation.transaction import Proposer
from power_lab.engine.speculation.width.cost import CostController
from power_lab.engine.speculation.width.costs import MeasuredCosts
from power_lab.engine.ticket import Ticket
from power_lab.engine.trace import RunRecord
from power_lab.engine.views import Totals
from power_lab.evidence.dataset import check
from power_lab.kernels.ops import Ops
from tests import tiny
from tests.engine.test_exactness import prompt_of

ADVICE = [
    *((NgramDrafter, name) for name in ("begin", "propose", "commit", "end")),
    *((CostController, name) for name in ("begin", "ask", "keep", "observe", "end")),
]
STEP = [
    (Proposer, "propose"),
    (Scheduler, "plan"),
    (Rollback, "begin"),
    (Runner, "launch"),
    (Runner, "collect"),
    (stepping, "verify"),
    (Rollback, "restore"),
    (Scheduler, "commit"),
    (BlockPool, "seal"),  # in the middle of a commit
    (MeasuredCosts, "add_step"),
    (Totals, "count"),
    (Flight, "events"),
    (Live, "accept"),
]
PARAMS = SamplingParams(max_tokens=50, speculate="ngram", width=6, temperature=0.7, seed=4, ignore_eos=True)
QUESTIONS = [prompt_of(at, 90 + 40 * at) for at in range(3)]


class Planted(Exception):
    pass


def name_of(point: Any) -> str:
    return point if isinstance(point, str) else getattr(point, "__name__", str(point)).rsplit(".", 1)[-1]


def plant(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int, after: bool) -> list[int]:
    """Make the call of that number raise, before or after it has done its work. Returns a list that grows by one a call."""
    right, calls = getattr(owner, name), []

    def faulty(*args: Any, **options: Any) -> Any:
        calls.append(len(calls))
        if len(calls) != at:
            return right(*args, **options)
        if after:
            right(*args, **options)
        raise Planted(name)

    patch.setattr(owner, name, faulty)
    return calls


def ask(engine: Engine) -> list[Ticket]:
    return [engine.submit(question, PARAMS) for question in QUESTIONS]


def finished(engine: Engine, tickets: list[Ticket]) -> list[RunRecord]:
    for _ in range(500):
        if all(ticket._live.done.is_set() for ticket in tickets):
            return [ticket.result() for ticket in tickets]
        engine.step()
        engine.check()
    raise AssertionError("somebody waits for ever")


@pytest.fixture
def fresh(numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops]) -> Callable[[bool], Engine]:
    """A new engine, on a device that is waited for or behind its host, with room for some of the requests only."""
    return lambda late: tiny.engine(
        tiny.Shape(layers=1), behind(numba_ops(2)) if late else numba_ops(2), kv_tokens=448, step_tokens=64, max_batch=3
    )


@pytest.fixture(scope="module")
def answers(numba_ops: Callable[[int], Ops]) -> list[tuple[int, ...]]:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2))
    return [ticket.result().tokens for ticket in ask(engine)]


def goes_on(engine: Engine, want: list[tuple[int, ...]]) -> None:
    """Nothing is left behind, and what is asked next is answered exactly."""
    engine.check()
    assert engine.status().used_blocks == 0 and not engine._proposer._of and not engine._stepper._flights
    assert [record.tokens for record in finished(engine, ask(engine))] == want


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), ADVICE, ids=name_of)
def test_advice_that_raises_costs_no_request(
    owner: Any, name: str, after: bool, late: bool, fresh: Callable[[bool], Engine], answers: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for at in (1, 2, 5):
        engine = fresh(late)
        with monkeypatch.context() as patch:
            calls = plant(patch, owner, name, at, after)
            records = finished(engine, ask(engine))
        assert [record.tokens for record in records] == answers
        assert len(calls) >= min(at, len(QUESTIONS)), "the fault did not happen"
        goes_on(engine, answers)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), STEP, ids=name_of)
def test_a_step_that_raises_leaves_the_last_commit(
    owner: Any, name: str, after: bool, late: bool, fresh: Callable[[bool], Engine], answers: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for at in (1, 3, 9, 14):
        engine = fresh(late)
        with monkeypatch.context() as patch:
            calls = plant(patch, owner, name, at, after)
            records = finished(engine, ask(engine))
        failed = [record for record in records if record.finish == "error"]
        assert failed or len(calls) < at or late, "the fault did not happen"
        for record, want in zip(records, answers, strict=True):
            check(record)  # rounds, text and tokens tell one story
            assert record.tokens == want[: len(record.tokens)]
            assert record.finish == "error" or record.tokens == want
        assert all("Planted" in record.finish_detail for record in failed)
        goes_on(engine, answers)
