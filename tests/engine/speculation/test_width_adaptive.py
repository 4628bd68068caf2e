"""A3S Power's adaptive width, rule by rule (spec/seeds.md 1.3). Three of its tests are known by name; the others follow from the text."""

from __future__ import annotations

import pytest

from power_lab.engine.speculation.width import WidthAsk
from power_lab.engine.speculation.width.adaptive import AdaptiveController
from tests.engine.speculation.test_width_controllers import Table

NOTHING = Table({}, {})


class Request:
    """One request of most drafts; `play` runs rounds of the width that is chosen and returns the widths after each."""

    def __init__(self, initial: int = 4, most: int = 10, least: int = 1, rollback: int | None = None) -> None:
        self.controller = AdaptiveController(initial, least, rollback)
        self.controller.begin(1, "ngram")
        self.most = most

    @property
    def width(self) -> int:
        return self.controller.ask([WidthAsk(1, self.most)], 0, NOTHING)[0].drafts

    @property
    def why(self) -> str:
        return self.controller.ask([WidthAsk(1, self.most)], 0, NOTHING)[0].why

    def play(self, *accepted: int | None) -> list[int]:
        """None accepts all."""
        widths = []
        for count in accepted:
            width = self.width
            self.controller.observe(1, width, width if count is None else count, 1.0)
            widths.append(self.width)
        return widths


def test_grows_by_one_after_whole_rounds_to_the_most() -> None:
    assert Request(4, 6).play(None, None, None, None) == [5, 6, 6, 6]


def test_halves_rounding_up_after_empty_rounds_to_the_least() -> None:
    assert Request(10, 10).play(0, 0, 0, 0, 0) == [5, 3, 2, 1, 1]
    assert Request(10, 10, least=3).play(0, 0, 0) == [5, 3, 3]


def test_keeps_its_width_where_at_least_half_is_accepted() -> None:
    assert Request(6, 10).play(3, 4, 5) == [6, 6, 6]


def test_below_half_it_follows_the_average() -> None:
    # First 2 of 8: mean 2, width ceil(2) + 1. Then 1 of 3: mean .35 + .65 * 2 = 1.65, width 3. Then 1 of 3: 1.4225, width 3.
    assert Request(8, 10).play(2, 1, 1) == [3, 3, 3]
    # 10 whole, then 3 of 10: mean .35 * 3 + .65 * 10 = 7.55, width 9.
    assert Request(10, 10).play(None, 3) == [10, 9]


def test_the_average_counts_rounds_of_every_kind() -> None:
    # 8 of 8; 0 of 9 halves to 5; 2 of 5: mean .35 * 2 + .65 * (.35 * 0 + .65 * 8) = 4.08, width 6.
    assert Request(8, 10).play(None, 0, 2) == [9, 5, 6]


def test_warm_starts_inside_rollback_window() -> None:
    assert Request(10, 10, rollback=6).width == 6
    assert Request(4, 10, rollback=6).width == 4


def test_jumps_wide_after_first_safe_full_acceptance() -> None:
    request = Request(10, 10, rollback=6)
    assert request.play(None, None) == [10, 10]


def test_closes_wide_probe_after_partial_acceptance() -> None:
    request = Request(10, 10, rollback=6)
    assert request.play(5, None, None, None) == [6, 6, 6, 6], "it never passes the window"


def test_a_start_inside_of_the_window_is_no_probe() -> None:
    assert Request(4, 10, rollback=6).play(None, None, None, None) == [5, 6, 7, 8]


def test_a_rejection_beyond_the_window_narrows_the_request_for_good() -> None:
    request = Request(10, 10, rollback=6)
    assert request.play(None, 3) == [10, 6]  # 7 rejected: 6, and half of the average of 6 and 3 would be wider
    assert request.play(None, None) == [6, 6]


def test_without_a_bound_nothing_is_guarded() -> None:
    assert Request(10, 10).play(5) == [10]
    assert Request(10, 10).play(0, None) == [5, 6]


def test_rounds_without_drafts_do_not_count() -> None:
    request = Request(4, 10)
    for _ in range(20):
        request.controller.observe(1, 0, 0, 1.0)
    assert request.width == 4


def test_the_circuit_opens_after_a_window_of_poor_rounds_and_stays_open() -> None:
    request = Request(4, 10)
    assert request.play(*[0] * 11)[-1] == 1
    assert request.play(0) == [0]
    assert "0 drafts accepted in 12 rounds, 12 of them empty" in request.why
    request.controller.observe(1, 4, 4, 1.0)
    assert request.width == 0


@pytest.mark.parametrize(
    ("accepted", "opens"),
    [
        ([0] * 6 + [1] * 6, True),  # mean .5, half of them empty
        ([0] * 4 + [1] * 8, False),  # mean .67, a third of them empty
        ([0] * 6 + [1] * 3 + [2] * 3, False),  # mean .75
        ([0] * 9 + [2, 3, 3], True),  # mean .67, three quarters of them empty
    ],
)
def test_the_circuit_wants_both_a_poor_mean_and_empty_rounds(accepted: list[int], opens: bool) -> None:
    controller = AdaptiveController()
    controller.begin(1, "ngram")
    controller.ask([WidthAsk(1, 8)], 0, NOTHING)
    for count in accepted:
        controller.observe(1, 4, count, 1.0)
    assert (controller.ask([WidthAsk(1, 8)], 0, NOTHING)[0].drafts == 0) == opens


def test_the_circuit_looks_at_the_last_dozen_of_its_own_request() -> None:
    controller = AdaptiveController()
    for request in (1, 2):
        controller.begin(request, "ngram")
        controller.ask([WidthAsk(request, 8)], 0, NOTHING)
    for _ in range(6):
        controller.observe(1, 4, 4, 1.0)
    for _ in range(9):
        controller.observe(1, 4, 0, 1.0)
    assert controller.ask([WidthAsk(1, 8)], 0, NOTHING)[0].drafts == 1, "three whole rounds are among the last 12"
    controller.observe(1, 4, 0, 1.0)
    assert [choice.drafts for choice in controller.ask([WidthAsk(1, 8), WidthAsk(2, 8)], 0, NOTHING)] == [0, 4]


def test_near_the_end_the_room_narrows_a_round_and_not_the_request() -> None:
    request = Request(6, 8)
    assert request.width == 6
    request.most = 2
    assert request.width == 2
    request.most = 8
    assert request.width == 6
