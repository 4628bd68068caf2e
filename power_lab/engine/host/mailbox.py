"""Where replies to one request arrive: a queue for whoever waits, or a callback for whoever watches."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from power_lab.engine.host import protocol as wire
from power_lab.engine.vitals import Vitals
from power_lab.errors import PowerLabError

if TYPE_CHECKING:
    from power_lab.engine.host.client import HostClient


class Mailbox:
    """Replies to one request. Iterating gives them until the last one; a Failure is raised as its typed error."""

    def __init__(self, request: int, listener: Callable[[wire.Reply], None] | None = None) -> None:
        self.id = request
        self._listener = listener
        self._replies: queue.SimpleQueue[wire.Reply | PowerLabError] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = False
        self._when_over: Callable[[], None] | None = None

    def put(self, reply: wire.Reply | PowerLabError) -> None:
        """Called by the reader thread."""
        if self._listener is not None and not isinstance(reply, PowerLabError):
            with contextlib.suppress(Exception):  # a listener's error is its own; other requests share this thread
                self._listener(reply)
        self._replies.put(reply)
        if isinstance(reply, (wire.Done, wire.Failure, PowerLabError)):
            with self._lock:
                self._over, told = True, self._when_over
            if told is not None:
                told()

    def when_over(self, told: Callable[[], None]) -> None:
        """Have `told` called once, when a run's record or an error is there to take: on the reader thread, or now."""
        with self._lock:
            over, self._when_over = self._over, told
        if over:
            told()

    def next(self, timeout: float | None = None) -> wire.Reply:
        """Wait for the next reply. Raises TimeoutError after `timeout` seconds, or the typed error of the reply."""
        try:
            reply = self._replies.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"Request {self.id} is not answered after {timeout} s; it goes on.") from None
        if isinstance(reply, PowerLabError):
            raise reply
        if isinstance(reply, wire.Failure):
            raise wire.error_of(reply)
        return reply


class Feed(Mailbox):
    """Samples of a subscription, told on the reader thread and not kept. A callback that takes its time gets fewer of them.

    Args:
        on_vitals: called with each. on_end: called once with the error that ended it, unless this side closed it.
    """

    def __init__(
        self,
        client: HostClient,
        request: int,
        on_vitals: Callable[[Vitals], None],
        on_end: Callable[[PowerLabError], None] | None,
    ) -> None:
        super().__init__(request)
        self._client, self._on_vitals, self._on_end = weakref.ref(client), on_vitals, on_end
        self.open = True

    def put(self, reply: wire.Reply | PowerLabError) -> None:
        if not self.open:
            return
        with contextlib.suppress(Exception):  # a listener's error is its own
            if isinstance(reply, wire.Sample):
                self._on_vitals(reply.vitals)
            elif isinstance(reply, (wire.Failure, PowerLabError)):
                self.open = False
                if self._on_end is not None:
                    self._on_end(wire.error_of(reply) if isinstance(reply, wire.Failure) else reply)

    def close(self) -> None:
        """No more samples. Idempotent; of a connection that has gone, too."""
        client, self.open = self._client() if self.open else None, False
        if client is not None and client.open:
            client.close_mail(self)
            with contextlib.suppress(PowerLabError):
                client.send(wire.Cancel(id=self.id))
