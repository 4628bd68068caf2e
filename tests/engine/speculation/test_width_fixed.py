"""The fixed width, and A3S Power's guard against a second replay (spec/seeds.md 1.2)."""

from __future__ import annotations

from power_lab.engine.speculation.width import WidthAsk
from power_lab.engine.speculation.width.fixed import FixedController
from tests.engine.speculation.test_width_controllers import Table

NOTHING = Table({}, {})


def width(controller: FixedController, most: int = 8, request: int = 1) -> int:
    asked = controller.ask([WidthAsk(request, most)], 3, NOTHING)[0].drafts
    assert controller.keep([WidthAsk(request, most)], 3, NOTHING)[0].drafts == asked
    return asked


def guarded(rollback: int | None) -> FixedController:
    controller = FixedController(rollback)
    controller.begin(1, "ngram")
    controller.begin(2, "ngram")
    return controller


def test_it_is_as_wide_as_there_is_room() -> None:
    controller = guarded(None)
    controller.observe(1, 8, 0, 1.0)
    assert [width(controller, most) for most in (1, 8, 64)] == [1, 8, 64]


def test_the_guard_never_fires_inside_of_the_window() -> None:
    controller = guarded(8)
    for accepted in (0, 3, 8):
        controller.observe(1, 8, accepted, 1.0)
    assert width(controller) == 8


def test_the_first_rejection_beyond_the_window_narrows_the_request() -> None:
    controller = guarded(3)
    controller.observe(1, 8, 4, 1.0)
    assert width(controller) == 3


def test_a_rejection_as_long_as_the_window_does_not() -> None:
    controller = guarded(3)
    controller.observe(1, 8, 5, 1.0)
    assert width(controller) == 8


def test_the_guard_holds_for_the_rest_of_its_request_only() -> None:
    controller = guarded(3)
    controller.observe(1, 8, 0, 1.0)
    for _ in range(50):
        controller.observe(1, 3, 3, 1.0)
    assert (width(controller), width(controller, 2), width(controller, request=2)) == (3, 2, 8)
    controller.end(1)
    controller.begin(1, "ngram")
    assert width(controller) == 8
