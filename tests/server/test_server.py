"""The extension in a real Jupyter server, with real engine hosts (fake engine), as pages see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from tornado.httpclient import HTTPClientError

import power_lab
from power_lab.engine.request import SamplingParams
from power_lab.errors import EngineClosed
from tests.hosting import HANG_S, Home, eventually, kill
from tests.server.serving import TOKEN, Server


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        async def whole() -> None:
            try:
                await test(*args, **fixtures)
            finally:
                for page in fixtures["server"].pages:
                    await page.close()

        asyncio.run(whole())

    return run


@on_loop
async def test_without_a_host_pages_are_told_so_again_and_again_and_nothing_is_started(server: Server, home: Home):
    status = await server.get("api/status")
    assert status.code == 200
    assert b'"host":null' in status.body
    assert power_lab.__version__.encode() in status.body
    page = await server.page(hz=20)
    first = await page.until("nohost")
    assert (await page.until("nohost"))["at"] == first["at"]
    page.send(kind="stop", id=1, engine="none")
    assert "No engine host" in (await page.until("failed", id=1))["message"]
    assert not home.hosts()


@on_loop
async def test_a_host_that_starts_and_ends_and_starts_again_is_noticed(server: Server, home: Home):
    page = await server.page(hz=5)
    await page.until("nohost")
    for _ in range(2):
        client = await asyncio.to_thread(home.client)
        begun = time.monotonic()
        vitals = await page.until("vitals")
        assert (vitals["pid"], vitals["engines"]) == (client.pid, [])
        assert time.monotonic() - begun < HANG_S
        await asyncio.to_thread(kill, client.pid)  # its socket file stays
        await page.until("nohost")


@on_loop
async def test_pages_get_their_own_rates_and_can_pause(server: Server, home: Home):
    await asyncio.to_thread(home.engine)
    quick, slow, paused = await server.page(hz=20), await server.page(hz=1), await server.page(hz=0)
    await quick.engine(state="ready")
    await slow.until("vitals")
    counts = {"quick": 0, "slow": 0, "paused": 0}

    async def count(name: str, page: Any) -> None:
        while True:
            await page.until("vitals")
            counts[name] += 1

    tasks = [
        asyncio.create_task(count(name, page))
        for name, page in {"quick": quick, "slow": slow, "paused": paused}.items()
    ]
    while counts["slow"] < 3:
        await asyncio.sleep(0.05)
    assert counts["quick"] > 2 * counts["slow"]
    assert counts["paused"] <= 1, "the first sample may have been under way"
    before = counts["paused"]
    paused.send(kind="rate", hz=10)
    while counts["paused"] < before + 3:
        await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    status = await server.get("api/status")
    assert b'"pages":3' in status.body


@on_loop
async def test_stop_unload_and_restart(server: Server, home: Home):
    page = await server.page(hz=20)
    engine = await asyncio.to_thread(home.engine)
    run = engine.submit("slow", SamplingParams(max_tokens=100_000))
    await page.engine(engine=engine.key, running=1)
    page.send(kind="stop", id=1, engine=engine.key)
    await page.until("done", id=1)
    assert (await asyncio.to_thread(run.result, HANG_S)).finish == "cancelled"

    page.send(kind="restart", id=2, engine=engine.key)
    await page.until("done", id=2)
    fresh = await page.engine(engine=engine.key, state="ready")
    assert fresh["clients"] == [], "loaded again with the same settings, and waiting for its notebooks"
    with pytest.raises(EngineClosed):
        await asyncio.to_thread(lambda: engine.submit("hi", SamplingParams(max_tokens=2)).result(HANG_S))
    again = await asyncio.to_thread(lambda: home.engine(engine.client))
    assert again.key == engine.key

    page.send(kind="unload", id=3, engine=engine.key)
    await page.until("done", id=3)
    while (await page.until("vitals"))["engines"]:
        pass
    for number, kind in enumerate(("stop", "unload", "restart"), 10):
        page.send(kind=kind, id=number, engine="no-such")
        assert "no-such" in (await page.until("failed", id=number))["message"]


@on_loop
async def test_strangers_are_refused_and_nonsense_is_answered(server: Server, home: Home):
    cookies = await server.cookies()
    assert "username" in cookies
    for refused in ({"token": ""}, {"token": "wrong"}, {"cookies": cookies, "origin": "http://elsewhere.example"}):
        with pytest.raises(HTTPClientError) as caught:
            await server.page(**refused)
        assert caught.value.code == 403
    for path in ("api/status", "bokeh/js/bokeh.min.js"):
        assert (await server.get(path, token="")).code in (302, 403)
    page = await server.page(hz=0, cookies=cookies, origin="/".join(server.url.split("/")[:3]))
    for nonsense in (
        '{"kind":"rate","hz":1000}',
        '{"kind":"rate","hz":NaN}',
        '{"kind":"fly"}',
        "[" * 3000,
        "{}",
        '{"kind":"stop","id":1}',
    ):
        page.socket.write_message(nonsense)
        await page.until("error")
    page.socket.write_message(b"\xff\xfe", binary=True)
    await page.until("error")
    page.socket.write_message("x" * 5000)
    assert await asyncio.wait_for(page.socket.read_message(), HANG_S) is None, "too large a message ends the connection"
    page.closed = True
    page.socket.close()
    assert TOKEN not in server.log.read_text()


@on_loop
async def test_the_only_page_is_told_of_the_same_host_again_after_each_reload(server: Server, home: Home):
    await asyncio.to_thread(home.engine)
    for _ in range(4):
        page = await server.page(hz=20)
        await page.until("vitals")
        await page.close()
        await asyncio.sleep(0.3)  # the last page gone, the server's link is let go


@on_loop
async def test_a_hundred_pages_come_and_go_and_leave_no_file_open(server: Server, home: Home):
    await asyncio.to_thread(home.engine)
    first = await server.page(hz=20)
    await first.until("vitals")
    before = await asyncio.to_thread(lambda: server.files)
    for _ in range(100):
        page = await server.page(hz=20)
        await page.until("vitals")
        await page.close()
    await asyncio.to_thread(eventually, lambda: server.files <= before + 1)
    await first.close()
    await asyncio.to_thread(eventually, lambda: server.files < before)
    client = await asyncio.to_thread(home.client)
    await asyncio.to_thread(eventually, lambda: all(not one.observer for one in client.status().clients))


@on_loop
async def test_bokehjs_comes_from_the_installed_package_and_nothing_else_does(server: Server):
    import bokeh

    script = await server.get(f"bokeh/js/bokeh.min.js?v={bokeh.__version__}")
    assert script.code == 200
    assert script.headers["Content-Type"].split(";")[0] in ("text/javascript", "application/javascript")
    assert "immutable" in script.headers["Cache-Control"]
    assert bokeh.__version__.encode() in script.body
    plain = await server.get("bokeh/js/bokeh-widgets.min.js")
    assert (plain.code, plain.headers["Cache-Control"]) == (200, "private, no-cache")
    for path in (
        "bokeh/js/compiler.js",
        "bokeh/js/../../views/ws.py",
        "bokeh/js/%2e%2e/%2e%2e/core.py",
        "bokeh/",
        "bokeh/js/bokeh.json",
    ):
        assert (await server.get(path)).code in (302, 403, 404), path
