"""The Power Lab kernel: an IPython kernel in which `lab` is ready. The engine lives in its host, so restarts here are cheap."""

from __future__ import annotations

import sys

from ipykernel.ipkernel import IPythonKernel
from ipykernel.zmqshell import ZMQInteractiveShell
from tornado.ioloop import PeriodicCallback
from traitlets import Instance, Type, default

import power_lab
from power_lab.jupyter.magics import PowerLabMagics, add_completions
from power_lab.lab import Lab

TICK_MS = 100


class PowerLabShell(ZMQInteractiveShell):
    """IPython's shell with `lab`, also after `%reset`, and our magics."""

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


class PowerLabKernel(IPythonKernel):
    """IPython for Power Lab. Nothing is connected or loaded before a cell asks for it."""

    implementation = "power_lab"
    implementation_version = power_lab.__version__
    shell_class = Type(PowerLabShell)

    @property
    def banner(self) -> str:
        version = sys.version.split()[0]
        return f"Power Lab {power_lab.__version__}, Python {version}. `lab` is ready: lab.load(), %%generate, %lab."

    def start(self) -> None:
        """Start, with a tick: a cell that awaits is interrupted only when the event loop wakes (ipykernel#881)."""
        super().start()
        self._tick = PeriodicCallback(lambda: None, TICK_MS)
        self._tick.start()
