"""What a page may order: stop, unload, restart."""

from __future__ import annotations

import asyncio
import contextlib
import os

import msgspec

from power_lab.engine.config import EngineConfig
from power_lab.engine.host import protocol as wire
from power_lab.errors import EngineClosed, HostUnavailable, PowerLabError
from power_lab.server import messages
from power_lab.server.link import HANDSHAKE_S, SAMPLE_LIMIT, HostLink, Present, greet

ANSWER_S = 15.0
LOAD_S = 600.0

__all__ = ["PowerLabError", "carry_out", "status"]


async def carry_out(order: messages.Order, link: HostLink) -> None:
    """Do it. Raises the host's typed error, HostUnavailable, TimeoutError."""
    match order:
        case messages.Stop():
            await link.ask(lambda number: wire.Stop(id=number, engine=order.engine), ANSWER_S)
        case messages.Unload():
            await link.ask(lambda number: wire.Release(id=number, engine=order.engine), ANSWER_S)
        case messages.Restart():
            config = await _config(order.engine, link)
            await link.ask(lambda number: wire.Release(id=number, engine=order.engine), ANSWER_S)
            await _load(config, link)


async def status(link: HostLink) -> wire.HostStatus:
    """Clients and engines of the host. Raises HostUnavailable, TimeoutError."""
    reply = await link.ask(lambda number: wire.Query(id=number, kind="engines"), ANSWER_S)
    if not isinstance(reply, wire.Answer):
        raise HostUnavailable(f"The engine host answered with {type(reply).__name__}.", "Restart JupyterLab.")
    return msgspec.msgpack.decode(reply.value, type=wire.HostStatus)


async def _config(engine: str, link: HostLink) -> EngineConfig:
    for found in (await status(link)).engines:
        if found.engine == engine:
            return found.config
    raise EngineClosed(f"There is no engine {engine!r}.", "Load it in a notebook.")


async def _load(config: EngineConfig, link: HostLink) -> None:
    """Load as a client of a moment, since an observer holds nothing. The engine then waits its idle time for the notebooks."""
    if not isinstance(link.state, Present) or link.path is None:
        raise HostUnavailable("The engine host has ended.", "A new one starts when it is needed.")
    reader, writer = await asyncio.open_unix_connection(os.fspath(link.path))
    try:
        if await asyncio.wait_for(greet(reader, writer, observer=False), HANDSHAKE_S) is None:
            raise HostUnavailable("The engine host is ending.", "A new one starts when it is needed.")
        writer.write(wire.pack(wire.Load(id=1, config=config), wire.REQUEST_LIMIT))
        async with asyncio.timeout(LOAD_S):
            while (body := await wire.read_frame(reader, SAMPLE_LIMIT)) is not None:
                reply = wire.reply_of(body)
                if isinstance(reply, wire.Failure):
                    raise wire.error_of(reply)
                if isinstance(reply, wire.Loaded):
                    return
        raise HostUnavailable("The engine host ended while it loaded.", "Load again in a notebook.")
    except OSError as error:
        raise HostUnavailable(f"The engine host broke off: {error.strerror}.", "Load again in a notebook.") from None
    finally:
        with contextlib.suppress(OSError):
            writer.write(wire.pack(wire.Bye(), wire.REQUEST_LIMIT))
        writer.close()
