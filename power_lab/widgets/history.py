"""The last minutes of an engine's vitals, in memory that does not grow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from power_lab.engine.vitals import EngineVitals, Vitals

if TYPE_CHECKING:
    import xarray

SCHEMA = "power-lab.watch/1"
RATE_S = 1.0  # rates are over the time since the sample that is at least so old

FIELDS: dict[str, tuple[str, str]] = {
    "at": ("s", "unix time"),
    "tokens_per_s": ("token/s", "output tokens"),
    "prompt_tokens_per_s": ("token/s", "prompt tokens"),
    "running": ("request", "in the batch"),
    "waiting": ("request", "in the queue"),
    "rows": ("token row", "of the last step"),
    "acceptance": ("1", "accepted drafts / drafts"),
    "tokens_per_pass": ("token", "for each pass of the target"),
    "hit_rate": ("1", "prompt tokens from the cache / prompt tokens"),
    "graph_hit_rate": ("1", "share of the last steps that replayed a graph"),
    "used_blocks": ("block", "held by requests"),
    "cached_blocks": ("block", "hold a prefix"),
    "free_blocks": ("block", "empty"),
    "weights_bytes": ("byte", "of weights"),
    "pool_bytes": ("byte", "of the KV pool"),
    "graph_bytes": ("byte", "of graphs"),
    "workspace_bytes": ("byte", "of the workspace"),
    "temperature_c": ("degC", "of the device"),
    "power_w": ("W", "of the device"),
    "utilisation": ("1", "of the device"),
    "tokens": ("token", "output tokens since the engine began"),
}
KEPT_NAMES = tuple(FIELDS)
OPTIONAL = ("temperature_c", "power_w")  # of the device, where they can be read
_NOW = ("running", "waiting", "rows", "graph_hit_rate", "used_blocks", "cached_blocks", "free_blocks")
_PLAN = ("weights_bytes", "pool_bytes", "graph_bytes", "workspace_bytes")
_COUNTS = ("tokens", "prompt_tokens", "cached_tokens", "drafted", "accepted", "passes")


class History:
    """A ring of samples: one row for each, one column for each of `FIELDS`; what is not known is NaN.

    Args:
        samples: kept.

    Attributes:
        readable: fields of `OPTIONAL` that were read at least once since the engine that is kept began.
    """

    def __init__(self, samples: int) -> None:
        self._ring = np.full((samples, len(FIELDS)), np.nan)
        self._counts = np.zeros((samples, len(_COUNTS)))
        self._engine = ""
        self._seen = 0
        self.readable: frozenset[str] = frozenset()

    def add(self, vitals: Vitals, engine: EngineVitals) -> np.ndarray:
        """Keep a sample; returns its row. Another engine, or one that began anew, begins a new history."""
        counts = np.array([getattr(engine, name) for name in _COUNTS], float)
        if engine.engine != self._engine or (self._seen and counts[0] < self._counts[self._place(-1)][0]):
            self._engine, self._seen, self.readable = engine.engine, 0, frozenset()
        row = self._row(vitals, engine, counts)
        self.readable |= {name for name in OPTIONAL if getattr(vitals.device, name) is not None}
        at = self._seen % len(self._ring)
        self._ring[at], self._counts[at] = row, counts
        self._seen += 1
        return row

    def _row(self, vitals: Vitals, engine: EngineVitals, counts: np.ndarray) -> np.ndarray:
        values: dict[str, float | None] = {name: getattr(engine, name) for name in (*_NOW, *_PLAN)}
        device = vitals.device
        values |= {"temperature_c": device.temperature_c, "power_w": device.power_w, "utilisation": device.utilisation}
        values |= {"at": vitals.at, "tokens": counts[0], **self._rates(vitals.at, counts)}
        return np.array([math.nan if values[name] is None else values[name] for name in FIELDS], float)

    def _rates(self, at: float, counts: np.ndarray) -> dict[str, float | None]:
        back = 1
        while back < len(self) and at - self._ring[self._place(-back)][0] < RATE_S:
            back += 1
        if not len(self) or (seconds := at - self._ring[self._place(-back)][0]) <= 0:
            return {
                "tokens_per_s": 0.0,
                "prompt_tokens_per_s": 0.0,
                "acceptance": None,
                "tokens_per_pass": None,
                "hit_rate": None,
            }
        tokens, prompt, cached, drafted, accepted, passes = counts - self._counts[self._place(-back)]
        return {
            "tokens_per_s": max(0.0, tokens) / seconds,
            "prompt_tokens_per_s": max(0.0, prompt) / seconds,
            "acceptance": min(1.0, max(0.0, accepted) / drafted) if drafted > 0 else None,
            "tokens_per_pass": tokens / passes if passes > 0 else None,
            "hit_rate": min(1.0, max(0.0, cached) / prompt) if prompt > 0 else None,
        }

    def _place(self, back: int) -> int:
        return (self._seen + back) % len(self._ring)

    def __len__(self) -> int:
        return min(self._seen, len(self._ring))

    @property
    def table(self) -> np.ndarray:
        """A copy, [samples, fields], oldest first."""
        if self._seen <= len(self._ring):
            return self._ring[: self._seen].copy()
        return np.roll(self._ring, -self._place(0), axis=0)

    def column(self, name: str) -> np.ndarray:
        return self.table[:, list(FIELDS).index(name)]

    def dataset(self) -> xarray.Dataset:
        """Dimension `sample`."""
        import xarray

        table = self.table
        columns = {
            name: ("sample", table[:, at], {"units": unit, "long_name": title})
            for at, (name, (unit, title)) in enumerate(FIELDS.items())
        }
        number = ("sample", np.arange(len(table)), {"units": "1", "long_name": "oldest first"})
        return xarray.Dataset(columns, {"sample": number}, {"schema": SCHEMA, "engine": self._engine, "rate_s": RATE_S})
