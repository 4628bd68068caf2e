"""The engine host: an asyncio server on a private Unix socket; every engine runs on a thread of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from logging import Logger
from pathlib import Path

import msgspec

import power_lab
from power_lab.engine.config import HostSettings, Paths
from power_lab.engine.host import protocol as wire
from power_lab.engine.host.api import EngineLike, Factory
from power_lab.engine.host.connection import Connection
from power_lab.engine.host.lease import Engines, Hosted
from power_lab.engine.host.log import log_path
from power_lab.engine.host.place import peer
from power_lab.engine.host.pulse import Pulse
from power_lab.engine.revision import code_digest
from power_lab.errors import EngineClosed, EngineInUse

CLIENT_LIMIT = 256
SWEEP_S = 0.25
CANCEL_S = 10.0


class Host:
    """Clients, engines and the end of the process."""

    def __init__(self, settings: HostSettings, paths: Paths, factory: Factory, log: Logger) -> None:
        self.log, self.log_path = log, log_path(paths)
        self.engines = Engines(factory, paths, log)
        self._settings = settings
        self._clients: set[Connection] = set()
        self._connections = 0
        self._handlers: set[asyncio.Task[None]] = set()
        self._started = self._lonely = time.monotonic()
        self._draining: bool | None = None
        self._stopping = asyncio.Event()
        self.pulse = Pulse(self)

    async def run(self, listener: socket.socket, ready: Callable[[], None]) -> None:
        """Serve until told to stop, or until nobody needs this host any more."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: self.stop(drain=True))
        server = await asyncio.start_unix_server(self._accept, sock=listener)
        path = Path(listener.getsockname())
        ready()
        self.log.info("host of revision %s listens", code_digest())
        sweeper = loop.create_task(self._sweep())
        await self._stopping.wait()
        sweeper.cancel()
        server.close()
        path.unlink(missing_ok=True)
        await self._finish()

    def stop(self, *, drain: bool) -> None:
        """Take no more work; end when running requests have ended (at once without `drain`)."""
        if self._draining is None:
            self.log.info("host ends%s", " after its running requests" if drain else "")
            self._draining = drain
            self._stopping.set()

    def welcome(self, client: Connection) -> wire.Welcome:
        """What a new client learns of this host."""
        return wire.Welcome(
            protocol=wire.PROTOCOL,
            package=power_lab.__version__,
            revision=code_digest(),
            pid=os.getpid(),
            log=str(self.log_path),
            clients=tuple(sorted(one.title for one in self._clients if one is not client and not one.observer)),
            engines=len(self.engines),
        )

    def join(self, client: Connection) -> None:
        """A client has introduced itself."""
        self._clients.add(client)
        self.log.info("client %s %s", client.title, "observes" if client.observer else "joins")

    def leave(self, client: Connection) -> None:
        """A client is gone, with all its leases."""
        self.engines.forget(client)
        if client in self._clients:
            self._clients.discard(client)
            self.log.info("client %s leaves", client.title)

    def refuse_when_draining(self) -> None:
        """Raises EngineClosed."""
        if self._draining is not None:
            raise EngineClosed("The engine host is ending.", "Call again: a new host will be started.")

    def refuse_under_others(self, client: Connection) -> None:
        """Raises EngineInUse that names the other live clients."""
        if others := self._others(client):
            raise EngineInUse(f"The engine host is also used by {', '.join(others)}.", "Close those notebooks first.")

    def reporter(self) -> Callable[[], wire.HostStatus]:
        """A snapshot from the loop's thread; the returned call completes it and may block, so it runs elsewhere."""
        clients = tuple(client.info for client in self._clients)
        rows = [(self._describe(hosted), hosted.engine) for hosted in self.engines]
        ends_in, uptime = self.ends_in_s, self.uptime_s

        def complete() -> wire.HostStatus:
            return wire.HostStatus(
                pid=os.getpid(),
                package=power_lab.__version__,
                revision=code_digest(),
                log=str(self.log_path),
                uptime_s=uptime,
                idle_s=self._settings.idle_s,
                linger_s=self._settings.linger_s,
                ends_in_s=ends_in,
                resident=_resident(),
                clients=clients,
                engines=tuple(_with_status(info, engine) for info, engine in rows),
            )

        return complete

    @property
    def clients(self) -> tuple[Connection, ...]:
        return tuple(self._clients)

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def ends_in_s(self) -> float | None:
        """Seconds until the host ends; None while it is needed."""
        return None if self._needed else max(0.0, self._lonely + self._settings.linger_s - time.monotonic())

    def engine_ends_in_s(self, hosted: Hosted) -> float | None:
        """Seconds until an engine is closed for idleness; None while it is held or works."""
        return max(0.0, hosted.used + self._settings.idle_s - time.monotonic()) if hosted.idle else None

    def stop_runs(self, key: str, who: Connection) -> None:
        """Cancel all runs of an engine, whoever submitted them. Raises EngineClosed."""
        self.engines.ready(key)
        self.log.info("client %s stops the runs of engine %s", who.title, key)
        for client in self.clients:
            for hosted in self.engines:
                if hosted.key == key:
                    client.cancel_all(hosted)

    @property
    def _needed(self) -> bool:
        return bool(len(self.engines) or any(not client.observer for client in self._clients))

    def _others(self, client: Connection) -> tuple[str, ...]:
        """Live clients in other processes; the labs of one notebook do not stand in each other's way."""
        return tuple(sorted(one.title for one in self._clients if one.pid != client.pid and not one.observer))

    def _describe(self, hosted: Hosted) -> wire.EngineInfo:
        return wire.EngineInfo(
            engine=hosted.key,
            config=hosted.config,
            state="loading" if hosted.engine is None else "ready",
            stage="" if hosted.engine is not None else hosted.stage,
            clients=tuple(holder.info for holder in hosted.holders),
            runs=hosted.runs,
            ends_in_s=self.engine_ends_in_s(hosted),
            facts=None,
            status=None,
        )

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, uid = peer(writer.get_extra_info("socket"))
        if uid != os.geteuid() or self._connections >= CLIENT_LIMIT:
            self.log.warning("a connection of pid %d, uid %d is refused (%d are open)", pid, uid, self._connections)
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections += 1
        self._handlers.add(task)
        try:
            await Connection(self, reader, writer, pid).serve()
        finally:
            self._connections -= 1
            self._handlers.discard(task)

    async def _sweep(self) -> None:
        """Close idle engines; end the host when it has had neither engine nor client for a while."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.engines.sweep(self._settings.idle_s)
            now = time.monotonic()
            if self._needed:
                self._lonely = now
            elif now - self._lonely >= self._settings.linger_s:
                self.stop(drain=True)

    async def _finish(self) -> None:
        """Let runs end, cancel those that do not, free the engines, then cut the connections."""
        if self._draining:
            await self._until_quiet(self._settings.drain_s)
        for client in tuple(self._clients):
            client.cancel_all()
        await self._until_quiet(CANCEL_S)
        await self.engines.close_all(CANCEL_S)
        for client in tuple(self._clients):
            client.hang_up()
        if self._handlers:
            await asyncio.wait(tuple(self._handlers), timeout=CANCEL_S)
        self.log.info("host has ended")

    async def _until_quiet(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.engines.runs and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


def _with_status(info: wire.EngineInfo, engine: EngineLike | None) -> wire.EngineInfo:
    if engine is None:
        return info
    return msgspec.structs.replace(info, facts=engine.facts, status=engine.status())


def _resident() -> int:
    import psutil

    return psutil.Process().memory_info().rss
