"""Critical sections that a Ctrl-C may not cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None


class Interrupts:
    """Holds SIGINT back in sections, and delivers it behind them.

    Signals arrive on the main thread alone, so on others this does nothing. Setting a handler costs as much as all else of a short section:
    code with many of them, such as an engine's step, sets it once around them with `watching`.
    """

    def __init__(self) -> None:
        self._sections = 0
        self._watching = False
        self._handler: Handler = None  # in whose place ours is
        self._held: list[tuple[int, FrameType | None]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """One handler for all sections within; between them a signal is delivered at once."""
        if not _main():
            yield
            return
        before = signal.getsignal(signal.SIGINT)
        if before != self._arrived:  # as it may be where a signal came in just these lines
            self._handler = before
        try:
            signal.signal(signal.SIGINT, self._arrived)
            self._watching = True
            yield
        finally:
            self._watching = False
            signal.signal(signal.SIGINT, self._handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A section. They nest."""
        if not _main():
            yield
        elif self._watching:
            self._sections += 1
            try:
                yield
            finally:
                self._sections -= 1
                if self._held and not self._sections:
                    self._deliver()
        else:
            with self.watching(), self.held():
                yield

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))
        if not self._sections:
            self._deliver()

    def _deliver(self) -> None:
        held, self._held = self._held[0], []
        if callable(self._handler):
            self._handler(*held)
        elif self._handler == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)


def _main() -> bool:
    return threading.get_ident() == threading.main_thread().ident
