"""The real engine on a tiny random model, for hosts in tests."""

from __future__ import annotations

from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.engine import Engine
from power_lab.engine.host.api import OnProgress
from power_lab.kernels.table import select
from tests import tiny

SHAPE = tiny.Shape()


def make(config: EngineConfig, *, paths: Paths, progress: OnProgress) -> Engine:
    """An engine with a thread of its own."""
    return Engine(config, loaded=tiny.loaded(SHAPE, select("cpu", "exact", 2, paths.kernels)))
