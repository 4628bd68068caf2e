"""How work on models is reported, and how processes take turns at it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from power_lab.errors import DownloadError

Report = Callable[[str, int, int], None]
"""Called as report(stage, done bytes, all bytes)."""

_LOCK_SECONDS = 3600.0


@contextmanager
def reporting(progress: Report | bool) -> Iterator[Report]:
    """A Report: the one given, a bar for True, silence for False."""
    if callable(progress):
        yield progress
        return
    if not progress:
        yield lambda stage, done, total: None
        return
    from tqdm.auto import tqdm  # a bar in terminals and in notebooks

    with tqdm(unit="B", unit_scale=True, unit_divisor=1024) as bar:

        def show(stage: str, done: int, total: int) -> None:
            if bar.desc.removesuffix(": ") != stage:
                bar.reset(total or None)
                bar.set_description(stage)
            bar.total = total or None
            bar.update(done - bar.n)

        yield show


@contextmanager
def locked(path: Path, report: Report) -> Iterator[None]:
    """One process at a time. The kernel releases the lock of a process that dies."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end = time.monotonic() + _LOCK_SECONDS
        while not _taken(descriptor):
            if time.monotonic() > end:
                raise DownloadError(f"Another process has held {path} for an hour.", "Look for it and end it.")
            report("waiting for another process", 0, 0)
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
