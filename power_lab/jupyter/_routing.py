"""Answers while a cell runs: comms of Power Lab on a subshell of their own, and a reload's first questions answered at once.

ipykernel has subshells (JEP 91), but puts a message back behind the running cell in the cases that matter here: a comm that was last
published on from the main thread, a front end that names no subshell, and everything that a page asks when it loads. What stands here
changes the way of those messages and nothing else. It leans on private names of ipykernel, so it is an improvement that can be absent:
when one of them is missing the kernel is a stock one, and `%lab status` and `power-lab doctor` say so.

Handlers then run beside the cell, on another thread: they may put work into queues, and must not touch the user's variables or pyplot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ipykernel.comm.comm import BaseComm
from ipykernel.kernelbase import Kernel
from ipykernel.shellchannel import ShellChannelThread
from ipykernel.subshell_manager import SubshellManager

from power_lab.jupyter._leases import Leases

CONTROL_TARGET = "jupyter.widget.control"
ENGINE_TARGET = "power_lab.engine"
SERVICE_TARGETS = frozenset({CONTROL_TARGET, ENGINE_TARGET})
"""Comms that a page opens to ask questions; their handlers run no user code."""

FAST = frozenset({"kernel_info_request", "comm_info_request"})
SUBSHELL_CAP = 16
"""Each page load asks for about two subshells and never gives them back; one costs a thread and seven file descriptors."""

_COMMS = frozenset({"comm_open", "comm_msg", "comm_close"})
_NAMES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Kernel, ("shell_channel_thread_main", "comm_info_request", "kernel_info_request", "create_subshell_request")),
    (Kernel, ("delete_subshell_request", "_supports_kernel_subshells", "_topic", "shell_stream", "iopub_socket")),
    (ShellChannelThread, ("manager",)),
    (SubshellManager, ("_create_subshell", "get_shell_channel_to_subshell_socket", "list_subshell")),
    (BaseComm, ("_reply_subshell_for",)),
)


def missing() -> list[str]:
    """What this ipykernel lacks of the names that are used here."""
    return [f"{owner.__name__}.{name}" for owner, names in _NAMES for name in names if not hasattr(owner, name)]


class Routing:
    """The routes of one kernel. `divert` runs on the thread of the shell channel, the requests for subshells on that of control."""

    def __init__(self, kernel: Any, leases: Leases) -> None:
        self._kernel = kernel
        self._leases = leases
        self._subshell: str | None = None
        self._subshells = Subshells()
        self.failure = ""

    @staticmethod
    def follow_front_end() -> None:
        """Deliver a comm's message where the front end sent it, not where the kernel last published from. For the whole process."""

        def reply_subshell_for(self: Any, data: Any, default: Any) -> Any:
            return default

        BaseComm._reply_subshell_for = reply_subshell_for

    def divert(self, frames: list[Any]) -> bool:
        """Answer or pass on a message of the shell channel; False leaves it to ipykernel, untouched."""
        session = self._kernel.session
        idents, parts = session.feed_identities(frames, copy=False)
        seen = session.deserialize(parts, content=False, copy=False)  # a look keeps no digest, so it can be read again
        kind = seen["header"]["msg_type"]
        if kind in FAST:
            return self._answer(kind, idents, parts, seen["header"])
        if kind in _COMMS:
            return self._serve(kind, idents, parts, seen)
        return False

    def _answer(self, kind: str, idents: list[Any], parts: list[Any], header: dict[str, Any]) -> bool:
        """A question that a page asks when it loads, and that needs nothing of the main thread.

        Also while no cell runs: one may be on its way to the main thread, and the question would wait behind it.
        """
        kernel = self._kernel
        if header.get("subshell_id"):
            return False
        request = kernel.session.deserialize(parts, content=True, copy=False)
        self._state("busy", request)
        content = _info(kernel) if kind == "kernel_info_request" else _comms(kernel, request["content"])
        kernel.session.send(kernel.shell_stream, kind.replace("request", "reply"), content, request, idents)
        self._state("idle", request)
        return True

    def _state(self, state: str, parent: dict[str, Any]) -> None:
        kernel = self._kernel
        status = {"execution_state": state}
        kernel.session.send(kernel.iopub_socket, "status", status, parent=parent, ident=kernel._topic("status"))

    def _serve(self, kind: str, idents: list[Any], parts: list[Any], seen: dict[str, Any]) -> bool:
        """A comm of ours goes to the service subshell."""
        kernel = self._kernel
        content = kernel.session.unpack(seen["content"])
        comm = content.get("comm_id")
        if kind == "comm_open":
            if content.get("target_name") not in SERVICE_TARGETS:
                return False
            self._leases.begin(comm, content["target_name"])
            self.sweep()
        elif not self._leases.touch(comm) and not _answers(kernel, comm, seen["header"]):
            return False
        if kind == "comm_close":
            self._leases.end(comm)
        message = kernel.session.deserialize(parts, content=True, copy=False)
        message["header"]["subshell_id"] = subshell = self._service()
        wire = [*kernel.session.serialize(message, ident=idents), *(message.get("buffers") or ())]
        kernel.shell_channel_thread.manager.get_shell_channel_to_subshell_socket(subshell).send_multipart(wire)
        return True

    def sweep(self) -> None:
        """Drop comms whose pages are gone."""
        comms = self._kernel.comm_manager.comms
        for key in self._leases.expired():
            if (comm := comms.get(key)) is not None:
                comm.close()  # tells a page that is there after all

    def _service(self) -> str:
        manager = self._kernel.shell_channel_thread.manager
        subshell = self._subshell
        if subshell is None or subshell not in manager.list_subshell():
            self._subshell = subshell = str(manager._create_subshell())
        return subshell

    # --- subshells that front ends ask for ----------------------------------------------------------------------------------------

    def lend(self) -> str | None:
        """An existing subshell where there are enough, else None."""
        return self._subshells.lend(self._kernel.shell_channel_thread.manager.list_subshell(), self._subshell)

    def given_back(self, subshell: str) -> bool:
        """A front end deletes one; whether nobody else has it."""
        return self._subshells.give_back(subshell)


