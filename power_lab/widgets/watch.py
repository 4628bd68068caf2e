"""The live dashboard: what the engine does now, at up to 20 samples a second, also while a cell runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import traitlets

from power_lab.engine.vitals import EngineVitals, Vitals, checked
from power_lab.errors import ConfigError, HostUnavailable, PowerLabError
from power_lab.widgets.history import FIELDS, History
from power_lab.widgets.view import View, script
from power_lab.widgets.watch_page import page, picture, shown

if TYPE_CHECKING:
    import xarray

    from power_lab.engine.config import HostSettings, Paths

KEPT_S = 120  # seconds of history
UNASKED_S = 10.0  # samples go on so long without a page that shows them
REST_HZ, REST_S = 1.0, 900.0
"""While the view is out of sight, and for how long: whoever scrolls back sees what happened meanwhile."""
LEASE = 60  # seconds in which the kernel was free and a page said nothing: the page is gone
FIRST_S = 0.5  # how long the static view waits for its first samples


class Handle(Protocol):
    def close(self) -> None: ...


class Source(Protocol):
    """Where samples come from. Raises PowerLabError where there is nothing to watch; starts nothing."""

    def __call__(
        self, on_vitals: Callable[[Vitals], None], hz: float, on_end: Callable[[PowerLabError], None]
    ) -> Handle: ...


class HostSource:
    """Samples over an observer's connection of their own: it holds no lease, and lives as long as the host."""

    def __init__(self, paths: Paths, settings: HostSettings) -> None:
        self._paths, self._settings = paths, settings

    def __call__(
        self, on_vitals: Callable[[Vitals], None], hz: float, on_end: Callable[[PowerLabError], None]
    ) -> Handle:
        from power_lab.engine.host.client import HostClient

        client = HostClient.find(self._paths, self._settings)
        if client is None:
            raise HostUnavailable("No engine is running.", 'lab.load("smollm2") or lab.generate("Hello") starts one.')
        with ExitStack() as stack:
            stack.callback(client.close)
            feed = client.subscribe(on_vitals, hz, on_end)
            stack.callback(feed.close)  # first, so that our own leaving is not told as an end
            return stack.pop_all()


