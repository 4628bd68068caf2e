"""A real Jupyter server process with our extension, and websockets of pages."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from tornado.httpclient import HTTPRequest
from tornado.simple_httpclient import SimpleAsyncHTTPClient
from tornado.websocket import WebSocketClientConnection, websocket_connect

from tests.hosting import HANG_S

TOKEN = "a-token-for-tests"  # noqa: S105
BASE = "/some/where/"


@dataclass(frozen=True)
class Server:
    """Attributes: url: base address with a slash at the end; log: where it writes."""

    url: str
    log: Path
    pid: int
    pages: list[Page] = field(default_factory=list)

    def at(self, path: str) -> str:
        return f"{self.url}power-lab/{path}"

    @property
    def files(self) -> int:
        return psutil.Process(self.pid).num_fds()

    async def get(self, path: str, *, token: str = TOKEN, method: str = "GET") -> Any:
        """The response, of whatever status."""
        client = SimpleAsyncHTTPClient(force_instance=True)
        try:
            headers = {"Authorization": f"token {token}"} if token else {}
            asked = HTTPRequest(
                self.at(path), method=method, headers=headers, request_timeout=HANG_S, follow_redirects=False
            )
            return await client.fetch(asked, raise_error=False)
        finally:
            client.close()

    async def cookies(self) -> str:
        """What a browser has after the page was opened with its token."""
        given = (await self.get("api/status")).headers.get_list("Set-Cookie")
        return "; ".join(cookie.split(";")[0] for cookie in given)

    async def page(self, *, hz: float | None = None, token: str = TOKEN, cookies: str = "", origin: str = "") -> Page:
        """Open a websocket, by token as a script does, or by cookies as a browser. Raises HTTPClientError where it is refused."""
        headers = {"Cookie": cookies} if cookies else {"Authorization": f"token {token}"} if token else {}
        if origin:
            headers["Origin"] = origin
        request = HTTPRequest(self.at("api/live").replace("http", "ws", 1), headers=headers, connect_timeout=HANG_S)
        page = Page(await websocket_connect(request))
        self.pages.append(page)
        if hz is not None:
            page.send(kind="rate", hz=hz)
        return page


class Page:
    """One websocket."""

    def __init__(self, connection: WebSocketClientConnection) -> None:
        self.socket = connection
        self.closed = False

    async def close(self) -> None:
        """Close and wait for the end; once more does nothing."""
        if self.closed:
            return
        self.closed = True
        self.socket.close()
        while await asyncio.wait_for(self.socket.read_message(), HANG_S) is not None:
            pass

    def send(self, **message: Any) -> None:
        self.socket.write_message(json.dumps(message))

    async def next(self) -> dict[str, Any]:
        """The next message; None at the end is an error."""
        text = await asyncio.wait_for(self.socket.read_message(), HANG_S)
        assert text is not None, f"closed: {self.socket.close_code} {self.socket.close_reason}"
        return json.loads(text)

    async def until(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The next message of this kind with these values."""
        while True:
            message = await self.next()
            if message["kind"] == kind and all(message.get(name) == value for name, value in fields.items()):
                return message

    async def engine(self, **fields: Any) -> dict[str, Any]:
        """The first engine of the next sample in which it has these values."""
        while True:
            for engine in (await self.until("vitals"))["engines"]:
                if all(engine[name] == value for name, value in fields.items()):
                    return engine


@contextmanager
def serve(home: Path, private: Path) -> Iterator[Server]:
    """Start a server as Jupyter does: the extension is found by our configuration folder."""
    import power_lab

    settings = Path(power_lab.__file__).parent / "jupyter" / "settings"
    environment = {
        **os.environ,
        "POWER_LAB_HOME": str(home),
        "JUPYTER_CONFIG_PATH": str(settings),
        "JUPYTER_CONFIG_DIR": str(private / "config"),
        "JUPYTER_RUNTIME_DIR": str(private / "runtime"),
        "IPYTHONDIR": str(private / "ipython"),
        "JUPYTER_TOKEN": TOKEN,
    }
    private.mkdir()
    options = [
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.port=0",
        f"--ServerApp.base_url={BASE}",
        "--ServerApp.open_browser=False",
    ]
    options += [f"--ServerApp.root_dir={private}", "--allow-root", "--debug"]
    log = private / "server.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_server", *options],
            env=environment,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    try:
        found = _described(private / "runtime" / f"jpserver-{process.pid}.json", process, log)
        yield Server(found["url"], log, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _described(path: Path, process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            found = json.loads(path.read_text())
            socket.create_connection(
                ("127.0.0.1", found["port"]), HANG_S
            ).close()  # the file is there a little before the server
            return found
        except (FileNotFoundError, ValueError, ConnectionRefusedError):
            time.sleep(0.05)
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")
