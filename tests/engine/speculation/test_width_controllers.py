"""What holds for every controller, whatever happened before: bounds, determinism, and nothing left of what is over."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.speculation.width import Choice, Controller, WidthAsk, make
from power_lab.engine.speculation.width.adaptive import AdaptiveController
from power_lab.engine.speculation.width.fixed import FixedController

NAMES = ["cost", "adaptive", "governor", "fixed"]


@dataclass
class Table:
    """Costs by rows and by requests; what is not in it was not measured."""

    steps: dict[int, float]
    drafts: dict[int, float]

    def step(self, rows: int) -> float | None:
        return self.steps.get(rows)

    def draft(self, drafter: str, requests: int) -> float | None:
        return self.drafts.get(requests)


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
