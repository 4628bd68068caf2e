"""The default: most tokens a second on the measured staircase, against brute force; probes, pauses, and what dear drafters are asked."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.speculation.width import HOT, WidthAsk
from power_lab.engine.speculation.width.cost import (
    LONGEST,
    MEASURED,
    PAUSE,
    PROBE,
    STALE,
    CostController,
    best,
    best_hot,
)
from power_lab.engine.speculation.width.costs import MeasuredCosts
from power_lab.engine.speculation.width.survival import Survival
from tests.engine.speculation.test_width_controllers import Table

survivals = st.lists(
    st.lists(st.sampled_from([0.1, 0.5, 0.75, 0.9, 1.0]), max_size=4).map(
        lambda rates: [float(x) for x in itertools.accumulate(rates, lambda a, b: a * b)]
    ),
    min_size=1,
    max_size=4,
)


@given(
    survivals,
    st.integers(0, 3),
    st.lists(st.floats(0.5, 8.0), min_size=24, max_size=24),
    st.sampled_from(
        [[(4, 0.0)], [(4, 0.3)], [(1, 0.2), (2, 0.5), (4, 2.0)], [(1, 0.1), (4, 0.9)], [(2, 0.4), (3, 0.6)]]
    ),
)
def test_the_best_drafts_are_those_of_brute_force(
    survival: list[list[float]], others: int, steps: list[float], drafting: list[tuple[int, float]]
) -> None:
    rows = others + len(survival)
    table = Table(dict(enumerate(steps, 1)), {})
    found = best(survival, rows, table, drafting)

    def rate(widths: tuple[int, ...]) -> float:
        tokens = rows + sum(sum(values[:width]) for values, width in zip(survival, widths, strict=True))
        extra = next((seconds for width, seconds in drafting if width >= max(widths)), math.inf)
        return tokens / (steps[rows + sum(widths) - 1] + extra * any(widths))

    every = itertools.product(*(range(len(values) + 1) for values in survival))
    assert rate(found.drafts) == pytest.approx(max(map(rate, every)))
    assert found.tokens / found.seconds == pytest.approx(rate(found.drafts))


def test_it_looks_past_a_descent() -> None:
    """Padded to 1, 2, 8: the second step of the staircase is a loss at its beginning and a win at its end."""
    table = Table({1: 1.0, 2: 1.8, **dict.fromkeys(range(3, 9), 2.5)}, {})
    survival = [[0.95**k for k in range(1, 8)]]
    assert [best([survival[0][:k]], 1, table).drafts for k in (1, 2, 3, 7)] == [(1,), (2,), (3,), (7,)]
    assert best([[0.5**k for k in range(1, 8)]], 1, table).drafts == (0,)


def test_what_was_not_measured_is_guessed() -> None:
    sure = [[0.9**k for k in range(1, 9)]]
    assert best(sure, 1, Table({1: 1.0, 4: 2.0, 9: 9.0}, {})).drafts == (7,), "a gap costs what is below it"
    assert best([[0.9, 0.8]], 1, Table({1: 1.0, 2: 3.0}, {})).drafts == (0,), "the line through 1 and 3 goes on"
    assert best([[0.9, 0.8]], 1, Table({1: 1.0, 2: 1.5}, {})).drafts == (2,)
    assert best([[0.9, 0.8]], 1, Table({2: 1.0}, {})).drafts == (2,), "at the beginning, what is above"
    assert best(sure, 1, Table({}, {})).drafts == (8,), "tokens alone decide"


def test_sizes_are_come_to_by_doubling() -> None:
    sure, table = [[0.9**k for k in range(1, 16)]], Table({1: 1.0}, {})
    tried = []
    for _ in range(4):
        tried.append(1 + best(sure, 1, table).drafts[0])
        table.steps[tried[-1]] = 1.0 + 0.001 * tried[-1]
    assert tried == [2, 4, 8, 16]


def test_the_more_likely_request_gets_the_drafts() -> None:
    table = Table({2: 1.0, 3: 1.1, 4: 1.2, 5: 3.0, 6: 3.0}, {})
    assert best([[0.3, 0.1], [0.9, 0.8]], 2, table).drafts == (0, 2)


def test_a_width_pays_what_its_drafting_costs() -> None:
    """Rows are free, and a draft survives with 0.8: a block is asked for whole, a chain where its next link costs more than it brings."""
    sure, table = [[0.8**k for k in range(1, 9)]], Table(dict.fromkeys(range(1, 10), 1.0), {})
    assert best(sure, 1, table, [(8, 0.6)]).drafts == (8,)
    chain = best(sure, 1, table, [(width, 0.15 * width) for width in range(1, 9)])
    rates = [sum(0.8**k for k in range(width + 1)) / (1 + 0.15 * width) for width in range(9)]
    assert chain.drafts == (rates.index(max(rates)),) == (5,)
    assert chain.tokens / chain.seconds == pytest.approx(max(rates))
    both = best([sure[0], [0.3]], 2, table, [(width, 0.15 * width) for width in range(1, 9)])
    assert both.drafts[1] == 1, "its draft comes with the others"


@pytest.mark.parametrize("each", [0.0, 0.02e-3, 0.15e-3, 0.5e-3])
def test_a_chain_is_asked_for_what_pays_and_seldom_for_more(each: float) -> None:
    play = Play(step=0.0, draft=0.05e-3, each=each)
    fates = np.random.default_rng(0).geometric(0.2, 600) - 1  # each draft survives with 0.8
    asked = [play.round(int(fate))[0] for fate in fates][200:]
    rates = [(1 - 0.8 ** (k + 1)) / 0.2 / (1e-3 + (0.05e-3 + each * k) * (k > 0)) for k in range(9)]
    want = rates.index(max(rates))
    usual = statistics.median(width for width in asked if width)
    assert abs(usual - want) <= (1 if each else 0) + (want > 4), (usual, want, rates)
    wider = sum(width > usual for width in asked)
    assert wider < 0.4 * len(asked) and (wider or want == 8), "it is looked at now and then"


class Play:
    """One request: rounds of which each draft's fate is told; rows cost 1 ms and a share of that for each draft."""

    def __init__(
        self, step: float = 0.1, draft: float | None = None, controller: CostController | None = None, each: float = 0.0
    ) -> None:
        steps = {rows: 1e-3 * (1 + step * (rows - 1)) for rows in range(1, 40)}
        self.table = Table(steps, {1: draft} if draft else {}, each)
        self.controller = controller or CostController()
        self.controller.begin(1, "mtp")
        self.why = ""
        self.rest = 0  # rounds for which it is not asked

    def round(self, accepted: int, drafted: int = 8, confidence: tuple[float, ...] = ()) -> tuple[int, int]:
        """What the drafter was asked for and what was verified; `accepted` at most of it."""
        if self.rest:
            self.rest -= 1
            return 0, 0
        asked = self.controller.ask([WidthAsk(1, 8)], 0, self.table)[0]
        self.why, kept, self.rest = asked.why, 0, asked.rest
        if count := min(asked.drafts, drafted):
            choice = self.controller.keep([WidthAsk(1, count, confidence[:count])], 0, self.table)[0]
            self.why, kept = choice.why, choice.drafts
        self.controller.observe(1, kept, min(kept, accepted), 1e-3)
        return asked.drafts, kept


