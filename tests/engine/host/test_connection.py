"""What engines' threads tell of runs, on its way to one client."""

from __future__ import annotations

import asyncio
import logging
import struct
import threading
from types import SimpleNamespace
from typing import Any

import msgspec

from power_lab.engine.host import protocol as wire
from power_lab.engine.host.connection import Connection, Run
from power_lab.engine.request import SamplingParams
from power_lab.engine.trace import Delta
from tests.factories import run_record

REQUESTS, TOKENS = 5, 40


class Writer:
    """Keeps each write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.transport = SimpleNamespace(is_closing=lambda: False, get_write_buffer_size=lambda: 0)

    def write(self, data: bytes) -> None:
        self.writes.append(data)


class Engine:
    """Keeps who wants to hear of each request."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def submit(self, prompt: object, params: object, **options: Any) -> object:
        self.told.append((options["on_delta"], options["on_done"]))
        return SimpleNamespace()


def frames(writes: list[bytes]) -> list[wire.Reply]:
    data, found = b"".join(writes), []
    while data:
        (size,) = struct.unpack("<I", data[:4])
        found.append(msgspec.msgpack.decode(data[4 : 4 + size], type=wire.Reply))
        data = data[4 + size :]
    return found


def delta(request: int, tokens: int) -> Delta:
    return Delta(id=request, text="x", tokens=tokens, drafted=0, accepted=0, cached=0, at=0.0)


async def connected() -> tuple[Connection, Engine, Writer]:
    host, writer, engine = SimpleNamespace(log=logging.getLogger("test")), Writer(), Engine()
    connection = Connection(host, asyncio.StreamReader(), writer, 0)  # type: ignore[arg-type]
    for request in range(REQUESTS):
        frame = wire.Submit(id=request, engine="", prompt="x", params=SamplingParams())
        connection._start(engine, frame, Run(request, SimpleNamespace(runs=1)))  # type: ignore[arg-type]
    return connection, engine, writer


def test_what_a_step_tells_all_runs_is_one_write() -> None:
    async def main() -> list[bytes]:
        _, engine, writer = await connected()

        def step() -> None:
            for request, (on_delta, _) in enumerate(engine.told):
                on_delta(delta(request, 1))

        for _ in range(2):
            thread = threading.Thread(target=step)
            thread.start()
            thread.join()  # the loop has not turned meanwhile
            await asyncio.sleep(0.01)
        return writer.writes

    writes = asyncio.run(main())
    assert len(writes) == 2
    assert [frame.delta.id for frame in frames(writes)] == [*range(REQUESTS)] * 2  # type: ignore[union-attr]


def test_nothing_is_lost_or_late_while_the_loop_turns() -> None:
    """Outputs in order, each before its run's record."""

    async def main() -> list[bytes]:
        _, engine, writer = await connected()

        def work() -> None:
            for tokens in range(TOKENS):
                for request, (on_delta, _) in enumerate(engine.told):
                    on_delta(delta(request, tokens))
            for _, on_done in engine.told:
                on_done(run_record())

        await asyncio.to_thread(work)
        await asyncio.sleep(0.01)
        return writer.writes

    found = frames(asyncio.run(main()))
    for request in range(REQUESTS):
        own = [frame for frame in found if frame.id == request]  # type: ignore[union-attr]
        assert [one.delta.tokens for one in own[:-1]] == list(range(TOKENS))  # type: ignore[union-attr]
        assert isinstance(own[-1], wire.Done)
