"""The host's rotating log. It holds lifecycle and errors, never prompts, outputs or secrets."""

from __future__ import annotations

import io
import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

from power_lab.engine.config import Paths

NAME = "power_lab.host"
_BYTES, _KEPT = 1 << 20, 3


def log_path(paths: Paths) -> Path:
    """The file that errors point to."""
    return paths.state / "host.log"


class HostLog(RotatingFileHandler):
    """Also carries the process's stdout and stderr (native crash messages), across rotations."""

    def _open(self) -> io.TextIOWrapper:
        stream = super()._open()
        Path(self.baseFilename).chmod(0o600)
        for standard in (1, 2):
            os.dup2(stream.fileno(), standard)
        return stream


def open_log(paths: Paths) -> logging.Logger:
    """Log to the state directory and send stdout and stderr there too."""
    paths.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = HostLog(log_path(paths), maxBytes=_BYTES, backupCount=_KEPT, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    log = logging.getLogger(NAME)
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    return log


def where(error: BaseException) -> str:
    """Type and place of an error without its message, which may quote a prompt."""
    frames: list[str] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return f"{type(error).__name__} at {' > '.join(frames)}"
