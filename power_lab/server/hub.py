"""Fans the host's samples out to pages, each at its own rate, and carries pages' orders to the host.

Pages that ask for the same rate share one subscription, so rates (tokens a second) are always over the time that the page shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from logging import Logger
from typing import Protocol

from power_lab.engine.host import protocol as wire
from power_lab.engine.host.place import Place
from power_lab.errors import HostUnavailable, QueueFull
from power_lab.server import messages, orders
from power_lab.server.link import Absent, HostLink, Present, State

PAGE_LIMIT = 128
REPEAT_S = 1.0
"""How often pages are told again that there is no host: silence means that the server is gone."""


class Page(Protocol):
    """A websocket."""

    hz: float

    def offer(self, text: str) -> None:
        """Show this as soon as possible; what was offered before and is not sent yet is dropped."""


class Channel:
    """One subscription of the host and the pages that share it."""

    def __init__(self) -> None:
        self.pages: set[Page] = set()
        self.number = 0
        self.latest = ""

    def take(self, sample: wire.Sample) -> None:
        self.latest = messages.vitals_text(sample.vitals)
        for page in self.pages:
            page.offer(self.latest)


class Hub:
    """All pages and the one link."""

    def __init__(self, place: Callable[[], Place], log: Logger) -> None:
        self._log = log
        self.link = HostLink(place, log, self._changed)
        self._channels: dict[float, Channel] = {}
        self._pages: set[Page] = set()
        self._repeating: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._pages)

    def join(self, page: Page) -> None:
        """A page opens. Raises QueueFull."""
        if len(self._pages) >= PAGE_LIMIT:
            raise QueueFull(f"{PAGE_LIMIT} pages are connected already.", "Close some.")
        self._pages.add(page)
        self.link.hold()
        if self._repeating is None:
            self._repeating = asyncio.get_running_loop().create_task(self._repeat())
        self._listen(page)

    async def leave(self, page: Page) -> None:
        """A page closes."""
        if page not in self._pages:
            return
        self._pages.discard(page)
        self._ignore(page)
        if not self._pages and self._repeating is not None:
            self._repeating.cancel()
            self._repeating = None
        await self.link.let_go()

    def rate(self, page: Page, hz: float) -> None:
        """A page wants another rate; 0 pauses it."""
        if hz != page.hz:
            self._ignore(page)
            page.hz = hz
            self._listen(page)

    async def order(self, order: messages.Order) -> messages.Done | messages.Failed:
        """Carry an order out and say how it went."""
        try:
            await orders.carry_out(order, self.link)
        except (orders.PowerLabError, TimeoutError) as error:
            return messages.failed(order.id, error)
        return messages.Done(order.id)

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _listen(self, page: Page) -> None:
        if page.hz == 0:
            return
        channel = self._channels.setdefault(page.hz, Channel())
        channel.pages.add(page)
        if not isinstance(self.link.state, Present):
            page.offer(_told(self.link.state))
        elif not channel.number:
            self._subscribe(page.hz, channel)
        elif channel.latest:
            page.offer(channel.latest)

    def _ignore(self, page: Page) -> None:
        channel = self._channels.get(page.hz)
        if channel is None:
            return
        channel.pages.discard(page)
        if not channel.pages:
            del self._channels[page.hz]
            self.link.unsubscribe(channel.number)

    def _subscribe(self, hz: float, channel: Channel) -> None:
        try:
            channel.number = self.link.subscribe(hz, channel.take)
        except HostUnavailable:  # it ended in this moment: the link is about to say so
            channel.number = 0

    def _changed(self) -> None:
        """The host came, went, or refuses."""
        here = isinstance(self.link.state, Present)
        for hz, channel in self._channels.items():
            channel.number, channel.latest = 0, ""
            if here:
                self._subscribe(hz, channel)
        if not here:
            self._tell()

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(REPEAT_S)
            if not isinstance(self.link.state, Present):
                self._tell()

    def _tell(self) -> None:
        text = _told(self.link.state)
        for channel in self._channels.values():
            for page in channel.pages:
                page.offer(text)


def _told(state: State) -> str:
    if isinstance(state, Absent):
        return messages.text_of(messages.NoHost(state.at))
    assert not isinstance(state, Present)
    return messages.text_of(messages.Trouble(state.message, state.remedy))
