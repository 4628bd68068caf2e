"""The Power Lab kernel: an IPython kernel in which `lab` is ready. The engine lives in its host, so restarts here are cheap."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from ipykernel.zmqshell import ZMQInteractiveShell
from tornado.ioloop import PeriodicCallback
from traitlets import Instance, Type, default

import power_lab
from power_lab.engine.config import pages_served
from power_lab.jupyter import bokehjs
from power_lab.jupyter._routing import ENGINE_TARGET, ServedKernel
from power_lab.jupyter.cancel import Tokens
from power_lab.jupyter.magics import PowerLabMagics, add_completions
from power_lab.jupyter.service import Service
from power_lab.jupyter.tracebacks import shorten
from power_lab.lab import Lab

TICK_MS = 100
SWEEP_TICKS = 50
REMEMBERED = 4096
"""Messages that are kept in mind, so that none is taken twice. Jupyter's 65,536 are 10 MB: pages that show us say several a second."""


class PowerLabShell(ZMQInteractiveShell):
    """IPython's shell with `lab`, also after `%reset`, our magics, and our errors without our insides."""

    lab = Instance(Lab)

    @default("lab")
    def _default_lab(self) -> Lab:
        return Lab()

    def init_user_ns(self) -> None:
        super().init_user_ns()
        self.user_ns["lab"] = self.user_ns_hidden["lab"] = self.lab

    def init_magics(self) -> None:
        super().init_magics()
        self.register_magics(PowerLabMagics(self, self.lab))
        add_completions(self)
        shorten(self)


class PowerLabKernel(ServedKernel, IPythonKernel):
    """IPython for Power Lab. Nothing is connected or loaded before a cell asks for it."""

    implementation = "power_lab"
    implementation_version = power_lab.__version__
    shell_class = Type(PowerLabShell)
    control_msg_types = [*IPythonKernel.control_msg_types, "power_lab_request"]  # noqa: RUF012 - as in the base class

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tokens = Tokens()
        self.service = Service(self.shell, self.tokens, lambda: self.waits)
        self._ticks = 0

    @property
    def banner(self) -> str:
        version = sys.version.split()[0]
        return f"Power Lab {power_lab.__version__}, Python {version}. `lab` is ready: lab.load(), %%generate, %lab."

    @property
    def waits(self) -> str:
        """Why widgets have to wait for a running cell; empty when they have not."""
        if self.routing_absent:
            return f"this ipykernel lacks {self.routing_absent}"
        return self.routing.failure if self.routing is not None else ""

    def start(self) -> None:
        """Start, with a tick: a cell that awaits is interrupted only when the event loop wakes (ipykernel#881)."""
        super().start()
        session: Any = self.session
        session.digest_history_size = REMEMBERED
        self.comm_manager.register_target(ENGINE_TARGET, self.service.comm_opened)
        if pages_served():
            bokehjs.serve_from_server()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._stop)  # in force between cells; in them it is IPython's
        self._tick = PeriodicCallback(self._at_tick, TICK_MS)
        self._tick.start()

    async def power_lab_request(self, socket: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Answered on the control thread, so also while a cell runs; see service.py."""
        content = parent.get("content")
        reply = self.service.answer(content if isinstance(content, dict) else {})
        session: Any = self.session
        session.send(socket, "power_lab_reply", reply, parent, ident)

    def _stop(self, number: int, frame: Any) -> None:
        """Stop while no cell runs: end the handlers."""
        self.tokens.cancel_all()

    def _at_tick(self) -> None:
        self._ticks += 1
        if self.routing is not None and self._ticks % SWEEP_TICKS == 0:
            self.routing.sweep()
