"""Samples of the whole host for whoever subscribes. While nobody does, nothing is computed; two that ask at once share one reading."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

import power_lab
from power_lab.engine.host import protocol as wire
from power_lab.engine.host.gauges import Gauges, Reading
from power_lab.engine.host.threads import on_thread
from power_lab.engine.revision import code_digest
from power_lab.engine.subscription import GAUGES_S
from power_lab.engine.vitals import EngineVitals, Vitals, checked, rated
from power_lab.errors import QueueFull

if TYPE_CHECKING:
    from power_lab.engine.host.connection import Connection
    from power_lab.engine.host.lease import Hosted
    from power_lab.engine.host.server import Host

SUBSCRIPTIONS = 8  # of one client
SHARED_S = 0.02  # how old a reading may be that another subscriber asked for
BACKLOG = 64 << 10  # unread bytes above which a subscriber gets no sample


@dataclass(frozen=True, slots=True)
class _Beat:
    """The engines at one moment, by key. at: monotonic seconds."""

    at: float
    engines: dict[str, EngineVitals]


class Pulse:
    """Of one host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._beat = _Beat(float("-inf"), {})
        self._gauges = Gauges()
        self._reading = Reading()
        self._read_at = float("-inf")
        self._asking: asyncio.Future[Reading] | None = None
        self._subscribed: dict[Connection, int] = {}

    @property
    def subscribers(self) -> int:
        return sum(self._subscribed.values())

    async def stream(self, client: Connection, frame: wire.Subscribe) -> None:
        """Send samples until the task is cancelled. Raises ConfigError, QueueFull."""
        period = 1 / checked(frame.hz)
        if self._subscribed.get(client, 0) >= SUBSCRIPTIONS:
            raise QueueFull(f"A client has at most {SUBSCRIPTIONS} subscriptions.", "Cancel one.")
        self._subscribed[client] = self._subscribed.get(client, 0) + 1
        try:
            await self._send(client, frame.id, period)
        finally:
            self._subscribed[client] -= 1
            if not self._subscribed[client]:
                del self._subscribed[client]

    async def _send(self, client: Connection, request: int, period: float) -> None:
        await self._gauge()
        before: _Beat | None = None
        seq, due = 0, time.monotonic()
        while True:
            if client.backlog <= BACKLOG:
                beat = self._now()
                seq += 1
                client.send(wire.Sample(id=request, vitals=self._vitals(beat, before, seq)))
                before = beat
            due = max(due + period, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            self._gauge_behind()

    def _now(self) -> _Beat:
        now = time.monotonic()
        if now - self._beat.at > SHARED_S:
            engines = {hosted.key: self._engine(hosted) for hosted in self._host.engines}
            clients = self._clients()  # behind the engines: who submitted a run that they tell of is known by now
            self._beat = _Beat(now, {key: _named(engine, clients) for key, engine in engines.items()})
        return self._beat

    def _clients(self) -> dict[tuple[str, int], str]:
        """(engine, run) -> whose."""
        clients: dict[tuple[str, int], str] = {}
        for client in self._host.clients:
            clients |= {(run.hosted.key, run.ticket.id): client.title for run in client.runs if run.ticket is not None}
        return clients

    def _engine(self, hosted: Hosted) -> EngineVitals:
        holders = tuple(sorted(holder.title for holder in hosted.holders))
        if hosted.engine is None:
            return EngineVitals(
                engine=hosted.key,
                model=hosted.config.model,
                device=hosted.config.device,
                mode=hosted.config.mode,
                state="loading",
                stage=hosted.stage,
                clients=holders,
            )
        vitals = hosted.engine.vitals()
        ends_in = self._host.engine_ends_in_s(hosted)
        return msgspec.structs.replace(vitals, engine=hosted.key, clients=holders, ends_in_s=ends_in)

    def _vitals(self, beat: _Beat, before: _Beat | None, seq: int) -> Vitals:
        then = before.engines if before is not None else {}
        seconds = beat.at - before.at if before is not None else 0.0
        return Vitals(
            at=time.time(),
            seq=seq,
            pid=os.getpid(),
            package=power_lab.__version__,
            revision=code_digest(),
            uptime_s=self._host.uptime_s,
            resident=self._reading.resident,
            clients=tuple(sorted(client.title for client in self._host.clients)),
            ends_in_s=self._host.ends_in_s,
            engines=tuple(rated(one, then.get(key), seconds) for key, one in beat.engines.items()),
            device=self._reading.device,
        )

    async def _gauge(self) -> None:
        """Ask the device, where that was not done in the last second."""
        self._gauge_behind()
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=GAUGES_S)

    def _gauge_behind(self) -> None:
        """The same without waiting: on a side thread, for a driver may take its time."""
        now = time.monotonic()
        if self._asking is not None or now - self._read_at < GAUGES_S:
            return
        self._read_at = now
        engines = [hosted.engine for hosted in self._host.engines if hosted.engine is not None]
        cuda = any(engine.facts.device != "cpu" for engine in engines)
        self._asking = on_thread(lambda: self._gauges.read(cuda), "gauges")
        self._asking.add_done_callback(self._gauged)

    def _gauged(self, asking: asyncio.Future[Reading]) -> None:
        self._asking = None
        if (error := asking.exception()) is None:
            self._reading = asking.result()
        else:
            self._host.log.warning("the device could not be asked: %s", error)


def _named(engine: EngineVitals, clients: dict[tuple[str, int], str]) -> EngineVitals:
    """With the client of each run; one that the host began by itself, as for a lens, has none."""
    runs = tuple(msgspec.structs.replace(run, client=clients.get((engine.engine, run.run), "")) for run in engine.runs)
    return msgspec.structs.replace(engine, runs=runs)
