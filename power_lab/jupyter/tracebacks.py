"""Errors of ours end where the notebook calls us: what lies below is not the user's, and hides the sentence that says what to do."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import power_lab
from power_lab.errors import PowerLabError

_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OURS = (str(Path(power_lab.__file__).parent), *_INSTALLED)


def shorten(shell: Any) -> None:
    """Show a PowerLabError with the frames of notebook and user's files alone. `%tb` shows all of them, `%debug` enters them."""
    shell.set_custom_exc((PowerLabError,), _show)


def _show(
    shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType, tb_offset: int | None = None
) -> list[str]:
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
    lines = shell.InteractiveTB.structured_traceback(kind, error, _until_us(trace), tb_offset=tb_offset)
    shell._showtraceback(kind, error, lines)
    return lines


def _until_us(trace: TracebackType) -> TracebackType:
    """The same, up to the last frame of the user's; whole where there is none."""
    frames = list(_frames(trace))
    users = [at for at, one in enumerate(frames) if not one.tb_frame.f_code.co_filename.startswith(_OURS)]
    kept: TracebackType | None = None
    for one in reversed(frames[: users[-1] + 1] if users else frames):
        kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    assert kept is not None, "an exception that was caught has a frame"
    return kept


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
