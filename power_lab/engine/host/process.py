"""Starting and finding the engine host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from power_lab.engine.config import HostSettings, Paths, child_environment
from power_lab.engine.host.log import log_path
from power_lab.engine.host.place import ENDING_S, Place, dial, peer
from power_lab.errors import HostUnavailable

START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 60.0
_ROOT = Path(__file__).parents[3]


def reach(paths: Paths, settings: HostSettings) -> socket.socket:
    """Connect to the host, starting one when there is none. Clients that do this at once end up at the same host.

    Raises HostUnavailable with everything that the host wrote when it failed to start.
    """
    place = Place.of(paths)
    starting: Starting | None = None
    patience = START_TIMEOUT_S + settings.drain_s + ENDING_S  # another host may be ending
    deadline = time.monotonic() + patience
    while True:
        sock = dial(place)
        if sock is not None:
            _same_user(sock)
            return sock
        if starting is None or starting.yielded:
            starting = Starting(paths, place, settings)
        starting.check()
        if time.monotonic() > deadline:
            raise HostUnavailable(
                f"The engine host did not answer in {patience:.0f} s.", f"Its log is {log_path(paths)}."
            )
        time.sleep(0.01)


def find(paths: Paths) -> socket.socket | None:
    """Connect to a host that is there, or None."""
    sock = dial(Place.of(paths))
    if sock is not None:
        _same_user(sock)
    return sock


def _same_user(sock: socket.socket) -> None:
    pid, uid = peer(sock)
    if uid != os.geteuid():
        sock.close()
        raise HostUnavailable(
            f"The process {pid} at the engine socket belongs to user {uid}.", "Remove its runtime folder."
        )


def end(pid: int) -> None:
    """Ask a host to end after its running requests, and wait for that. Raises HostUnavailable when it does not."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    wait_for_end(pid)


def wait_for_end(pid: int, timeout: float = END_TIMEOUT_S) -> None:
    """Wait until a host process is gone. Raises HostUnavailable after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while _alive(pid):
        if time.monotonic() > deadline:
            raise HostUnavailable(
                f"The engine host (pid {pid}) did not end in {timeout:.0f} s.", f"End it with: kill -9 {pid}"
            )
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # a dead child of ours that is not reaped yet
    except psutil.NoSuchProcess:
        return False


class Starting:
    """A host process that was started and does not serve yet."""

    def __init__(self, paths: Paths, place: Place, settings: HostSettings) -> None:
        self._log = log_path(paths)
        try:
            paths.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=paths.state, prefix="start-", suffix=".err")
        except OSError as error:
            raise HostUnavailable(
                f"The engine host's log cannot be in {paths.state}: {error.strerror}.",
                "Free some space, give that folder to your user, or set POWER_LAB_HOME to a local folder of your own.",
            ) from None
        self._startup = Path(name)
        with open(number, "wb") as output:
            self._process = subprocess.Popen(
                _command(paths, place, settings, self._startup),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=child_environment(_ROOT),
                cwd="/",
            )
        # Waits for the host's end, whenever that is, so that no zombie stays and no Popen object is dropped unfinished.
        threading.Thread(target=self._process.wait, name="host-end", daemon=True).start()

    @property
    def yielded(self) -> bool:
        """It left because another host serves."""
        return self._process.returncode == 0

    def check(self) -> None:
        """Raises HostUnavailable when the process has ended with an error."""
        code = self._process.returncode
        if code is None:
            return
        if code:
            said = self._startup.read_text(encoding="utf-8", errors="replace").strip()
            self._startup.unlink(missing_ok=True)
            raise HostUnavailable(
                f"The engine host ended with status {code} while starting:\n{said or '(it wrote nothing)'}\n",
                f"Its log is {self._log}.",
            )


def _command(paths: Paths, place: Place, settings: HostSettings, startup: Path) -> list[str]:
    command = [sys.executable, "-P", "-m", "power_lab.engine.host", "--startup", str(startup)]
    command += ["--cache", str(paths.cache), "--runtime", str(place.folder), "--state", str(paths.state)]
    command += [
        "--idle-s",
        str(settings.idle_s),
        "--linger-s",
        str(settings.linger_s),
        "--drain-s",
        str(settings.drain_s),
    ]
    return [*command, "--factory", settings.factory] if settings.factory else command
