"""Start JupyterLab on the tour: loopback only, a token always, a free port, the Power Lab kernel chosen."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import msgspec

import power_lab
from power_lab.engine.config import Paths
from power_lab.errors import PowerLabError
from power_lab.notebook import KERNEL

TOUR = "tour.ipynb"
COPIES = "power-lab-notebooks"
"""Folder that the notebooks are copied to for readers who have no checkout."""

_START_S = 60.0
_STOP_S = 15.0


class LabServer(msgspec.Struct, frozen=True, kw_only=True):
    """A JupyterLab that is up.

    Attributes:
        url: the address with the token, opening `notebook`.
        folder: JupyterLab's root folder.
        log: where the server writes.
    """

    url: str
    pid: int
    folder: str
    notebook: str
    log: str


class _ServerFile(msgspec.Struct):
    """What a Jupyter server writes about itself, readable by its user only."""

    url: str
    token: str
    password: bool


def tour_at(folder: Path | None) -> tuple[Path, Path]:
    """(JupyterLab's root folder, the tour's path below it).

    In a checkout and with no folder asked for, the checkout's own notebooks are opened in place. Otherwise they are
    copied to `folder` (default: the working folder); a copy that is already there is the user's and stays as it is.
    """
    checkout = Path(power_lab.__file__).parents[1]
    own = checkout / "notebooks" / TOUR
    if folder is None and own.is_file():
        return checkout, own.relative_to(checkout)
    root = (folder or Path()).absolute()
    copies = root / COPIES
    try:
        for name, source in _shipped(own.parent).items():
            copy = copies / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists():
                shutil.copyfile(source, copy)
    except OSError as error:
        raise PowerLabError(f"{copies}: cannot be written: {error.strerror}.", "Give a folder of your own.") from None
    return root, Path(COPIES) / TOUR


def _shipped(checkout: Path) -> dict[Path, Path]:
    """The notebooks of this installation, the lessons in a folder of their own: path below `COPIES` -> file."""
    if checkout.is_dir():
        return {path.relative_to(checkout): path for path in sorted(checkout.rglob("*.ipynb")) if _is_ours(path)}
    shared, files = "share/power-lab/notebooks/", metadata.files("power-lab") or []
    return {
        Path(file.as_posix().split(shared, 1)[1]): Path(str(file.locate())).resolve()
        for file in sorted(files)
        if shared in file.as_posix()
    }


def _is_ours(path: Path) -> bool:
    """Not one of the copies that Jupyter keeps of a notebook that was opened."""
    return ".ipynb_checkpoints" not in path.parts


def command(root: Path, notebook: Path, port: int, browser: bool) -> list[str]:
    """The command that starts JupyterLab. The token is not in it: other users of the machine can read command lines."""
    from jupyter_core.paths import jupyter_config_path

    # Our defaults stand first on the path where Jupyter looks for them; the user's own settings still win.
    settings = Path(power_lab.__file__).parent / "jupyter" / "settings"
    options = [
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",  # 0: the system gives a free one
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/lab/tree/{quote(notebook.as_posix())}",
        f"--MultiKernelManager.default_kernel_name={KERNEL}",
        *([] if browser else ["--no-browser"]),
        *(["--allow-root"] if os.geteuid() == 0 else []),
    ]
    search = os.pathsep.join([str(settings), *jupyter_config_path()])
    # -P: no file of the working folder may pass for a module of the server.
    return ["/usr/bin/env", f"JUPYTER_CONFIG_PATH={search}", sys.executable, "-P", "-m", "jupyterlab", *options]


@contextmanager
def _token_file(folder: Path) -> Iterator[Path]:
    """A token for the server in a private file. One that the server drew would stand in its log, one in its environment in its kernels'."""
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix="token-") as file:
        file.write(secrets.token_hex(24))
        file.flush()
        yield Path(file.name)


def _open_log(paths: Paths) -> Path:
    """An empty log that only its user can read: what kernels print to their process lands there."""
    log = paths.state / "jupyterlab.log"
    try:
        paths.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One of an older version was readable to others. A server that still writes keeps its own.
        log.unlink(missing_ok=True)
        log.touch(mode=0o600)
    except OSError as error:
        raise PowerLabError(
            f"{log}: cannot be written: {error.strerror}.", "Set POWER_LAB_HOME to a folder of your own."
        ) from None
    return log


def serve(
    folder: Path | None,
    *,
    paths: Paths,
    port: int = 0,
    browser: bool = True,
    on_ready: Callable[[LabServer], None],
) -> int:
    """Run JupyterLab until it ends or this process is told to; returns its exit status.

    Args:
        on_ready: called once, when the server answers.

    Raises:
        PowerLabError: the log cannot be written, JupyterLab does not start, or the user's Jupyter settings turn its access control off.
    """
    root, notebook = tour_at(folder)
    log = _open_log(paths)
    with _stop_signals(), _token_file(paths.state) as token, log.open("wb") as sink:
        # A session of its own: Ctrl-C reaches us alone, and we end the server without its question on the terminal.
        server = subprocess.Popen(
            ["/usr/bin/env", f"JUPYTER_TOKEN_FILE={token}", *command(root, notebook, port, browser)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
        try:
            found = _wait_until_up(server, log)
            page = f"{found.url}lab/tree/{quote(notebook.as_posix())}"
            url = f"{page}?token={found.token}" if found.token else page
            on_ready(LabServer(url=url, pid=server.pid, folder=str(root), notebook=str(root / notebook), log=str(log)))
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            _stop(server)


def _wait_until_up(server: subprocess.Popen[bytes], log: Path) -> _ServerFile:
    from jupyter_core.paths import jupyter_runtime_dir

    described = Path(jupyter_runtime_dir()) / f"jpserver-{server.pid}.json"
    # What a killed server of the same number left, as in a container that is started again, is not this one's.
    described.unlink(missing_ok=True)
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise PowerLabError(
                f"JupyterLab ended at once (status {server.returncode}):\n{_tail(log)}", f"Its log: {log}"
            )
        try:
            found = msgspec.json.decode(described.read_bytes(), type=_ServerFile)
        except (FileNotFoundError, msgspec.DecodeError):  # not there yet, or half written
            time.sleep(0.05)
            continue
        if not found.token and not found.password:
            raise PowerLabError(
                "Your Jupyter settings turn off token and password: anyone on this machine could run code as you.",
                "Remove `token = ''` from your jupyter_server_config.",
            )
        return found
    raise PowerLabError(f"JupyterLab did not start within {_START_S:g} s:\n{_tail(log)}", f"Its log: {log}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ask, wait, insist. JupyterLab ends its kernels on SIGTERM."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(_STOP_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            server.kill()
            server.wait()


@contextmanager
def _stop_signals() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the server as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
