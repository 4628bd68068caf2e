"""How many drafts a request's next step verifies. A choice costs or saves time and never changes a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

HOT = (1, 3, 7, 15, 31, 63)
"""Widths of rounds that stay on the device, each of which is captured as a whole: few, and with the anchor's row no row is padding."""


@dataclass(frozen=True, slots=True)
class WidthAsk:
    """One request that may speculate in the next step.

    Attributes:
        request_id: whose. most: drafts that its step can verify (>= 1).
        confidence: for each of its drafts, once there are some, the probability that the target says it if it said those before; () where
            the drafter has no opinion.
    """

    request_id: int
    most: int
    confidence: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """drafts: at most so many. why: one clause for the trace. rest: rounds after this one that have none either, whatever they bring: their
    steps can begin before the step ahead has ended, and the controller is not asked."""

    drafts: int
    why: str
    rest: int = 0


class Costs(Protocol):
    """Seconds as measured on this engine. None where nothing like it was measured yet."""

    def step(self, rows: int) -> float | None:
        """Of a step of so many rows; steps that are padded to one shape cost the same."""
        ...

    def staircase(self, rows: int, count: int) -> list[float | None]:
        """The same of so many numbers of rows, from `rows` on."""
        ...

    def draft(self, drafter: str, requests: int, width: int | None = None) -> float | None:
        """Of one call of a drafter for so many requests, the widest of which asks for `width` drafts; None: for any number."""
        ...


class Controller(Protocol):
    """Chooses for all speculating requests of a step at once. What it keeps per request, it keeps between `begin` and `end`."""

    name: str

    def begin(self, request_id: int, drafter: str) -> None:
        """A request that speculates starts."""
        ...

    def ask(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        """Before drafting: how many drafts each drafter is asked for; 0 leaves the request to decode plainly.

        other_rows: rows of the step beside one row for each of these requests.
        """
        ...

    def ask_ahead(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        """The same for rounds that go from drafter to target on the device: before the round ahead of this one is observed, and nothing is
        kept back of what is asked for. costs: steps with all that they draft."""
        ...

    def keep(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        """After drafting, `most` now being the drafts that there are: how many of each are verified. The rest is forgotten."""
        ...

    def observe(self, request_id: int, drafted: int, accepted: int, seconds: float) -> None:
        """After a commit: drafts that were verified and that were accepted, and the seconds of the whole round, drafting included; also
        for rounds of a speculating request without drafts."""
        ...

    def end(self, request_id: int) -> None:
        """The request is over; forget it."""
        ...


def make(name: str, rollback: int | None = None) -> Controller:
    """The controller of that name, for all requests of one engine that ask for it.

    rollback: drafts that can be taken back without a replay, for those that mind; None where any number can.
    """
    from power_lab.engine.speculation.width.adaptive import AdaptiveController
    from power_lab.engine.speculation.width.cost import CostController
    from power_lab.engine.speculation.width.fixed import FixedController
    from power_lab.engine.speculation.width.governor import GovernorController

    known: dict[str, Callable[[], Controller]] = {
        "cost": CostController,
        "adaptive": partial(AdaptiveController, rollback=rollback),
        "governor": GovernorController,
        "fixed": partial(FixedController, rollback),
    }
    return known[name]()