def test_what_is_accepted_widens_to_the_most() -> None:
    play = Play()
    kept = [play.round(8)[1] for _ in range(20)]
    assert kept[-1] == 8 and kept == sorted(kept)
    assert sum(play.round(8)[0] == 0 for _ in range(10 * STALE)) == 10, "now and then a step without drafts is measured"
    play.round(8)
    assert "tokens in 1.80 ms, 1 in 1.00 without drafts" in play.why


def test_what_is_not_accepted_pauses_for_ever_longer_and_never_for_ever() -> None:
    play = Play()
    asked = [play.round(0)[0] for _ in range(2000)]
    pauses = [len(list(group)) for none, group in itertools.groupby(asked, lambda drafts: drafts == 0) if none]
    assert pauses[:5] == sorted(pauses[:5]) and pauses[0] <= PAUSE + 2
    assert LONGEST <= max(pauses) <= LONGEST + 2
    assert sum(map(bool, asked[500:])) >= (2000 - 500) // (LONGEST + 3)
    assert sum(asked[100:]) < 0.05 * 1900, "probes are narrow"


def test_a_request_that_changes_its_mind_is_found_again() -> None:
    play = Play()
    for _ in range(300):
        play.round(0)
    kept = [play.round(8)[1] for _ in range(LONGEST + 12)]
    assert kept[-1] == 8


def test_a_drafter_that_failed_elsewhere_is_probed_first() -> None:
    controller = CostController()
    play = Play(controller=controller)
    for _ in range(100):
        play.round(0)
    controller.end(1)
    fresh = Play(controller=controller)
    assert fresh.round(8) == (PROBE, PROBE)
    assert [fresh.round(8)[1] for _ in range(3)][-1] == 8


def test_confidence_cuts_where_it_falls() -> None:
    play = Play(step=0.4)
    sure = (0.95, 0.9, 0.9, 0.2, 0.2, 0.2, 0.2, 0.2)
    for _ in range(10):
        play.round(3, confidence=sure)
    assert play.round(3, confidence=sure) == (8, 3)


