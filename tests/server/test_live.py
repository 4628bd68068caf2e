"""A page that reads slowly: what waits for it."""

from __future__ import annotations

import asyncio
import json

import pytest

from power_lab.errors import ConfigError
from power_lab.server import messages
from power_lab.server.live import ORDERS, LiveHandler


class SlowPage(LiveHandler):
    """Its socket takes a message only when told."""

    def __init__(self) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.initialize(hub=None)  # type: ignore[arg-type]
        self.ws_connection = object()  # type: ignore[assignment]
        self.room = asyncio.Semaphore(0)
        self.sent: list[str] = []

    async def write_message(self, message: str) -> None:  # type: ignore[override]
        await self.room.acquire()
        self.sent.append(message)


def test_only_the_newest_sample_and_the_replies_wait():
    async def run() -> None:
        page = SlowPage()
        for number in range(1000):
            page.offer(str(number))
            if number == 0:
                await asyncio.sleep(0)  # the first is under way
        for number in range(ORDERS):
            page._reply(messages.Done(number))
        for _ in range(ORDERS + 2):
            page.room.release()
        await asyncio.wait_for(page._writing, 10)  # type: ignore[arg-type]
        replies = [messages.text_of(messages.Done(number)) for number in range(ORDERS)]
        assert page.sent == ["0", *replies, "999"]

    asyncio.run(run())


@pytest.mark.parametrize("hz", [0.1, 21, -1, 1e300])
def test_rates_have_bounds(hz: float):
    with pytest.raises(ConfigError, match="hz"):
        messages.read(json.dumps({"kind": "rate", "hz": hz}))


@pytest.mark.parametrize("hz", [0, 0.2, 3.5, 20])
def test_rates_within_them_are_taken(hz: float):
    assert messages.read(json.dumps({"kind": "rate", "hz": hz})) == messages.Rate(hz)
