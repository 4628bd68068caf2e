"""`api/status`, and BokehJS as files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from tornado import web

import power_lab
from power_lab.errors import PowerLabError
from power_lab.server import orders
from power_lab.server.hub import Hub
from power_lab.server.link import Present
from power_lab.server.live import RESOURCE

SETTLE_S = 3.0


class StatusHandler(APIHandler):
    """The package, and the host as `HostStatus` (null where none runs) or what is wrong with it."""

    auth_resource = RESOURCE

    def initialize(self, hub: Hub) -> None:
        self._hub = hub

    @web.authenticated
    @authorized
    async def get(self) -> None:
        host, error = None, None
        link = self._hub.link
        async with link.held():
            try:
                state = await asyncio.wait_for(link.settled(), SETTLE_S)
                if isinstance(state, Present):
                    host = await orders.status(link)
                elif (message := getattr(state, "message", "")) != "":
                    error = {"message": message, "remedy": getattr(state, "remedy", "")}
            except PowerLabError as caught:
                error = {"message": caught.message, "remedy": caught.remedy}
            except TimeoutError:
                error = {
                    "message": "The engine host does not answer.",
                    "remedy": "`power-lab doctor` names its process.",
                }
        self.set_header("Cache-Control", "no-store")
        answer = {"package": power_lab.__version__, "pages": len(self._hub), "host": host, "error": error}
        self.finish(msgspec.json.encode(answer))


def bokeh_folder() -> Path | None:
    """The installed BokehJS, found without importing bokeh."""
    from importlib.util import find_spec

    found = find_spec("bokeh")
    return None if found is None or found.origin is None else Path(found.origin).parent / "server" / "static"


class BokehHandler(JupyterHandler, web.StaticFileHandler):  # pyright: ignore[reportIncompatibleMethodOverride]
    """BokehJS's scripts, to logged-in users. The version in the query makes an answer good for ever; without it the page asks again."""

    auth_resource = RESOURCE

    @web.authenticated
    @authorized
    async def get(self, path: str, include_body: bool = True) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await web.StaticFileHandler.get(self, path, include_body)

    @web.authenticated
    @authorized
    async def head(self, path: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - tornado's is a plain call of get
        await web.StaticFileHandler.head(self, path)

    def set_extra_headers(self, path: str) -> None:
        kept = "v" in self.request.arguments
        self.set_header("Cache-Control", "private, max-age=31536000, immutable" if kept else "private, no-cache")
        self.set_header("X-Content-Type-Options", "nosniff")