def test_confidence_that_lies_is_calibrated() -> None:
    play = Play(step=0.4)
    kept = [play.round(0, confidence=(0.95,) * 8)[1] for _ in range(200)]
    assert kept[0] > PROBE and sum(kept[20:]) < 0.1 * 180
    assert sum(kept[100:]) > 0, "it is looked at again now and then"


def test_a_dear_drafter_is_asked_for_one_more_than_pays_and_not_at_all_where_it_does_not() -> None:
    play = Play(step=0.01, draft=0.5e-3)
    for _ in range(40):
        play.round(1)
    asked, kept = play.round(1)
    assert 0 < asked < 8 and kept <= asked
    dear = Play(step=0.01, draft=5e-3)
    asks = [dear.round(1)[0] for _ in range(200)]
    assert sum(map(bool, asks)) < 30
    assert any("costs 5.00 ms to make" in why for why in _reasons(Play(step=0.01, draft=5e-3), 40))


def _reasons(play: Play, rounds: int) -> list[str]:
    said = []
    for _ in range(rounds):
        play.round(1)
        said.append(play.why)
    return said


def test_a_dear_drafter_that_has_nothing_is_left_alone() -> None:
    play = Play(step=0.01, draft=0.5e-3)
    asks = [play.round(0, drafted=0)[0] for _ in range(300)]
    assert sum(map(bool, asks[50:])) < 20


def test_sizes_are_measured_a_few_times_and_then_guessed() -> None:
    controller = CostController()
    controller.begin(1, "ngram")
    asks = [controller.ask([WidthAsk(1, 8)], 0, Table({}, {}))[0].drafts for _ in range(MEASURED + 2)]
    assert asks == [0] * MEASURED + [8, 8]


def test_all_requests_of_a_step_are_weighed_together() -> None:
    """Eight requests and one draft each fill a bucket; the ninth row would open a dearer one."""
    controller = CostController()
    table = Table({**dict.fromkeys(range(1, 5), 1.0), **dict.fromkeys(range(5, 40), 9.0)}, {})
    for request in (1, 2):
        controller.begin(request, "mtp")
    choices = controller.keep([WidthAsk(1, 4, (0.9, 0.2, 0.1, 0.1)), WidthAsk(2, 4, (0.8, 0.7, 0.1, 0.1))], 0, table)
    assert [choice.drafts for choice in choices] == [1, 1]
    alone = controller.keep([WidthAsk(2, 4, (0.8, 0.7, 0.1, 0.1))], 1, table)
    assert [choice.drafts for choice in alone] == [2]


def test_survival_is_learnt_by_position_and_falls() -> None:
    own, shared = Survival(0.9), Survival(0.99)
    start = own.learnt(shared, 4)
    assert start == pytest.approx([0.6, 0.36, 0.216, 0.1296])
    for _ in range(30):
        own.add(4, 2, ())
    learnt = own.learnt(shared, 4)
    assert learnt[1] > 0.5 and learnt[2] < 0.2 and learnt == sorted(learnt, reverse=True)


def test_rounds_that_stay_on_the_device_have_few_widths() -> None:
    """Each is captured as a whole, so a width for every request and moment would be captured for ever."""
    costs, controller, asked = MeasuredCosts((1, 2, 4, 8, 16)), CostController(), set()
    for rows, seconds in ((1, 0.65), (2, 0.7), (4, 0.8), (8, 0.95), (16, 1.3)):
        for _ in range(3):
            costs.add_step(rows, rows, seconds)
    controller.begin(0, "mtp")
    rng = random.Random(0)
    waiting: deque[int] = deque()
    for _ in range(400):
        (choice,) = controller.ask_ahead([WidthAsk(0, 15)], 0, costs)
        asked.add(choice.drafts)
        waiting.append(choice.drafts)
        if len(waiting) > 1:  # the round ahead ends when this one is on its way
            drafted = waiting.popleft()
            accepted = next((at for at in range(drafted) if rng.random() > 0.75), drafted)
            controller.observe(0, drafted, accepted, 1e-3)
    assert asked <= {0, *HOT} and {3, 7} & asked


@given(
    st.lists(st.floats(0, 1), max_size=40).map(lambda values: sorted(values, reverse=True)),
    st.integers(1, 9),
    st.lists(st.floats(1e-4, 1e-2), min_size=50, max_size=50),
)
def test_the_best_hot_width_is_the_best_of_those(survival: list[float], rows: int, steps: list[float]) -> None:
    found = best_hot(survival, rows, Table(dict(enumerate(steps, 1)), {}))
    rates = {
        width: (rows + sum(survival[:width])) / steps[rows + width - 1] for width in (0, *HOT) if width <= len(survival)
    }
    assert rates[found.drafts[0]] == pytest.approx(max(rates.values()))
    assert found.tokens / found.seconds == pytest.approx(rates[found.drafts[0]])
