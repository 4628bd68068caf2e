"""Comms that pages opened and left behind: a page that is reloaded or killed closes nothing. What is silent too long is dropped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

LEASE_S = {"power_lab.engine": 15.0, "jupyter.widget.control": 120.0}
"""Seconds without a message after which a comm of that target is dropped. A page of ours says something every 5 s."""

LEASE_CAP = 256
"""Comms that may be held at all; the one that was silent longest goes first."""


@dataclass(slots=True)
class _Lease:
    target: str
    heard: float


class Leases:
    """Who was heard when. Thread-safe: messages come on one thread, the sweep runs on another."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, _Lease] = {}

    def __len__(self) -> int:
        return len(self._held)

    def begin(self, comm: str, target: str) -> None:
        """A page opened `comm`."""
        with self._lock:
            self._held[comm] = _Lease(target, self._clock())

    def touch(self, comm: str) -> bool:
        """A message came on `comm`; False when it is none of ours."""
        with self._lock:
            lease = self._held.get(comm)
            if lease is None:
                return False
            lease.heard = self._clock()
            return True

    def end(self, comm: str) -> None:
        """It was closed."""
        with self._lock:
            self._held.pop(comm, None)

    def expired(self) -> list[str]:
        """Take out what was silent too long, or is too many, oldest first."""
        now = self._clock()
        with self._lock:
            oldest = sorted(self._held, key=lambda comm: self._held[comm].heard)
            many = len(oldest) - LEASE_CAP
            gone = [
                comm
                for index, comm in enumerate(oldest)
                if index < many or now - self._held[comm].heard > LEASE_S[self._held[comm].target]
            ]
            for comm in gone:
                del self._held[comm]
        return gone
