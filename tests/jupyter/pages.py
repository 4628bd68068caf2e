"""A front end of a real kernel that opens comms and asks for subshells, as JupyterLab's page does."""

from __future__ import annotations

import time
import uuid
from queue import Empty
from typing import Any

from tests.hosting import HANG_S
from tests.jupyter.kernels import Kernel

BUSY = "import time, pathlib\nend = time.monotonic() + 60\nwhile not pathlib.Path({stop!r}).exists() and time.monotonic() < end: {body}"


class Page:
    """A second client of a kernel: its own channels, so its own view of replies."""

    def __init__(self, kernel: Kernel) -> None:
        self.client = kernel.manager.blocking_client()
        self.client.start_channels()
        self.seen: list[dict[str, Any]] = []

    def close(self) -> None:
        self.client.stop_channels()

    def send(self, kind: str, content: dict[str, Any], subshell: str | None = None) -> str:
        """Send on the shell channel; the message's id."""
        message = self.client.session.msg(kind, content)
        if subshell:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def ask(self, kind: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """A request on the shell channel and its reply's content."""
        return self._reply(self.client.get_shell_msg, self.send(kind, content or {}))

    def control(self, kind: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """The same on the control channel."""
        message = self.client.session.msg(kind, content or {})
        self.client.control_channel.send(message)
        return self._reply(self.client.get_control_msg, message["header"]["msg_id"])

    def open_comm(self, target: str, subshell: str | None = None) -> str:
        comm = uuid.uuid4().hex
        self.send("comm_open", {"comm_id": comm, "target_name": target, "data": {}}, subshell)
        return comm

    def tell(self, comm: str, data: dict[str, Any], subshell: str | None = None) -> None:
        self.send("comm_msg", {"comm_id": comm, "data": data}, subshell)

    def heard(self, comm: str, timeout: float = HANG_S) -> dict[str, Any]:
        """Data of the next message on `comm`. Raises queue.Empty."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            message = self.client.get_iopub_msg(timeout=left)
            if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == comm:
                return message["content"]["data"]
        raise Empty

    def load(self, targets: int = 2) -> list[str]:
        """What a page asks when it loads or reloads: info, comms, subshells for its comm targets, the widget manager's comm."""
        assert self.ask("kernel_info_request")["status"] == "ok"
        assert self.ask("comm_info_request", {"target_name": "jupyter.widget"})["status"] == "ok"
        subshells = [self.control("create_subshell_request")["subshell_id"] for _ in range(targets)]
        self.open_comm("jupyter.widget.control", subshells[0])
        engine = self.open_comm("power_lab.engine", subshells[1 % targets])
        assert self.heard(engine)["status"] == "ok"
        return subshells

    @staticmethod
    def _reply(get: Any, parent: str) -> dict[str, Any]:
        while True:
            message = get(timeout=HANG_S)
            if message["parent_header"].get("msg_id") == parent:
                return message["content"]
