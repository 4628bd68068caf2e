"""Engine hosts for tests: real processes with the fake engine, in a directory of their own, and none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from power_lab.engine.config import EngineConfig, HostSettings, Paths
from power_lab.engine.host.client import HostClient
from power_lab.engine.host.remote import RemoteEngine
from power_lab.errors import PowerLabError

FACTORY = f"{Path(__file__).parent / 'engine' / 'host' / 'fake_engine.py'}:FakeEngine"
HANG_S = 30.0  # a guard, not an expectation


class Home:
    """One POWER_LAB_HOME and the clients made in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = Paths(root / "cache", root / "run", root / "state")
        self.settings = HostSettings(factory=FACTORY, client="test", drain_s=5)
        self._clients: list[HostClient] = []

    def client(self, **changes: object) -> HostClient:
        settings = HostSettings(**{**_fields(self.settings), **changes})  # type: ignore[arg-type]
        client = HostClient.connect(self.paths, settings)
        self._clients.append(client)
        return client

    def engine(self, client: HostClient | None = None, model: str = "fake", **settings: object) -> RemoteEngine:
        client = client or self.client()
        return RemoteEngine(client, client.load(EngineConfig(model=model, **settings)))  # type: ignore[arg-type]

    @property
    def log(self) -> str:
        return (self.paths.state / "host.log").read_text()

    def hosts(self) -> list[psutil.Process]:
        """The host processes of this home."""
        return [process for process in _processes() if str(self.paths.state) in process.cmdline()]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for process in self.hosts():
            with suppress(psutil.NoSuchProcess):
                process.kill()
                process.wait(HANG_S)


@contextmanager
def home(root: Path) -> Iterator[Home]:
    made = Home(root)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def beside(home: Home, held: str, then: str) -> Iterator[subprocess.Popen[str]]:
    """Another process in this home, with pipes as input and output. It has done `held` when this begins, and goes on with `then`."""
    code = (
        "import sys; from pathlib import Path; from tests import hosting; home = hosting.Home(Path(sys.argv[1]))\n"
        f"{held}\nprint('ready', flush=True)\n{then}"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(home.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


LOAD = "from power_lab.lab import connect; lab = connect(paths=home.paths, settings=home.settings).load('fake')"
"""What another process may hold: the fake engine, as a lab."""


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a condition; a hang is a failure."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "this never became true"
        time.sleep(0.01)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: ended(pid))


def ended(pid: int) -> bool:
    """Whether a process is gone, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def raises(kind: type[PowerLabError], call: Callable[[], object]) -> PowerLabError:
    """The error of exactly this class that `call` raises."""
    try:
        call()
    except PowerLabError as error:
        assert type(error) is kind, repr(error)
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def _processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if "power_lab.engine.host" in process.cmdline():
                yield process
        except psutil.Error:
            continue


def _fields(settings: HostSettings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}
