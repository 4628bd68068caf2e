"""Frames on the engine socket: a 4-byte little-endian length, then one MessagePack map with a `frame` tag.

Requests carry an id that the client chose; every reply to it carries the same id, so many requests share one connection. `Hello` and
`Welcome` keep their meaning in all protocol versions, so a client of any version can tell what it is talking to.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import traceback
from typing import Any, Literal

import msgspec

from power_lab import errors
from power_lab.engine.chat import NextPrompt, Turn
from power_lab.engine.config import EngineConfig
from power_lab.engine.inspection import LensAsk, LensReport, LookupReport, PrefixTree, ShapesReport, StepRecord
from power_lab.engine.report import Decision, EngineStatus, MemoryPlan
from power_lab.engine.request import SamplingParams
from power_lab.engine.trace import BlockState, Delta, EngineFacts, RunRecord
from power_lab.engine.vitals import Vitals
from power_lab.errors import PowerLabError, ProtocolError

PROTOCOL = 1
HELLO_LIMIT = 4 << 10
REQUEST_LIMIT = 16 << 20
REPLY_LIMIT = 64 << 20
_LENGTH = struct.Struct("<I")

Data = dict[str, Any]  # of JSON; what is in it is checked where it is used
Prompt = str | tuple[int | Data, ...]
QueryKind = Literal[
    "status", "explain", "memory", "blocks", "facts", "tokenize", "continuation", "next_prompt", "engines",
    "steps", "shapes", "prefixes", "lookup", "lens",
]  # fmt: skip


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="frame", tag=str.lower, forbid_unknown_fields=True):
    """Base of all frames."""


class Hello(Frame, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """First frame of a client. An observer (a panel) holds no engine and does not keep the host alive."""

    protocol: int
    package: str
    revision: str
    client: str
    observer: bool = False


class Load(Frame, frozen=True, kw_only=True):
    """Load or share the engine of `config`. With `replaces`, that engine is closed once the new one is there."""

    id: int
    config: EngineConfig
    replaces: str = ""


class Submit(Frame, frozen=True, kw_only=True):
    """Start a run: `Accepted`, any number of `Output`, then `Done`; or `Failure`."""

    id: int
    engine: str
    prompt: Prompt
    params: SamplingParams
    chat: bool | None = None
    tools: tuple[Data, ...] = ()
    template_options: Data = {}
    cache_key: str = ""
    deadline_s: float | None = None


class Cancel(Frame, frozen=True, kw_only=True):
    """Ask for the end of request `id`. A run ends at the next step boundary and its `Done` still comes; a load or a question that is not
    answered yet, and a subscription, fail with RequestCancelled.
    """

    id: int


class Query(Frame, frozen=True, kw_only=True):
    """Ask for a value; the reply is `Answer` with the type in ANSWERS."""

    id: int
    kind: QueryKind
    engine: str = ""
    text: str = ""
    tokens: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    turn: Turn | None = None
    prompt: Prompt = ""
    chat: bool | None = None
    cache_key: str = ""
    lens: LensAsk | None = None


class Subscribe(Frame, frozen=True, kw_only=True):
    """Ask for samples of the whole host, `hz` times a second (0.2..20), until `Cancel`. Whoever reads slowly gets fewer."""

    id: int
    hz: float = 2.0


class Stop(Frame, frozen=True, kw_only=True):
    """Cancel every run in flight of an engine, whoever submitted it: each ends at its next step boundary, with its `Done`."""

    id: int
    engine: str


class Release(Frame, frozen=True, kw_only=True):
    """Close an engine, whoever holds it. Its runs end, and its holders are told who asked when they use it again."""

    id: int
    engine: str


class Unload(Frame, frozen=True, kw_only=True):
    """Drop this client's lease on an engine; it is closed at once when nobody else holds it."""

    id: int
    engine: str


class Shutdown(Frame, frozen=True, kw_only=True):
    """End the host, after running requests when `drain`. Refused with EngineInUse while others are connected."""

    id: int
    drain: bool = True


class Bye(Frame, frozen=True, kw_only=True):
    """The client leaves in good order."""


