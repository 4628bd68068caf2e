"""Samples of an engine in this process, from a thread of their own: the twin of a subscription at the host."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

import msgspec

import power_lab
from power_lab.engine.host.gauges import Gauges, Reading
from power_lab.engine.revision import code_digest
from power_lab.engine.vitals import EngineVitals, Vitals, checked, rated

GAUGES_S = 1.0  # how often the device is asked


class Subscription:
    """Runs until `close`.

    Args:
        vitals: the engine as it is now. closed: whether it is over, which ends this.
        on_vitals: called with each sample. hz: 0.2..20 of them a second.

    Raises ConfigError for another rate.
    """

    def __init__(
        self,
        vitals: Callable[[], EngineVitals],
        closed: Callable[[], bool],
        on_vitals: Callable[[Vitals], None],
        hz: float,
    ) -> None:
        self._vitals, self._closed, self._on_vitals = vitals, closed, on_vitals
        self._period = 1 / checked(hz)
        self._gauges, self._reading, self._read_at = Gauges(), Reading(), float("-inf")
        self._end = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="power-lab-vitals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more samples. Idempotent."""
        self._end.set()

    def _run(self) -> None:
        before: tuple[float, EngineVitals] | None = None
        seq, due = 0, time.monotonic()
        while not self._end.is_set() and not self._closed():
            seq, now = seq + 1, time.monotonic()
            engine = self._vitals()
            sample = rated(engine, before[1], now - before[0]) if before is not None else engine
            before = now, engine
            with contextlib.suppress(Exception):  # a listener's error is its own
                self._on_vitals(self._sample(sample, seq))
            due = max(due + self._period, time.monotonic())
            self._end.wait(due - time.monotonic())

    def _sample(self, engine: EngineVitals, seq: int) -> Vitals:
        now = time.monotonic()
        if now - self._read_at >= GAUGES_S:
            self._read_at = now
            with contextlib.suppress(RuntimeError):  # of a driver: the last reading stands
                self._reading = self._gauges.read(engine.device != "cpu")
        return Vitals(
            at=time.time(),
            seq=seq,
            pid=os.getpid(),
            package=power_lab.__version__,
            revision=code_digest(),
            uptime_s=now - self._began,
            resident=self._reading.resident,
            clients=(),
            ends_in_s=None,
            engines=(msgspec.structs.replace(engine, engine="local"),),
            device=self._reading.device,
        )