class Watch(View):
    """Tiles with numbers and their last two minutes, memory and blocks as bars.

    Samples are asked for while a page shows the view and for ten seconds after it was made. While all pages have it out of sight, one
    a second is kept for a quarter of an hour, and nothing is sent.

    Args:
        source: of samples. key: the engine to show, "" for the first one. hz: samples a second, 1..20.

    Attributes:
        facts: state (`none`, `loading`, `live`, `ended`), message, what runs, and the fields that have a tile.
        frame: the latest sample, float64 in the order of `FIELDS`.
    """

    _esm = script("watch")

    rows = "sample"
    facts = traitlets.Dict().tag(sync=True)
    frame = traitlets.Bytes(b"").tag(sync=True)
    fields = traitlets.List(list(FIELDS)).tag(sync=True)
    hz = traitlets.Float(10.0).tag(sync=True)
    kept = traitlets.Int(KEPT_S).tag(sync=True)

    def __init__(self, source: Source, key: Callable[[], str] = lambda: "", hz: float = 10.0) -> None:
        self._lock = threading.RLock()
        self._feed: Handle | None = None
        self._asking = self._resting = False
        if checked(hz) < 1:
            raise ConfigError("hz", f"{hz} is too slow to tell within two seconds that an engine is gone", "Use 1..20.")
        self._source, self._key = source, key
        self._pages: dict[str, int] = {}  # those that show the view -> free seconds since they were heard
        self._heard = self._turned = time.monotonic()
        self._turning = False
        self._shown = threading.Event()
        self.history = History(int(KEPT_S * hz))
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        super().__init__(hz=hz, facts={"state": "none", "message": ""})
        self._begin()
        if self._feed is not None:
            self._shown.wait(FIRST_S)

    @property
    def asking(self) -> bool:
        """Whether samples are asked for now."""
        return self._feed is not None

    @property
    def resting(self) -> bool:
        """Whether they are asked for to keep the history alone."""
        return self.asking and self._resting

    def close(self) -> None:
        self._stop()
        super().close()

    # --- samples ----------------------------------------------------------------------------------------------------------------

    def _begin(self, resting: bool = False) -> None:
        with self._lock:
            if self._feed is not None and self._resting == resting:
                return
            self._stop()
            self._asking, self._resting = True, resting  # before it is: the first sample may come at once
            try:
                self._feed = self._source(self._on_vitals, REST_HZ if resting else self.hz, self._on_end)
            except PowerLabError as error:
                self._asking = False
                self._tell({"state": "none", "message": str(error)})

    def _stop(self) -> None:
        with self._lock:
            feed, self._feed = self._feed, None
            self._asking = False
        if feed is not None:
            feed.close()

    def _on_end(self, error: PowerLabError) -> None:
        self._stop()
        self._tell({**self.facts, "state": "ended", "message": str(error)})

    def _on_vitals(self, vitals: Vitals) -> None:
        """On the reader's thread, which also sends: a busy cell holds neither up."""
        if not self._asking:
            return  # a sample that was on its way when the feed was closed
        engine = vitals.of(self._key()) or next(iter(vitals.engines), None)
        if engine is None:
            self._tell({"state": "none", "message": 'The host has no engine. lab.load("smollm2") loads one.'})
        else:
            row = self.history.add(vitals, engine)
            self._tell({**_facts(vitals, engine), "tiles": [tile.field for tile in shown(self.history)]})
            if not self._resting:
                self.frame = row.astype("<f8").tobytes()
        if len(self.history) > 1 or engine is None:
            self._shown.set()
        self._tend()

    def _tell(self, facts: dict[str, Any]) -> None:
        if facts != self.facts:
            self.facts = facts

    # --- pages ------------------------------------------------------------------------------------------------------------------

    def asked(self, kind: str, content: dict[str, Any]) -> None:
        name = content.get("page")
        if kind != "watch" or not isinstance(name, str) or len(name) > 64:
            return
        with self._lock:
            known = name in self._pages
            if content.get("on"):
                if not known and len(self._pages) >= 16:
                    self._pages.pop(next(iter(self._pages)))
                self._pages[name] = 0
                self._begin()
            else:
                self._pages.pop(name, None)
                if not self._pages and self.asking:
                    self._begin(resting=True)
            self._heard = time.monotonic()
        if content.get("on") and not known:
            self.send({"kind": "history"}, [self.history.table.astype("<f8").tobytes()])

    def _tend(self) -> None:
        """Once a second: nobody looks for a while, nobody is asked. A page counts as gone only by seconds in which the kernel was free."""
        now = time.monotonic()
        if now - self._turned < 1.0:
            return
        self._turned = now
        if not self._pages and now - self._heard > (REST_S if self._resting else UNASKED_S):
            self._stop()
        elif self._loop is not None and not self._turning and not self._loop.is_closed():
            self._turning = True
            self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        with self._lock:
            self._turning = False
            self._pages = {name: free + 1 for name, free in self._pages.items() if free < LEASE}

    # --- the view ---------------------------------------------------------------------------------------------------------------

    @property
    def dataset(self) -> xarray.Dataset:
        """The history, at most two minutes of it: dimension `sample`."""
        return self.history.dataset()

    def summary(self) -> str:
        if not len(self.history):
            return f"Watch: {self.facts.get('message') or 'no sample yet'}"
        rate, running, waiting = (self.history.column(name)[-1] for name in ("tokens_per_s", "running", "waiting"))
        return f"Watch {self.facts.get('model', '')}: {rate:.1f} tokens/s, {running:.0f} running, {waiting:.0f} waiting"

    def body(self) -> str:
        return page(self.facts, self.history)

    def picture(self) -> str:
        return picture(self.history)


def _facts(vitals: Vitals, engine: EngineVitals) -> dict[str, Any]:
    others = [one.model for one in vitals.engines if one.engine != engine.engine]
    loading = engine.state != "ready"
    return {
        "state": "loading" if loading else "live",
        "message": engine.stage if loading else "",
        "model": engine.model,
        "device": engine.device if engine.device == vitals.device.name else f"{engine.device} ({vitals.device.name})",
        "mode": engine.mode,
        "drafter": engine.drafter,
        "others": others[:8],
        "clients": len(engine.clients),
    }
