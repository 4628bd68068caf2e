"""A caller's hold on a submitted request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from power_lab.engine.live import Live
from power_lab.engine.trace import RunRecord

if TYPE_CHECKING:
    from power_lab.engine.engine import Engine


class Ticket:
    """A submitted request: wait for it or cancel it."""

    def __init__(self, engine: Engine, live: Live) -> None:
        self._engine = engine
        self._live = live

    @property
    def id(self) -> int:
        return self._live.request.id

    def cancel(self) -> None:
        """End the request at the next step boundary."""
        self._engine.cancel(self.id)

    def result(self, timeout: float | None = None) -> RunRecord:
        """The finished record, whatever the finish.

        Raises TimeoutError after `timeout` seconds (the request goes on), PowerLabError in a callback of a step that would wait for itself.
        """
        if not self._engine.drive(self._live.done, timeout):
            raise TimeoutError(f"Request {self.id} is not done after {timeout} s; it goes on.")
        assert self._live.record is not None, "done is set after the record"
        return self._live.record
