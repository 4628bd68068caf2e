"""One connection to the engine host. Thread-safe and synchronous; a reader thread hands replies to whoever waits for them."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

import power_lab
from power_lab.engine.config import EngineConfig, HostSettings, Paths, strict, user_path
from power_lab.engine.host import process
from power_lab.engine.host import protocol as wire
from power_lab.engine.host.api import OnProgress
from power_lab.engine.host.mailbox import Feed, Mailbox
from power_lab.engine.host.place import peer
from power_lab.engine.revision import code_digest
from power_lab.engine.vitals import Vitals
from power_lab.errors import HostUnavailable, PowerLabError, ProtocolError, RequestCancelled

HANDSHAKE_S = 10.0
ATTEMPTS = 5  # an ending host may be met more than once
ASK_S = 0.05  # between two questions whether somebody still wants an answer
SETTLE_S = 30.0  # how long a cancelled run may take to come back: one engine step


class HostMismatch(HostUnavailable):
    """The running host is of another version; `welcome` says of which. `fresh` when it was started just now."""

    def __init__(self, welcome: wire.Welcome, pid: int, *, fresh: bool = False) -> None:
        super().__init__(
            f"The running engine host (pid {pid}) is power-lab {welcome.package} with code {welcome.revision[:12]}, "
            f"protocol {welcome.protocol}; this is {power_lab.__version__} with code {code_digest()[:12]}, "
            f"protocol {wire.PROTOCOL}.",
            "The package has changed since this program began: restart it (or its kernel)."
            if fresh
            else "lab.replace_host() ends it after its running requests and starts one of this version.",
        )
        self.welcome, self.pid = welcome, pid


class HostEnding(HostUnavailable):
    """The host was met while it ended."""


class HostClient:
    """A connection. Made by `connect` or `find`; closed by `close`, by the host's end, or in a forked child.

    Raises from every call: HostUnavailable when the host has gone, and the typed error that the host sent.
    """

    def __init__(self, sock: socket.socket, settings: HostSettings, *, observer: bool = False) -> None:
        self._sock = sock
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self._mail: dict[int, Mailbox] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._gone: HostUnavailable | None = None
        self.pid = peer(sock)[0]  # as the system tells it: the host's own word could be of another namespace
        self.welcome = self._greet(settings.client_name(), observer)
        os.register_at_fork(after_in_child=_closer(weakref.ref(self)))
        weakref.finalize(self, _hang_up, sock)  # a client that nobody has any more holds no lease
        threading.Thread(target=_read, args=(weakref.ref(self), sock), name="power-lab-client", daemon=True).start()

    @classmethod
    def connect(cls, paths: Paths, settings: HostSettings) -> HostClient:
        """Connect, starting a host when there is none. One of another version that no client is connected to is replaced.

        Raises HostUnavailable; HostMismatch when a host of another version has clients.
        """
        replaced = False
        for _ in range(ATTEMPTS - 1):
            try:
                return cls(process.reach(paths, settings), settings)
            except HostMismatch as error:
                if replaced:
                    raise HostMismatch(error.welcome, error.pid, fresh=True) from None
                if error.welcome.clients:
                    raise
                process.end(error.pid)
                replaced = True
            except HostEnding:
                continue
        return cls(process.reach(paths, settings), settings)

    @classmethod
    def find(cls, paths: Paths, settings: HostSettings, *, observer: bool = True) -> HostClient | None:
        """Connect to a host that is there (as an observer by default), or None."""
        sock = process.find(paths)
        return None if sock is None else cls(sock, settings, observer=observer)

    @property
    def open(self) -> bool:
        """Whether calls can be made: not after the end of the host, `close`, or a fork."""
        return self._gone is None and self._owner == os.getpid()

    # --- calls ------------------------------------------------------------------------------------------------------------------

    def load(
        self,
        config: EngineConfig,
        *,
        replaces: str = "",
        progress: OnProgress | None = None,
        use: Callable[[wire.Loaded], None] = lambda loaded: None,
    ) -> wire.Loaded:
        """Load or share an engine; `progress(stage, done, total)` is called in this thread. Raises what loading raises, EngineInUse.

        A KeyboardInterrupt gives the lease up, and loading goes on in the host. `use` gets the engine at once, also when the interrupt
        came too late to stop the host: the engine that this one replaces may be gone.
        """
        with self.ask(lambda number: wire.Load(id=number, config=_located(config), replaces=replaces)) as mail:
            try:
                while not isinstance(reply := mail.next(), wire.Loaded):
                    if isinstance(reply, wire.Progress) and progress is not None:
                        progress(reply.stage, reply.done, reply.total)
            except KeyboardInterrupt:
                loaded = self._withdrawn(mail)
                if loaded is not None:
                    use(loaded)
                raise
            use(reply)
            return reply

    def _withdrawn(self, mail: Mailbox) -> wire.Loaded | None:
        """Cancel a load; the engine, where that came too late. In doubt the connection is closed, which ends all its leases."""
        try:
            self.send(wire.Cancel(id=mail.id))
            while not isinstance(reply := mail.next(HANDSHAKE_S), wire.Loaded):
                continue
            return reply
        except PowerLabError:
            return None
        except (KeyboardInterrupt, TimeoutError):
            self.close()
            return None

    def query(
        self, kind: wire.QueryKind, engine: str = "", *, cancelled: Callable[[], bool] | None = None, **fields: Any
    ) -> Any:
        """Ask for a value of the type in `protocol.ANSWERS`.

        cancelled: whether nobody wants it any more; the host is told so, also by a KeyboardInterrupt.

        Raises ConfigError for a field of the wrong type, RequestCancelled.
        """
        asked = {"kind": kind, "engine": engine, **fields}
        with self.ask(lambda number: strict(wire.Query, {"id": number, **asked})) as mail:
            try:
                reply = _next(mail, cancelled)
            except (KeyboardInterrupt, RequestCancelled):
                with contextlib.suppress(PowerLabError):
                    self.send(wire.Cancel(id=mail.id))
                raise
            return msgspec.msgpack.decode(_value(reply), type=wire.ANSWERS[kind])

    def status(self) -> wire.HostStatus:
        """Clients and engines of the host."""
        return self.query("engines")

    def subscribe(
        self,
        on_vitals: Callable[[Vitals], None],
        hz: float = 2.0,
        on_end: Callable[[PowerLabError], None] | None = None,
    ) -> Feed:
        """Samples of the host, `hz` times a second (0.2..20), until the feed is closed; both callbacks are called on the reader thread.

        What is wrong with the subscription, and the end of the host, are told to `on_end`.
        """
        wanted = strict(wire.Subscribe, {"id": 0, "hz": float(hz)})
        with self._lock:
            self._raise_if_gone()
            feed = Feed(self, next(self._numbers), on_vitals, on_end)
            self._mail[feed.id] = feed
        try:
            self.send(msgspec.structs.replace(wanted, id=feed.id))
        except BaseException:
            self.close_mail(feed)
            raise
        return feed

    def stop_runs(self, engine: str) -> None:
        """Cancel every run in flight of an engine, whoever submitted it. Raises EngineClosed."""
        with self.ask(lambda number: wire.Stop(id=number, engine=engine)) as mail:
            mail.next()

    def release(self, engine: str) -> None:
        """Close an engine, whoever holds it. Raises EngineClosed where there is none."""
        with self.ask(lambda number: wire.Release(id=number, engine=engine)) as mail:
            mail.next()

    def unload(self, engine: str) -> None:
        """Drop the lease on an engine; unused, it is closed at once."""
        with self.ask(lambda number: wire.Unload(id=number, engine=engine)) as mail:
            mail.next()

    def shutdown(self, *, drain: bool = True) -> None:
        """End the host and wait for its end. Raises EngineInUse naming other live clients."""
        with self.ask(lambda number: wire.Shutdown(id=number, drain=drain)) as mail:
            mail.next()
        process.wait_for_end(self.pid)
        self.close()

    @contextlib.contextmanager
    def ask(
        self, frame: Callable[[int], Any], listener: Callable[[wire.Reply], None] | None = None
    ) -> Iterator[Mailbox]:
        """Send the frame that `frame(id)` makes and yield the mailbox of its replies."""
        mail = self.open_mail(listener)
        try:
            self.send(frame(mail.id))
            yield mail
        finally:
            self.close_mail(mail)

    def open_mail(self, listener: Callable[[wire.Reply], None] | None = None) -> Mailbox:
        """A mailbox with a fresh request id."""
        mail = Mailbox(next(self._numbers), listener)
        with self._lock:
            self._raise_if_gone()
            self._mail[mail.id] = mail
        return mail

    def close_mail(self, mail: Mailbox) -> None:
        """No more replies are wanted."""
        with self._lock:
            self._mail.pop(mail.id, None)

    def send(self, frame: wire.Request) -> None:
        """Send one frame whole. What cannot be sent whole ends the connection, since the host could not read on."""
        data = wire.pack(frame, wire.REQUEST_LIMIT)
        with self._sending:
            self._raise_if_gone()
            try:
                self._sock.sendall(data)
            except OSError as error:
                self.end(f"sending failed: {error.strerror}")
                self._raise_if_gone()
            except BaseException:
                self.end("a send was interrupted")
                raise

    def close(self) -> None:
        """Leave. Leases end; runs of this client are cancelled."""
        if self.open:
            with contextlib.suppress(PowerLabError):
                self.send(wire.Bye())
        self.end("this client closed it")

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _greet(self, name: str, observer: bool) -> wire.Welcome:
        hello = wire.Hello(
            protocol=wire.PROTOCOL,
            package=power_lab.__version__,
            revision=code_digest(),
            client=name.encode("utf-8", "replace").decode(),  # a notebook's path may be no Unicode
            observer=observer,
        )
        try:
            return self._checked(self._exchange(hello))
        except BaseException:
            self._sock.close()
            raise

    def _exchange(self, hello: wire.Hello) -> wire.Reply:
        try:
            self._sock.settimeout(HANDSHAKE_S)
            self._sock.sendall(wire.pack(hello, wire.HELLO_LIMIT))
            body = wire.receive_frame(self._sock, wire.REPLY_LIMIT)
            self._sock.settimeout(None)
        except TimeoutError:
            raise HostUnavailable(
                f"The engine host (pid {self.pid}) does not answer.",
                "If it is stuck, end that process; a new one starts by itself.",
            ) from None
        except ConnectionError:
            body = None
        if body is None:
            raise HostEnding(f"The engine host (pid {self.pid}) is ending or refuses more clients.", "Try again.")
        return wire.reply_of(body)

    def _checked(self, reply: wire.Reply) -> wire.Welcome:
        if not isinstance(reply, wire.Welcome):
            raise HostUnavailable(f"The engine host refused: {getattr(reply, 'message', type(reply).__name__)}")
        theirs = reply.protocol, reply.package, reply.revision
        if theirs != (wire.PROTOCOL, power_lab.__version__, code_digest()):
            raise HostMismatch(reply, self.pid)
        return reply

    def deliver(self, reply: wire.Reply) -> None:
        """Called by the reader thread."""
        number = reply.id if not isinstance(reply, wire.Welcome) else 0
        if not number:
            raise ProtocolError(reply.message if isinstance(reply, wire.Failure) else "a reply without request came")
        more = isinstance(reply, (wire.Progress, wire.Accepted, wire.Output, wire.Sample))
        with self._lock:
            mail = self._mail.get(number) if more else self._mail.pop(number, None)
        if mail is not None:
            mail.put(reply)

    def end(self, why: str) -> None:
        """The connection is over; whoever waits is told why."""
        with self._lock:
            if self._gone is None:
                self._gone = HostUnavailable(
                    f"The connection to the engine host (pid {self.pid}) is gone: {why}.",
                    f"Call again: a new host is started when needed. The engine log is {self.welcome.log}.",
                )
            waiting, self._mail = list(self._mail.values()), {}
        _hang_up(self._sock)
        for mail in waiting:
            mail.put(self._fresh())

    def _fresh(self) -> HostUnavailable:
        assert self._gone is not None
        return HostUnavailable(self._gone.message, self._gone.remedy)

    def _raise_if_gone(self) -> None:
        if self._gone is not None:
            raise self._fresh()
        if self._owner != os.getpid():
            raise HostUnavailable("This connection belongs to the parent process.", "Connect again in this one.")


def _read(client: weakref.ref[HostClient], sock: socket.socket) -> None:
    """The reader thread. It keeps the socket and not the client, so that a forgotten client can be collected."""
    why = "it ended"
    try:
        while (body := wire.receive_frame(sock, wire.REPLY_LIMIT)) is not None and (here := client()) is not None:
            here.deliver(wire.reply_of(body))
            del here
    except OSError as error:
        why = error.strerror or str(error)
    except ProtocolError as error:
        why = error.message
    if (here := client()) is not None:
        here.end(why)


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # wakes the reader thread
    sock.close()


def _located(config: EngineConfig) -> EngineConfig:
    """A relative file means the client's folder, which the host does not know. A name stays a name, whatever lies beside it."""
    files = {
        key: str(user_path(model, key).absolute())
        for key, model in (("model", config.model), ("draft", config.draft))
        if "/" in model or model.endswith((".gguf", ".safetensors"))
    }
    return msgspec.structs.replace(config, **files)


def _next(mail: Mailbox, cancelled: Callable[[], bool] | None) -> wire.Reply:
    if cancelled is None:
        return mail.next()
    while not cancelled():
        with contextlib.suppress(TimeoutError):
            return mail.next(ASK_S)
    raise RequestCancelled("The question was cancelled.")


def _value(reply: wire.Reply) -> msgspec.Raw:
    if not isinstance(reply, wire.Answer):
        raise ProtocolError(f"Expected an Answer, not {type(reply).__name__}.")
    return reply.value


def _closer(client: weakref.ref[HostClient]) -> Callable[[], None]:
    """In a forked child: drop the copied socket, so that the host notices when the parent ends. Takes no locks."""

    def close() -> None:
        if (here := client()) is not None:
            here._sock.close()

    return close
