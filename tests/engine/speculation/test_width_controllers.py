"""What holds for every controller, whatever happened before: bounds, determinism, and nothing left of what is over."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.speculation.width import Choice, Controller, WidthAsk, make
from power_lab.engine.speculation.width.adaptive import AdaptiveController
from power_lab.engine.speculation.width.fixed import FixedController
from tests.engine.speculation import reference_cost

NAMES = ["cost", "adaptive", "governor", "fixed"]


@dataclass
class Table:
    """Costs by rows and by requests, and of each draft; what is not in it was not measured."""

    steps: dict[int, float]
    drafts: dict[int, float]
    each: float = 0.0

    def step(self, rows: int) -> float | None:
        return self.steps.get(rows)

    def staircase(self, rows: int, count: int) -> list[float | None]:
        return [self.step(at) for at in range(rows, rows + count)]

    def draft(self, drafter: str, requests: int, width: int | None = None) -> float | None:
        seconds = self.drafts.get(requests)
        return seconds if seconds is None or width is None else seconds + self.each * width


seconds = st.floats(0, 1) | st.just(0.0)
tables = st.builds(
    Table, st.dictionaries(st.integers(1, 40), seconds, max_size=40), st.dictionaries(st.integers(1, 4), seconds)
)


@st.composite
def controllers(draw: st.DrawFn) -> Controller:
    rollback = draw(st.none() | st.integers(1, 8))
    made: list[Controller] = [
        make("cost"),
        make("governor"),
        FixedController(rollback),
        AdaptiveController(draw(st.integers(1, 10)), draw(st.integers(1, 3)), rollback),
    ]
    return draw(st.sampled_from(made))


def rounds(controller: Controller, data: st.DataObject) -> list[list[Choice]]:
    """Random rounds of random requests; every choice is within its bounds, in both stages."""
    running: list[int] = []
    said: list[list[Choice]] = []
    for at in range(data.draw(st.integers(1, 30))):
        if len(running) < 4 and (not running or data.draw(st.booleans())):
            running.append(at)
            controller.begin(at, data.draw(st.sampled_from(["one", "other"])))
        asks = [WidthAsk(request, data.draw(st.integers(1, 12))) for request in running]
        table, others = data.draw(tables), data.draw(st.integers(0, 9))
        asked = controller.ask(asks, others, table)
        bounded(asks, asked)
        answered: list[WidthAsk] = []
        for ask, choice in zip(asks, asked, strict=True):
            count = data.draw(st.integers(0, choice.drafts))
            sure = data.draw(st.just(()) | st.lists(st.floats(0, 1), min_size=count, max_size=count).map(tuple))
            if count:
                answered.append(WidthAsk(ask.request_id, count, sure))
        kept = controller.keep(answered, others, table)
        bounded(answered, kept)
        said += [asked, kept]
        verified = {ask.request_id: choice.drafts for ask, choice in zip(answered, kept, strict=True)}
        for request in list(running):
            drafted = data.draw(st.integers(0, verified.get(request, 0)))  # a step may have no room for all
            controller.observe(request, drafted, data.draw(st.integers(0, drafted)), data.draw(seconds))
            if data.draw(st.integers(0, 9)) == 0:
                controller.end(request)
                running.remove(request)
    for request in running:
        controller.end(request)
    return said


def bounded(asks: list[WidthAsk], choices: list[Choice]) -> None:
    assert len(choices) == len(asks)
    for ask, choice in zip(asks, choices, strict=True):
        assert 0 <= choice.drafts <= ask.most and choice.why.startswith(f"{choice.drafts}: ")


class Tape:
    """Records what is drawn, and says the same again."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._drawn: list[object] = []
        self._again: list[object] | None = None

    def draw(self, strategy: st.SearchStrategy[object]) -> object:
        if self._again is not None:
            return self._again.pop(0)
        self._drawn.append(self._data.draw(strategy))
        return self._drawn[-1]

    def rewind(self) -> None:
        self._again = list(self._drawn)


@given(controllers(), st.data())
def test_choices_are_bounded_deterministic_and_forgotten(controller: Controller, data: st.DataObject) -> None:
    twin, tape = copy.deepcopy(controller), Tape(data)
    said = rounds(controller, tape)  # type: ignore[arg-type]
    tape.rewind()
    assert rounds(twin, tape) == said  # type: ignore[arg-type]
    held = [value for key, value in vars(controller).items() if key in ("_states", "_guarded", "_drafters", "_asked")]
    assert held and not any(held)


@settings(deadline=None)  # other work on the machine is no fault
@given(st.data())
def test_the_cost_controller_chooses_as_its_reference(data: st.DataObject) -> None:
    """Where a drafter's call costs the same whatever its width; reasons included."""
    tape = Tape(data)
    said = rounds(make("cost"), tape)  # type: ignore[arg-type]
    tape.rewind()
    assert rounds(reference_cost.CostController(), tape) == said  # type: ignore[arg-type]


@pytest.mark.parametrize("sure", [False, True])
@pytest.mark.parametrize("drafting", [{}, {8: 2e-5}, {8: 4e-4}])
def test_it_does_so_for_a_long_time_with_what_was_measured(drafting: dict[int, float], sure: bool) -> None:
    said = []
    for controller in (make("cost"), reference_cost.CostController()):
        rng = np.random.default_rng(7)
        for request in range(8):
            controller.begin(request, "one" if request < 5 else "other")
        table = Table({rows: 1e-3 * (1 + rows // 8) for rows in range(1, 200)}, drafting)
        said.append([])
        for _ in range(150):
            asks = [WidthAsk(request, 7) for request in range(8)]
            asked = controller.ask(asks, 2, table)
            drafts = [(ask, choice.drafts) for ask, choice in zip(asks, asked, strict=True) if choice.drafts]
            answers = [
                WidthAsk(ask.request_id, n, tuple(rng.uniform(0.4, 1.0, n).tolist()) if sure else ())
                for ask, n in drafts
            ]
            kept = controller.keep(answers, 2, table)
            verified = {ask.request_id: choice.drafts for ask, choice in zip(answers, kept, strict=True)}
            for request in range(8):
                width = verified.get(request, 0)
                controller.observe(request, width, min(width, int(rng.geometric(0.3)) - 1), 1e-3)
            said[-1] += [asked, kept]
    assert said[0] == said[1] and any(choice.drafts for choices in said[0] for choice in choices)


def test_those_that_mind_are_told_how_many_drafts_can_be_taken_back() -> None:
    for name, first in (("adaptive", 2), ("fixed", 9)):
        controller = make(name, rollback=2)
        controller.begin(1, "ngram")
        assert controller.ask([WidthAsk(1, 9)], 0, Table({}, {}))[0].drafts == first
        controller.observe(1, 9, 0, 1.0)
        assert controller.ask([WidthAsk(1, 9)], 0, Table({}, {}))[0].drafts <= 2
    assert make("cost", rollback=2).name == "cost"
