"""A real kernel process, driven as a front end does."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

from jupyter_client.manager import KernelManager

from tests import hosting
from tests.hosting import HANG_S, Home, eventually


class Outcome(NamedTuple):
    """What a cell left: status, error name, the outputs as a notebook would keep them, and how many updates came."""

    status: str
    error: str
    outputs: list[dict[str, Any]]
    updates: int

    @property
    def text(self) -> str:
        return "".join(_text(output) for output in self.outputs)


class Kernel:
    def __init__(self, manager: KernelManager, home: Home, cwd: Path, extra: dict[str, str] | None = None) -> None:
        self.manager, self.home = manager, home
        environment = {
            **os.environ,
            "POWER_LAB_HOME": str(home.root),
            "PYTHONWARNINGS": "",
            "IPYTHONDIR": str(cwd / "ipython"),
            **(extra or {}),
        }
        environment.pop("JPY_SESSION_NAME", None)
        self.log = (cwd / f"kernel-{id(self)}.log").open("w+b")
        manager.start_kernel(env=environment, cwd=str(cwd), stdout=self.log, stderr=self.log)
        self._connect()

    def _connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=HANG_S)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid  # type: ignore[union-attr]

    def use_fake(self) -> None:
        done = self.run(
            "from power_lab.engine.config import HostSettings; from power_lab.lab import Lab\n"
            f"lab = Lab(settings=HostSettings(factory={hosting.FACTORY!r}, client='nb-{self.pid}'))"
        )
        assert done.status == "ok", done

    def run(self, code: str) -> Outcome:
        outputs: list[dict[str, Any]] = []
        shown: dict[str, dict[str, Any]] = {}
        updates = 0

        def hook(message: dict[str, Any]) -> None:
            nonlocal updates
            kind, content = message["msg_type"], message["content"]
            name = content.get("transient", {}).get("display_id")
            if kind == "update_display_data":
                updates += 1
                shown[name]["data"] = content["data"]
            elif kind in ("stream", "display_data", "execute_result", "error"):
                outputs.append({"kind": kind, **content})
                if name:
                    shown[name] = outputs[-1]

        reply = self.client.execute_interactive(code, output_hook=hook, timeout=HANG_S * 2, allow_stdin=False)
        return Outcome(reply["content"]["status"], reply["content"].get("ename", ""), outputs, updates)

    def interrupted(self, code: str, when: Any) -> Outcome:
        """Run `code` and press Stop as soon as `when()` holds."""

        def press() -> None:
            eventually(when)
            os.killpg(
                self.pid, signal.SIGINT
            )  # what a kernel manager does; its own call needs an event loop in each thread

        thread = threading.Thread(target=press)
        thread.start()
        try:
            return self.run(code)
        finally:
            thread.join(HANG_S)

    def restart(self, *, now: bool = False) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=now)
        self._connect()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self.manager.context.destroy(linger=0)
        self.log.close()


def _text(output: dict[str, Any]) -> str:
    if output["kind"] == "error":
        return f"{output['ename']}: {output['evalue']}"
    return output.get("text") or output["data"].get("text/plain", "")
