"""What the kernel answers for itself, whatever the cell does: on the control channel (`power_lab_request`) and on a comm of its own.

The comm's target is `power_lab.engine`. A request is `{"method": "state" | "cancel", "id": anything}`; the reply carries the id and the
state after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from power_lab.jupyter.cancel import Tokens

METHODS = ("state", "cancel")


class Service:
    """The state of a kernel: whether a cell runs, since when, and whether widgets are answered meanwhile.

    Args:
        shell: the IPython shell, whose events tell when cells begin and end.
        routing: why widgets have to wait for cells; empty when they have not.
    """

    def __init__(self, shell: Any, tokens: Tokens, routing: Callable[[], str]) -> None:
        self._shell, self._tokens, self._routing = shell, tokens, routing
        self._since: float | None = None
        shell.events.register("pre_run_cell", self._begin)
        shell.events.register("post_run_cell", self._end)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply. An unknown method is an error that names it; what is asked changes nothing else."""
        method = request.get("method", "state")
        reply: dict[str, Any] = {"id": request.get("id")}
        if method not in METHODS:
            return {
                **reply,
                "status": "error",
                "evalue": f"method {str(method)[:40]!r} is none of {', '.join(METHODS)}",
            }
        if method == "cancel":
            reply["cancelled"] = self._tokens.cancel_all()
        return {**reply, "status": "ok", **self.state()}

    def state(self) -> dict[str, Any]:
        """`busy`, `since` (unix seconds, None while idle), `execution_count`, `handlers` at work, `waits`: see `routing`."""
        since = self._since
        return {
            "busy": since is not None,
            "since": since,
            "execution_count": self._shell.execution_count,
            "handlers": len(self._tokens),
            "waits": self._routing(),
        }

    def comm_opened(self, comm: Any, message: dict[str, Any]) -> None:
        """A page opened `power_lab.engine`."""

        @comm.on_msg
        def asked(message: dict[str, Any]) -> None:
            data = message["content"].get("data")
            comm.send(self.answer(data if isinstance(data, dict) else {}))

        comm.send({"id": None, "status": "ok", **self.state()})

    def _begin(self, info: Any = None) -> None:
        self._since = time.time()

    def _end(self, result: Any = None) -> None:
        self._since = None
