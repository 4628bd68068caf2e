"""Critical sections that a Ctrl-C may not cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None


class Interrupts:
    """Holds SIGINT back in sections, and delivers it behind them.

    Signals arrive on the main thread alone, so on others this does nothing. Setting a handler costs as much as all else of a short section:
    code with many of them, such as an engine's steps, sets it once around them with `watching`.
    """

    def __init__(self) -> None:
        self._section = _Section(self)
        self._sections = 0
        self._watching = False
        self._handler: Handler = None  # in whose place ours is
        self._own: AbstractContextManager[None] | None = None  # of a section that nobody set a handler around
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

    def held(self) -> AbstractContextManager[None]:
        """A section. They nest."""
        return self._section

    def _enter(self) -> None:
        if self._watching:
            self._sections += 1
            return
        own = self.watching()
        own.__enter__()
        try:
            self._own = own
            self._sections += 1
        except BaseException:  # a signal between the two
            self._own = None
            own.__exit__(None, None, None)
            raise

    def _exit(self) -> None:
        try:
            self._sections -= 1
            if self._held and not self._sections:
                self._deliver()
        finally:
            if self._own is not None and not self._sections:
                own, self._own = self._own, None
                own.__exit__(None, None, None)

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


class _Section:
    """Entered and left ten times a step: as a class it takes a third of what a generator does."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def __enter__(self) -> None:
        if _main():
            self._interrupts._enter()

    def __exit__(self, *_: object) -> None:
        if _main():
            self._interrupts._exit()


class Critical:
    """Where state moves and callers' functions are called: a Ctrl-C waits, and the lock is held."""

    def __init__(self, lock: threading.RLock, interrupts: Interrupts) -> None:
        self._lock, self._held = lock, interrupts.held()
        self._thread: int | None = None

    @property
    def inside(self) -> bool:
        """Whether this thread is in it."""
        return self._thread == threading.get_ident()

    def __enter__(self) -> None:
        self._held.__enter__()  # first: a signal behind the lock would leave it taken
        self._lock.acquire()
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._thread = None
        self._lock.release()
        self._held.__exit__(None, None, None)


def _main() -> bool:
    return threading.get_ident() == threading.main_thread().ident