class Welcome(Frame, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """First frame of the host: what it is, and who else is connected."""

    protocol: int
    package: str
    revision: str
    pid: int
    log: str
    clients: tuple[str, ...] = ()
    engines: int = 0


class Progress(Frame, frozen=True, kw_only=True):
    """A stage of loading: `done` of `total` (0 where unknown)."""

    id: int
    stage: str
    done: int
    total: int


class Loaded(Frame, frozen=True, kw_only=True):
    """The engine is ready and leased to this client; `shared` when it was there before."""

    id: int
    engine: str
    facts: EngineFacts
    shared: bool


class Accepted(Frame, frozen=True, kw_only=True):
    """The run is queued; `run` is its number in the engine."""

    id: int
    run: int


class Output(Frame, frozen=True, kw_only=True):
    """A piece of output."""

    id: int
    delta: Delta


class Done(Frame, frozen=True, kw_only=True):
    """The run has ended, in whatever way."""

    id: int
    record: RunRecord


class Sample(Frame, frozen=True, kw_only=True):
    """What a subscription asked for, as it is now."""

    id: int
    vitals: Vitals


class Answer(Frame, frozen=True, kw_only=True):
    """The value a query asked for, or the plain acknowledgement (nil) of `Unload`, `Stop`, `Release` and `Shutdown`."""

    id: int
    value: msgspec.Raw


class Failure(Frame, frozen=True, kw_only=True):
    """A typed error. Id 0 concerns the connection, which the host closes after it."""

    id: int
    error: str
    message: str
    remedy: str = ""
    key: str = ""
    log: str = ""
    trace: str = ""


class ClientInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A connected client: its name (notebook or program), process id, and seconds since it connected."""

    name: str
    pid: int
    connected_s: float
    observer: bool = False


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in the host.

    Attributes:
        engine: its key; state: `loading` or `ready`; stage: what loading is doing.
        clients: who holds a lease; runs: requests in flight.
        ends_in_s: seconds until it is closed for idleness, or None while it is held or working.
    """

    engine: str
    config: EngineConfig
    state: str
    stage: str
    clients: tuple[ClientInfo, ...]
    runs: int
    ends_in_s: float | None
    facts: EngineFacts | None
    status: EngineStatus | None


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The host: identity, clients, engines.

    Attributes:
        idle_s, linger_s: seconds after which an unused engine, and then the empty host, end.
        ends_in_s: seconds until the host ends, or None while it has an engine or a client.
        resident: bytes of memory of the host's process.
    """

    pid: int
    package: str
    revision: str
    log: str
    uptime_s: float
    idle_s: float
    linger_s: float
    ends_in_s: float | None
    resident: int
    clients: tuple[ClientInfo, ...]
    engines: tuple[EngineInfo, ...]


ANSWERS: dict[str, Any] = {
    "status": EngineStatus,
    "explain": tuple[Decision, ...],
    "memory": MemoryPlan,
    "blocks": tuple[BlockState, ...],
    "facts": EngineFacts,
    "tokenize": tuple[int, ...],
    "continuation": tuple[int, ...],
    "next_prompt": NextPrompt,
    "engines": HostStatus,
    "steps": tuple[StepRecord, ...],
    "shapes": ShapesReport,
    "prefixes": PrefixTree,
    "lookup": LookupReport,
    "lens": LensReport,
}

Request = Hello | Load | Submit | Cancel | Query | Unload | Subscribe | Stop | Release | Shutdown | Bye
Reply = Welcome | Progress | Loaded | Accepted | Output | Done | Sample | Answer | Failure
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def pack(frame: Request | Reply, limit: int) -> bytes:
    """Bytes of a frame with its length. Raises ProtocolError when it is larger than `limit` bytes or holds what no frame can."""
    try:
        body = msgspec.msgpack.encode(frame)
    except UnicodeEncodeError:
        raise ProtocolError(
            f"A {type(frame).__name__} frame holds text that is not valid Unicode: it has lone surrogates.",
            "Replace them: text.encode('utf-8', 'replace').decode().",
        ) from None
    except OverflowError:
        raise ProtocolError(f"A {type(frame).__name__} frame holds a whole number of more than 64 bits.") from None
    if len(body) > limit:
        raise ProtocolError(f"A {type(frame).__name__} frame of {len(body)} bytes exceeds the limit of {limit}.")
    return _LENGTH.pack(len(body)) + body


def request_of(body: bytes) -> Request:
    """Decode a client's frame. Raises ProtocolError."""
    return _decode(_requests, body)


def reply_of(body: bytes) -> Reply:
    """Decode a host's frame. Raises ProtocolError."""
    return _decode(_replies, body)


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (
        ValueError,
        RecursionError,
    ) as error:  # msgspec's errors are ValueErrors; hostile nesting is a RecursionError
        raise ProtocolError(f"A frame of {len(body)} bytes cannot be decoded ({type(error).__name__}).") from None


async def read_frame(reader: asyncio.StreamReader, limit: int) -> bytes | None:
    """Next body, or None at a clean end. Raises ProtocolError for a frame that is truncated or larger than `limit`."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_checked(head, limit))
    except asyncio.IncompleteReadError as error:
        if not error.partial and error.expected == _LENGTH.size:
            return None
        raise ProtocolError(f"A frame ended after {len(error.partial)} of {error.expected} bytes.") from None


def receive_frame(sock: socket.socket, limit: int) -> bytes | None:
    """Blocking twin of `read_frame`."""
    head = _receive(sock, _LENGTH.size)
    if not head:
        return None
    if len(head) == _LENGTH.size:
        size = _checked(head, limit)
        body = _receive(sock, size)
        if len(body) == size:
            return body
    raise ProtocolError("The connection ended inside a frame.")


def _checked(head: bytes, limit: int) -> int:
    (size,) = _LENGTH.unpack(head)
    if size > limit:
        raise ProtocolError(f"A frame of {size} bytes exceeds the limit of {limit}.")
    return size


def _receive(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), 1 << 20))
        if not part:
            break
        parts += part
    return bytes(parts)


def failure(request: int, error: BaseException, log: str) -> Failure:
    """The frame of an error: its class (the nearest one in `power_lab.errors`), message, remedy, and for bugs the traceback."""
    if isinstance(error, PowerLabError):
        name = next(kind.__name__ for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
        key = getattr(error, "key", "")
        return Failure(id=request, error=name, message=error.message, remedy=error.remedy, key=key, log=log)
    message = f"The engine raised {type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return Failure(
        id=request, error="PowerLabError", message=message, remedy=f"The engine log is {log}.", log=log, trace=trace
    )


def error_of(frame: Failure) -> PowerLabError:
    """The same typed error again, with the log path (and a bug's traceback in the host) as notes."""
    kind = vars(errors).get(frame.error)
    if not (isinstance(kind, type) and issubclass(kind, PowerLabError)):
        kind = PowerLabError
    error = kind.__new__(kind)
    PowerLabError.__init__(error, frame.message, frame.remedy)
    if frame.key:
        setattr(error, "key", frame.key)  # noqa: B010 - only some classes have it
    if frame.trace:
        error.add_note(f"In the engine host:\n{frame.trace}")
    if frame.log:
        error.add_note(f"Engine log: {frame.log}")
    return error
