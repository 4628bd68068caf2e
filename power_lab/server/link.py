"""The server's one connection to the engine host: an observer, which holds no engine and does not keep the host alive.

It is there while anybody wants it, finds a host that starts, and notices at once when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable
from logging import Logger
from pathlib import Path

import msgspec

import power_lab
from power_lab.engine.host import protocol as wire
from power_lab.engine.host.place import Place, peer
from power_lab.engine.revision import code_digest
from power_lab.errors import HostUnavailable, PowerLabError, ProtocolError

LOOK_S = 0.25  # between looks at the socket's path; a look is one stat
HANDSHAKE_S = 5.0
RETRY_S = (0.25, 30.0)  # shortest and longest pause before a socket that refused is tried again while it stays the same
SAMPLE_LIMIT = 8 << 20  # bytes of a frame from the host
_NAME = "JupyterLab"

OnSample = Callable[[wire.Sample], None]
Listener = asyncio.Future[wire.Reply] | OnSample


class Absent(msgspec.Struct, frozen=True):
    """No host runs; `at` is when that was found, in unix seconds."""

    at: float


class Present(msgspec.Struct, frozen=True):
    """Connected to the host that sent `welcome`."""

    welcome: wire.Welcome


class Refused(msgspec.Struct, frozen=True):
    """A host is there and cannot be used."""

    message: str
    remedy: str


State = Absent | Present | Refused


class HostLink:
    """The connection. All methods belong to the event loop's thread.

    Args:
        place: finds the host's place; may block, so it is called on a thread.
        on_change: called after every change of `state`.
    """

    def __init__(self, place: Callable[[], Place], log: Logger, on_change: Callable[[], None]) -> None:
        self._find_place, self._log, self._on_change = place, log, on_change
        self._numbers = itertools.count(1)
        self._listeners: dict[int, Listener] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._holders = 0
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self.path: Path | None = None
        self.state: State = Absent(time.time())

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keep the link up inside; the first holder starts it, and the last one ends it."""
        self.hold()
        try:
            yield
        finally:
            await self.let_go()

    def hold(self) -> None:
        """Keep the link up until `let_go`."""
        self._holders += 1
        if self._task is None:
            self._settled.clear()
            self.state = Absent(time.time())  # the same host found again must be a change, or nobody subscribes
            self._task = asyncio.get_running_loop().create_task(self._keep())

    async def let_go(self) -> None:
        """One holder less."""
        self._holders -= 1
        if self._holders == 0 and self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def settled(self) -> State:
        """The state, once it is known whether there is a host."""
        await self._settled.wait()
        return self.state

    async def ask(self, frame: Callable[[int], wire.Request], timeout: float) -> wire.Reply:
        """Send the frame that `frame(id)` makes; its last reply. Raises the host's typed error, HostUnavailable, TimeoutError."""
        number = next(self._numbers)
        reply: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._send(frame(number))
        self._listeners[number] = reply
        try:
            answer = await asyncio.wait_for(reply, timeout)
        finally:
            self._listeners.pop(number, None)
        if isinstance(answer, wire.Failure):
            raise wire.error_of(answer)
        return answer

    def subscribe(self, hz: float, on_sample: OnSample) -> int:
        """Ask for samples at `hz`; the subscription's id. It ends with the connection. Raises HostUnavailable."""
        number = next(self._numbers)
        self._send(wire.Subscribe(id=number, hz=hz))
        self._listeners[number] = on_sample
        return number

    def unsubscribe(self, number: int) -> None:
        """End a subscription; one that is over already is fine."""
        if self._listeners.pop(number, None) is not None and self._writer is not None:
            self._send(wire.Cancel(id=number))

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _send(self, frame: wire.Request) -> None:
        if self._writer is None:
            raise HostUnavailable("No engine host is running.", "It starts with the first lab.load() in a notebook.")
        self._writer.write(wire.pack(frame, wire.REQUEST_LIMIT))

    async def _keep(self) -> None:
        """Look for a host, talk to it until it ends, look again."""
        try:
            place = await asyncio.to_thread(self._find_place)
            await asyncio.to_thread(code_digest)  # reads the sources, once
            self.path = place.socket
            await self._look(place.socket)
        except PowerLabError as error:  # no usable place: nothing to look for
            self._become(Refused(error.message, error.remedy))
        except Exception:  # noqa: BLE001 - a task that dies in silence would leave pages without a word
            self._log.exception("Power Lab: the link to the engine host failed")
            self._become(Refused("The link to the engine host failed.", "The Jupyter server's log says why."))
        finally:
            self._settled.set()

    async def _look(self, path: Path) -> None:
        tried: tuple[int, ...] | None = None
        pause, again = RETRY_S[0], 0.0
        while True:
            found = _identity(path)
            if found is None:
                tried = None
                self._become(Absent(time.time()))
            elif found != tried or time.monotonic() >= again:
                # A socket file that nobody listens at (yet) is tried less and less often, until another takes its place.
                pause = RETRY_S[0] if found != tried else min(2 * pause, RETRY_S[1])
                tried = found
                if await self._talk(path):
                    pause = RETRY_S[0]
                again = time.monotonic() + pause
            self._settled.set()
            await asyncio.sleep(LOOK_S)

    async def _talk(self, path: Path) -> bool:
        """One connection from its begin to its end; says whether there was one."""
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_unix_connection(os.fspath(path)), HANDSHAKE_S)
        except (OSError, TimeoutError):
            self._become(Absent(time.time()))
            return False
        gone: PowerLabError | None = None
        try:
            welcome = await asyncio.wait_for(greet(reader, writer), HANDSHAKE_S)
            if welcome is not None:
                self._writer = writer
                self._become(Present(welcome))
                self._settled.set()
                await self._read(reader)
        except TimeoutError:
            gone = HostUnavailable(
                "The engine host does not answer.", "If it is stuck, `power-lab doctor` names its process."
            )
        except PowerLabError as error:
            gone = error
        except OSError:
            pass  # it died
        finally:
            self._drop(writer)
        self._become(Absent(time.time()) if gone is None else Refused(gone.message, gone.remedy))
        return True

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (body := await wire.read_frame(reader, SAMPLE_LIMIT)) is not None:
            reply = wire.reply_of(body)
            number = 0 if isinstance(reply, wire.Welcome) else reply.id
            if not number:
                raise ProtocolError(
                    reply.message if isinstance(reply, wire.Failure) else "A reply without request came."
                )
            self._deliver(number, reply)

    def _deliver(self, number: int, reply: wire.Reply) -> None:
        listener = self._listeners.get(number)
        if isinstance(reply, wire.Sample):
            if listener is not None and not isinstance(listener, asyncio.Future):
                listener(reply)
        elif isinstance(listener, asyncio.Future) and not isinstance(reply, wire.Progress):
            if not listener.done():
                listener.set_result(reply)
        elif isinstance(reply, wire.Failure):  # a subscription that the host ended
            self._listeners.pop(number, None)
            self._log.warning("Power Lab: the engine host ended a subscription: %s", reply.message)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writer = None
        writer.close()
        waiting, self._listeners = self._listeners, {}
        for listener in waiting.values():
            if isinstance(listener, asyncio.Future) and not listener.done():
                listener.set_exception(
                    HostUnavailable("The engine host has ended.", "A new one starts when it is needed.")
                )

    def _become(self, state: State) -> None:
        before, self.state = self.state, state
        if isinstance(state, Absent) and isinstance(before, Absent):
            self.state = before  # since when
        elif state != before:
            self._on_change()


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, observer: bool = True
) -> wire.Welcome | None:
    """Introduce this server; None when the host ends meanwhile. Raises PowerLabError when it cannot be talked to.

    The protocol must be the same. The code may be another revision: a server runs on while its package is replaced, and what it shows
    is for people.
    """
    pid, uid = peer(writer.get_extra_info("socket"))
    if uid != os.geteuid():
        raise HostUnavailable(
            f"The process {pid} at the engine socket belongs to user {uid}.", "Remove its runtime folder."
        )
    hello = wire.Hello(
        protocol=wire.PROTOCOL, package=power_lab.__version__, revision=code_digest(), client=_NAME, observer=observer
    )
    writer.write(wire.pack(hello, wire.HELLO_LIMIT))
    body = await wire.read_frame(reader, SAMPLE_LIMIT)
    if body is None:
        return None
    welcome = wire.reply_of(body)
    if not isinstance(welcome, wire.Welcome):
        raise HostUnavailable(f"The engine host refused: {getattr(welcome, 'message', type(welcome).__name__)}")
    if welcome.protocol != wire.PROTOCOL:
        raise HostUnavailable(
            f"The engine host (pid {pid}) is power-lab {welcome.package}, this JupyterLab's part is {power_lab.__version__}.",
            "Restart JupyterLab.",
        )
    return welcome


def _identity(path: Path) -> tuple[int, ...] | None:
    """What changes when another socket takes the path, or None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns
