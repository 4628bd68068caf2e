"""Frames: what goes in comes out; anything else is a ProtocolError and nothing worse."""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab import errors
from power_lab.engine.chat import Turn
from power_lab.engine.config import EngineConfig
from power_lab.engine.host import protocol as wire
from power_lab.engine.request import SamplingParams
from power_lab.engine.trace import Delta

REQUESTS = [
    wire.Hello(protocol=1, package="0", revision="r", client="nb", observer=True),
    wire.Load(id=1, config=EngineConfig(model="x", kv_tokens=128), replaces="k"),
    wire.Submit(id=2, engine="k", prompt="text", params=SamplingParams(seed=3, logit_bias={5: -1.0}, stop=("a",))),
    wire.Submit(id=3, engine="k", prompt=(1, 2, 3), params=SamplingParams(), chat=False, deadline_s=1.5),
    wire.Submit(id=4, engine="k", prompt=({"role": "user", "content": "hi"},), params=SamplingParams()),
    wire.Cancel(id=4),
    wire.Submit(
        id=4,
        engine="k",
        prompt=({"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": {"x": [1.5]}}}]},),
        params=SamplingParams(),
        tools=({"name": "f"},),
        template_options={"enable_thinking": False},
    ),
    wire.Query(
        id=5,
        kind="next_prompt",
        engine="k",
        turn=Turn(prompt=(1,), output=(2,), messages=({"role": "user"},), message={"role": "tool"}, history="keep"),
    ),
    wire.Query(id=5, kind="continuation", engine="k", tokens=(1,), output=(2,), text="more"),
    wire.Unload(id=6, engine="k"),
    wire.Shutdown(id=7, drain=False),
    wire.Bye(),
]
REPLIES = [
    wire.Welcome(protocol=1, package="0", revision="r", pid=9, log="/l", clients=("a",), engines=2),
    wire.Progress(id=1, stage="weights", done=1, total=2),
    wire.Accepted(id=2, run=0),
    wire.Output(id=2, delta=Delta(id=0, text="é", tokens=1, drafted=0, accepted=0, cached=0, at=0.1)),
    wire.Failure(id=2, error="ConfigError", message="m", key="k"),
]


@pytest.mark.parametrize("frame", REQUESTS, ids=lambda frame: type(frame).__name__)
def test_requests_come_back_as_they_were(frame):
    assert wire.request_of(wire.pack(frame, wire.REQUEST_LIMIT)[4:]) == frame


@pytest.mark.parametrize("frame", REPLIES, ids=lambda frame: type(frame).__name__)
def test_replies_come_back_as_they_were(frame):
    assert wire.reply_of(wire.pack(frame, wire.REPLY_LIMIT)[4:]) == frame


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_protocol_error(body):
    for decode in (wire.request_of, wire.reply_of):
        try:
            decode(body)
        except errors.ProtocolError:
            continue


@given(st.sampled_from(REQUESTS), st.data())
def test_damaged_frames_are_a_frame_or_a_protocol_error(frame, data):
    body = bytearray(wire.pack(frame, wire.REQUEST_LIMIT)[4:])
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    for damaged in (bytes(body), bytes(body[:cut])):
        try:
            wire.request_of(damaged)
        except errors.ProtocolError:
            continue


def test_hostile_nesting_is_a_protocol_error():
    with pytest.raises(errors.ProtocolError):
        wire.request_of(b"\x82\xa5frame\xa5query\xa1x" + b"\x91" * 100_000)


def test_an_unknown_frame_and_an_unknown_field_are_refused():
    for body in ({"frame": "format_disk"}, {"frame": "cancel", "id": 1, "extra": 2}, {"frame": "cancel"}):
        with pytest.raises(errors.ProtocolError):
            wire.request_of(msgspec.msgpack.encode(body))


def test_hello_and_welcome_take_fields_of_later_versions():
    body = {**msgspec.to_builtins(REQUESTS[0]), "later": 1}
    assert wire.request_of(msgspec.msgpack.encode(body)) == REQUESTS[0]


def test_a_frame_above_the_limit_is_not_sent():
    with pytest.raises(errors.ProtocolError, match="exceeds the limit of 100"):
        wire.pack(wire.Query(id=1, kind="tokenize", text="x" * 200), 100)


@pytest.mark.parametrize("data", [b"\x00", struct.pack("<I", 10) + b"short", struct.pack("<I", 1 << 31)])
def test_truncated_and_huge_frames_are_refused_before_they_are_read(data):
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        await wire.read_frame(reader, wire.REQUEST_LIMIT)

    with pytest.raises(errors.ProtocolError):
        asyncio.run(read())
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        with pytest.raises(errors.ProtocolError):
            wire.receive_frame(here, wire.REQUEST_LIMIT)


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PowerLabError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_errors_arrive_as_the_class_that_they_were(kind):
    keyed = "__init__" in vars(kind) and kind is not errors.PowerLabError
    sent = kind("width", "is wrong", "Fix it.") if keyed else kind("It is wrong.", "Fix it.")
    got = wire.error_of(wire.failure(1, sent, "/the.log"))
    assert type(got) is kind
    assert (str(got), got.remedy) == (str(sent), "Fix it.")
    assert getattr(got, "key", None) == getattr(sent, "key", None)
    assert got.__notes__ == ["Engine log: /the.log"]


def test_errors_of_unknown_classes_keep_their_nearest_name_and_bugs_their_traceback():
    class Special(errors.CapacityError):
        pass

    assert type(wire.error_of(wire.failure(1, Special("m"), ""))) is errors.CapacityError
    assert type(wire.error_of(wire.Failure(id=1, error="os", message="m"))) is errors.PowerLabError
    try:
        raise ZeroDivisionError("by nought")
    except ZeroDivisionError as bug:
        got = wire.error_of(wire.failure(1, bug, "/the.log"))
    assert "ZeroDivisionError: by nought" in str(got)
    assert "test_protocol.py" in got.__notes__[0]
