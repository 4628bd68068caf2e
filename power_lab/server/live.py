"""`api/live`: the websocket of a page.

To the page: `{"kind": "vitals", ...}` at its rate, `nohost` and `error` instead where there is none, `done` and `failed` as replies.
From the page: `{"kind": "rate", "hz": 0.2 to 20, or 0 to pause}`, and `stop`, `unload`, `restart` with `id` and `engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

from jupyter_core.utils import ensure_async
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from tornado import web
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from power_lab.errors import ConfigError, PowerLabError
from power_lab.server import messages
from power_lab.server.hub import Hub

RESOURCE = "power_lab"
FIRST_HZ = 1.0
ORDERS = 16
"""Orders of one page that may be under way, and replies that may wait for a page that does not read."""

_TOO_BIG, _TRY_LATER, _POLICY = 1009, 1013, 1008


class LiveHandler(WebSocketMixin, WebSocketHandler, JupyterHandler):  # pyright: ignore[reportIncompatibleMethodOverride]
    """One page. Nothing queues for it but the newest sample and the replies to its own orders."""

    auth_resource = RESOURCE

    def initialize(self, hub: Hub) -> None:
        self._hub = hub
        self.hz = FIRST_HZ
        self._newest = ""
        self._replies: deque[str] = deque(maxlen=2 * ORDERS)
        self._writing: asyncio.Task[None] | None = None
        self._orders: set[asyncio.Task[None]] = set()

    @property
    def max_message_size(self) -> int:
        return messages.MESSAGE_LIMIT

    async def get(self, *args: Any, **kwargs: Any) -> None:
        """Open, for a user who may execute: the page can stop engines."""
        user = self.current_user
        if user is None:
            raise web.HTTPError(403)
        if not await ensure_async(self.authorizer.is_authorized(self, user, "execute", RESOURCE)):
            raise web.HTTPError(403, "not allowed to use Power Lab's engines")
        await ensure_async(super().get(*args, **kwargs))

    def open(self, *args: Any, **kwargs: Any) -> None:
        super().open(*args, **kwargs)
        try:
            self._hub.join(self)
        except PowerLabError as error:
            self.close(_TRY_LATER, error.message)

    async def on_message(self, message: str | bytes) -> None:
        try:
            asked = messages.read(message)
        except ConfigError as error:
            self._reply(messages.Trouble(error.message, error.remedy))
            return
        if isinstance(asked, messages.Rate):
            self._newest = ""
            self._hub.rate(self, asked.hz)
        elif len(self._orders) >= ORDERS:
            self._reply(messages.Failed(asked.id, f"{ORDERS} orders are under way.", "Wait for their replies."))
        else:
            task = asyncio.get_running_loop().create_task(self._carry_out(asked))
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)

    def on_close(self) -> None:
        super().on_close()
        if self.ping_callback is not None:
            self.ping_callback.stop()
        if self._writing is not None:
            self._writing.cancel()
        self._leaving = asyncio.get_running_loop().create_task(self._hub.leave(self))

    def offer(self, text: str) -> None:
        """Send `text` once what is being sent is out; a newer one takes its place."""
        self._newest = text
        self._wake()

    # --- inside -----------------------------------------------------------------------------------------------------------------

    async def _carry_out(self, order: messages.Order) -> None:
        self._reply(await self._hub.order(order))

    def _reply(self, message: messages.ToPage) -> None:
        self._replies.append(messages.text_of(message))
        self._wake()

    def _wake(self) -> None:
        if self.ws_connection is not None and (self._writing is None or self._writing.done()):
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        """Until nothing waits. `write_message` ends when the page's socket has taken the bytes, so a slow page gets fewer samples."""
        with contextlib.suppress(WebSocketClosedError):
            while self._replies or self._newest:
                if self._replies:
                    text = self._replies.popleft()
                else:
                    text, self._newest = self._newest, ""
                await self.write_message(text)
