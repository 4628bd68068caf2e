"""As wide as the request asks, in every round."""

from __future__ import annotations

from collections.abc import Sequence

from power_lab.engine.speculation.width import Choice, Costs, WidthAsk


class FixedController:
    """Verifies all drafts that there is room for.

    With a rollback window it keeps A3S Power's replay guard: the first round that rejects more drafts than can be rolled back narrows the
    request to the window for the rest of its life, so that it pays for one replay at most.

    Args:
        rollback: drafts that can be taken back without a replay; None where any number can, as with paged KV.
    """

    name = "fixed"

    def __init__(self, rollback: int | None = None) -> None:
        self._rollback = rollback
        self._guarded: dict[int, bool] = {}

    def begin(self, request_id: int, drafter: str) -> None:
        self._guarded[request_id] = False

    def ask(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        return [self._choose(ask) for ask in asks]

    def ask_ahead(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        return self.ask(asks, other_rows, costs)

    def keep(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        return [self._choose(ask) for ask in asks]

    def observe(self, request_id: int, drafted: int, accepted: int, seconds: float) -> None:
        if self._rollback is not None and drafted - accepted > self._rollback:
            self._guarded[request_id] = True

    def end(self, request_id: int) -> None:
        self._guarded.pop(request_id, None)

    def _choose(self, ask: WidthAsk) -> Choice:
        if self._rollback is not None and self._guarded[ask.request_id]:
            drafts = min(ask.most, self._rollback)
            return Choice(drafts, f"{drafts}: more than {self._rollback} drafts were rejected at once before")
        return Choice(ask.most, f"{ask.most}: fixed")
