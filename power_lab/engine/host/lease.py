"""Engines in the host, keyed by their resolved configuration, and who holds them. Used on the event loop's thread only.

A client holds a lease on the engines it loaded until it unloads them or its connection ends. An engine that nobody holds and that does
no work is closed after `idle_s`, which is also the grace in which a restarted kernel finds it again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from power_lab.engine.config import EngineConfig, Paths, usable_cores
from power_lab.engine.host.api import EngineLike, Factory
from power_lab.engine.host.threads import on_thread
from power_lab.errors import EngineClosed, EngineInUse
from power_lab.models.files import settled

if TYPE_CHECKING:
    from power_lab.engine.host.connection import Connection

Watch = Callable[[str, int, int], None]

RELEASED = 64  # engines of which is remembered who closed them


def resolved(config: EngineConfig) -> EngineConfig:
    """The configuration with what this machine decides filled in, so that equal engines have equal keys."""
    files = {
        key: str(settled(Path(model)))
        for key, model in (("model", config.model), ("draft", config.draft))
        if Path(model).is_absolute()
    }
    return msgspec.structs.replace(config, threads=config.threads or usable_cores(), **files)


def key_of(config: EngineConfig) -> str:
    """Short digest of a resolved configuration."""
    return hashlib.sha256(b"power-lab/engine/1" + msgspec.msgpack.encode(config)).hexdigest()[:12]


@dataclass(slots=True, eq=False)
class Hosted:
    """One engine: loading until `engine` is there."""

    key: str
    config: EngineConfig
    ready: asyncio.Future[EngineLike]
    engine: EngineLike | None = None
    holders: set[Connection] = field(default_factory=set)
    watches: set[Watch] = field(default_factory=set)
    stage: str = ""
    runs: int = 0
    released: str = ""  # by whom, where that came before it was there
    used: float = field(default_factory=time.monotonic)

    @property
    def idle(self) -> bool:
        return self.engine is not None and not self.holders and not self.runs

    def progress(self, stage: str, done: int, total: int) -> None:
        """A loading stage moved on."""
        self.stage = stage
        for watch in tuple(self.watches):
            watch(stage, done, total)


class Engines:
    """The table."""

    def __init__(self, factory: Factory, paths: Paths, log: Logger) -> None:
        self._factory, self._paths, self._log = factory, paths, log
        self._table: dict[str, Hosted] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._released: OrderedDict[str, str] = OrderedDict()  # key -> who closed it over its holders' heads

    def __iter__(self) -> Iterator[Hosted]:
        return iter(tuple(self._table.values()))

    def __len__(self) -> int:
        return len(self._table) + len(self._closing)

    @property
    def runs(self) -> int:
        return sum(hosted.runs for hosted in self._table.values())

    def held(self, key: str, client: Connection) -> tuple[Hosted, EngineLike]:
        """A ready engine that `client` holds. Raises EngineClosed."""
        hosted = self._table.get(key)
        if hosted is None or hosted.engine is None or client not in hosted.holders:
            raise self._gone(key, f"Engine {key!r} is not loaded for this client.")
        return hosted, hosted.engine

    def ready(self, key: str) -> EngineLike:
        """A loaded engine, for questions. Raises EngineClosed."""
        hosted = self._table.get(key)
        if hosted is None or hosted.engine is None:
            raise self._gone(key, f"There is no engine {key!r}.")
        return hosted.engine

    def _gone(self, key: str, message: str) -> EngineClosed:
        who = self._released.get(key)
        return _closed_by(key, who) if who else EngineClosed(message, "Load it again.")

    async def load(self, config: EngineConfig, replaces: str, client: Connection, watch: Watch) -> tuple[Hosted, bool]:
        """Make or share an engine and lease it to `client`; says whether it was there. Raises EngineInUse, or what loading raises."""
        config = resolved(config)
        key = key_of(config)
        if replaces and replaces != key:
            self._refuse_others(replaces, client)
        hosted = self._table.get(key)
        shared = hosted is not None
        if hosted is None:
            hosted = self._start(key, config)
        hosted.holders.add(client)
        hosted.watches.add(watch)
        try:
            await asyncio.shield(hosted.ready)
        except BaseException:
            hosted.holders.discard(client)
            raise
        finally:
            hosted.watches.discard(watch)
        if replaces and replaces != key:
            self.release(replaces, client)
        return hosted, shared

    def release(self, key: str, client: Connection) -> None:
        """Drop a lease in good order: an engine that is left unused is closed at once."""
        hosted = self._table.get(key)
        if hosted is not None and client in hosted.holders:
            hosted.holders.discard(client)
            hosted.used = time.monotonic()
            if hosted.idle:
                self.close(hosted, "its last client unloaded it")

    def evict(self, key: str, who: str) -> None:
        """Close an engine whoever holds it; one that is loading, as soon as it is there. Raises EngineClosed where there is none."""
        hosted = self._table.get(key)
        if hosted is None:
            raise self._gone(key, f"There is no engine {key!r}.")
        if hosted.engine is None:
            hosted.released = who
            return
        self._remember(key, who)
        self.close(hosted, f"{who} released it")

    def _remember(self, key: str, who: str) -> None:
        self._released[key] = who
        while len(self._released) > RELEASED:
            self._released.popitem(last=False)

    def forget(self, client: Connection) -> None:
        """The client's connection ended: its leases end, its engines keep their idle time."""
        for hosted in self._table.values():
            if client in hosted.holders:
                hosted.holders.discard(client)
                hosted.used = time.monotonic()

    def drop(self, key: str) -> None:
        """The engine closed itself; the next load makes a new one."""
        self._table.pop(key, None)

    def sweep(self, idle_s: float) -> None:
        """Close what was unused for `idle_s`."""
        for hosted in tuple(self._table.values()):
            if hosted.idle and time.monotonic() - hosted.used >= idle_s:
                self.close(hosted, f"it was idle for {idle_s:.0f} s")

    def close(self, hosted: Hosted, why: str) -> None:
        """Take an engine out of the table and free it on a thread of its own."""
        self._log.info("engine %s closes: %s", hosted.key, why)
        self._table.pop(hosted.key, None)
        engine, hosted.engine = hosted.engine, None
        if engine is not None:
            closing = on_thread(engine.close, f"close-{hosted.key}")
            self._closing.add(closing)
            closing.add_done_callback(self._closed)

    async def close_all(self, timeout: float) -> None:
        """Close every engine and wait for it at most `timeout` seconds."""
        for hosted in tuple(self._table.values()):
            self.close(hosted, "the host ends")
        if self._closing:
            await asyncio.wait(self._closing, timeout=timeout)

    def _closed(self, closing: asyncio.Future[None]) -> None:
        self._closing.discard(closing)
        if error := closing.exception():
            self._log.error("an engine failed to close", exc_info=error)

    def _refuse_others(self, key: str, client: Connection) -> None:
        hosted = self._table.get(key)
        others = sorted(one.title for one in hosted.holders if one.pid != client.pid) if hosted else []
        if others:
            raise EngineInUse(
                f"The engine is also used by {', '.join(others)}.",
                "Use lab.load(...) with other settings for an engine of your own, or close those notebooks first.",
            )

    def _start(self, key: str, config: EngineConfig) -> Hosted:
        loop = asyncio.get_running_loop()
        hosted = Hosted(key, config, loop.create_future())
        self._table[key] = hosted
        self._released.pop(key, None)
        self._log.info("engine %s loads %r", key, Path(config.model).name)

        def progress(stage: str, done: int, total: int) -> None:
            loop.call_soon_threadsafe(hosted.progress, stage, done, total)

        loading = on_thread(lambda: self._factory(config, paths=self._paths, progress=progress), f"load-{key}")
        loading.add_done_callback(lambda done: self._loaded(hosted, done))
        return hosted

    def _loaded(self, hosted: Hosted, loading: asyncio.Future[EngineLike]) -> None:
        error = loading.exception()
        hosted.used = time.monotonic()
        if error is None and hosted.released:
            hosted.engine, error = loading.result(), _closed_by(hosted.key, hosted.released)
            self._remember(hosted.key, hosted.released)
            self.close(hosted, f"{hosted.released} released it")
        elif error is None:
            self._log.info("engine %s is ready", hosted.key)
            hosted.engine = loading.result()
            hosted.ready.set_result(hosted.engine)
            return
        else:
            self._log.error("engine %s failed to load", hosted.key, exc_info=error)
            self._table.pop(hosted.key, None)
        hosted.ready.set_exception(error)
        hosted.ready.exception()  # retrieved: all who waited may be gone


def _closed_by(key: str, who: str) -> EngineClosed:
    return EngineClosed(
        f"Engine {key!r} was closed by {who}.", "Load the model again: lab.load(...), or simply generate."
    )
