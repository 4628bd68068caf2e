"""What goes over the websocket, JSON both ways."""

from __future__ import annotations

import time

import msgspec

from power_lab.engine.vitals import Vitals
from power_lab.errors import ConfigError, PowerLabError

HZ = (0.2, 20.0)
MESSAGE_LIMIT = 4 << 10
"""Largest message of a page, in bytes; the longest that makes sense has about 100."""


class Rate(msgspec.Struct, frozen=True, tag_field="kind", tag="rate", forbid_unknown_fields=True):
    """Samples a second that the page wants; 0 pauses."""

    hz: float


class Order(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """Something to do to an engine; answered by `Done` or `Failed` with the same id."""

    id: int
    engine: str


class Stop(Order, frozen=True, tag="stop"):
    """End its runs in flight as cancelled."""


class Unload(Order, frozen=True, tag="unload"):
    """Close it, whoever holds it."""


class Restart(Order, frozen=True, tag="restart"):
    """Close it and load it again with the same settings."""


class NoHost(msgspec.Struct, frozen=True, tag_field="kind", tag="nohost"):
    """No engine host runs, since `at` (unix seconds). Sent again each second."""

    at: float


class Trouble(msgspec.Struct, frozen=True, tag_field="kind", tag="error"):
    """The host cannot be used, or the page sent nonsense."""

    message: str
    remedy: str


class Done(msgspec.Struct, frozen=True, tag_field="kind", tag="done"):
    """The order was carried out."""

    id: int


class Failed(msgspec.Struct, frozen=True, tag_field="kind", tag="failed"):
    """The order was not carried out, and why."""

    id: int
    message: str
    remedy: str


ToServer = Rate | Stop | Unload | Restart
ToPage = NoHost | Trouble | Done | Failed
_decoder = msgspec.json.Decoder(ToServer)


def read(text: str | bytes) -> ToServer:
    """A page's message. Raises ConfigError."""
    try:
        message = _decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("message", f"is not understood: {error}", "See power_lab/server/messages.py.") from None
    if isinstance(message, Rate) and message.hz != 0 and not HZ[0] <= message.hz <= HZ[1]:
        raise ConfigError("hz", f"{message.hz:g} is not 0 or from {HZ[0]:g} to {HZ[1]:g}", "0 pauses.")
    return message


def text_of(message: ToPage) -> str:
    """As JSON."""
    return msgspec.json.encode(message).decode()


def vitals_text(vitals: Vitals) -> str:
    """A sample as JSON with its `kind`. Infinities and NaN, which JSON has not, become null."""
    return '{"kind":"vitals",' + msgspec.json.encode(vitals).decode()[1:]


def failed(number: int, error: PowerLabError | TimeoutError) -> Failed:
    """The reply to an order that was not carried out."""
    if isinstance(error, PowerLabError):
        return Failed(number, error.message, error.remedy)
    return Failed(number, "The engine host did not answer in time.", "It goes on with it; look again in a moment.")


def no_host() -> NoHost:
    return NoHost(time.time())
