"""Cancel tokens for widget handlers. Stop interrupts the cell on the main thread and nothing else, so what runs beside it asks a token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from power_lab.errors import RequestCancelled


class CancelToken:
    """Says whether somebody wants this piece of work to end.

    Attributes:
        superseded: whether it is to end for a later work of its name, so that nobody waits for it.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.superseded = False

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        """Ask for the end. The work ends where it looks next."""
        self._event.set()

    def check(self) -> None:
        """Raises RequestCancelled when the end was asked for."""
        if self.cancelled:
            raise RequestCancelled("The handler was cancelled.")

    def wait(self, seconds: float) -> bool:
        """Sleep, but no longer than to the cancel; whether that came."""
        return self._event.wait(seconds)


class Tokens:
    """The handlers at work in a kernel. Thread-safe, and safe inside a signal handler."""

    def __init__(self) -> None:
        self._held: dict[
            CancelToken, str
        ] = {}  # changed by single dict operations only: a signal handler must wait for no lock

    def __len__(self) -> int:
        return len(self._held)

    @contextmanager
    def work(self, name: str = "") -> Iterator[CancelToken]:
        """A token for the work inside. With a name, a later work of that name cancels this one: only the newest matters to a slider."""
        if name:
            for token, other in tuple(self._held.items()):
                if other == name:
                    token.superseded = True
                    token.cancel()
        token = CancelToken()
        self._held[token] = name
        try:
            yield token
        finally:
            self._held.pop(token, None)

    def cancel_all(self) -> int:
        """Cancel every handler; how many there were."""
        tokens = tuple(self._held)
        for token in tokens:
            token.cancel()
        return len(tokens)


def tokens() -> Tokens:
    """Those of this kernel, which Stop and `power_lab_request` cancel; outside of a Power Lab kernel new ones that nobody else cancels."""
    from IPython.core.getipython import get_ipython

    found = getattr(getattr(get_ipython(), "kernel", None), "tokens", None)
    return found if isinstance(found, Tokens) else Tokens()