class Subshells:
    """Who has which subshell, as counts: pages that share one must not end it for each other."""

    def __init__(self, cap: int = SUBSHELL_CAP) -> None:
        self._cap = cap
        self._count: dict[str, int] = {}  # of those that are shared

    def lend(self, there: Iterable[str], service: str | None) -> str | None:
        """The least shared one when the cap is reached."""
        free = [subshell for subshell in there if subshell != service]
        if len(free) < self._cap:
            return None
        chosen = min(free, key=lambda subshell: self._count.get(subshell, 1))
        self._count[chosen] = self._count.get(chosen, 1) + 1
        return chosen

    def give_back(self, subshell: str) -> bool:
        """One front end less; whether it was the last."""
        left = self._count.pop(subshell, 1) - 1
        if left > 0:
            self._count[subshell] = left
        return left <= 0


class ServedKernel:
    """Mixed into an IPythonKernel, before it. With `routing` None it is a stock kernel."""

    routing: Routing | None = None
    routing_absent = ""

    def start(self) -> None:
        absent = missing()
        if not getattr(self, "_supports_kernel_subshells", False):
            absent.append("subshells (this kernel has none)")
        if absent:
            self.routing_absent = ", ".join(absent)
        else:
            self.leases = Leases()
            self.routing = Routing(self, self.leases)
            Routing.follow_front_end()
        super().start()  # type: ignore[misc]

    async def shell_channel_thread_main(self, msg: list[Any]) -> None:
        if self.routing is not None:
            try:
                if self.routing.divert(msg):
                    return
            except Exception as error:  # noqa: BLE001 - whatever it is, ipykernel's own way is still there
                self._routing_failed(error)
        await super().shell_channel_thread_main(msg)  # type: ignore[misc]

    def _routing_failed(self, error: Exception) -> None:
        assert self.routing is not None
        if not self.routing.failure:
            self.log.warning("a message could not be routed past the cell", exc_info=True)  # type: ignore[attr-defined]
        self.routing.failure = f"{type(error).__name__}: {error}"

    async def create_subshell_request(self, socket: Any, ident: Any, parent: Any) -> None:
        """Beyond the cap, front ends share."""
        if self.routing is not None and (shared := self.routing.lend()) is not None:
            reply = {"status": "ok", "subshell_id": shared}
            self.session.send(socket, "create_subshell_reply", reply, parent, ident)  # type: ignore[attr-defined]
            return
        await super().create_subshell_request(socket, ident, parent)  # type: ignore[misc]

    async def delete_subshell_request(self, socket: Any, ident: Any, parent: Any) -> None:
        subshell = parent.get("content", {}).get("subshell_id")
        if self.routing is not None and isinstance(subshell, str) and not self.routing.given_back(subshell):
            self.session.send(socket, "delete_subshell_reply", {"status": "ok"}, parent, ident)  # type: ignore[attr-defined]
            return
        await super().delete_subshell_request(socket, ident, parent)  # type: ignore[misc]


def _info(kernel: Any) -> dict[str, Any]:
    return {"status": "ok", **kernel.kernel_info}


def _comms(kernel: Any, content: dict[str, Any]) -> dict[str, Any]:
    wanted = content.get("target_name")
    there = dict(kernel.comm_manager.comms)  # the cell may be making more
    comms = {
        key: {"target_name": comm.target_name} for key, comm in there.items() if wanted in (None, comm.target_name)
    }
    return {"status": "ok", "comms": comms}


def _answers(kernel: Any, comm: Any, header: dict[str, Any]) -> bool:
    """Whether a message belongs to a widget that says `answers_while_busy`, from a front end that chose no subshell."""
    if header.get("subshell_id"):
        return False
    found = kernel.comm_manager.comms.get(comm)
    owner = getattr(getattr(found, "_msg_callback", None), "__self__", None)
    return bool(getattr(owner, "answers_while_busy", False))
