"""What the lesson notebooks stand on: an engine under a microscope, figures of what it saw, and checks of the exercises."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from power_lab.lessons import recorded
    from power_lab.lessons.checks import check
    from power_lab.lessons.exercises.attention import canonical_splits
    from power_lab.lessons.figures import (
        costs_chart,
        facts_table,
        position_table,
        slots_chart,
        walk_table,
        window_table,
    )
    from power_lab.lessons.lattice import lattice_of
    from power_lab.lessons.microscope import Microscope
    from power_lab.lessons.ordinary import load_ordinary
    from power_lab.lessons.pool_walk import PoolWalk
    from power_lab.lessons.softmax_walk import SoftmaxWalk
    from power_lab.lessons.stepwise import Stepwise
    from power_lab.widgets.explorer import explore

_HOMES = {
    "Microscope": "microscope",
    "PoolWalk": "pool_walk",
    "SoftmaxWalk": "softmax_walk",
    "Stepwise": "stepwise",
    "canonical_splits": "exercises.attention",
    "check": "checks",
    "costs_chart": "figures",
    "explore": ".widgets.explorer",
    "facts_table": "figures",
    "lattice_of": "lattice",
    "load_ordinary": "ordinary",
    "position_table": "figures",
    "slots_chart": "figures",
    "walk_table": "figures",
    "window_table": "figures",
}
__all__ = [
    "Microscope",
    "PoolWalk",
    "SoftmaxWalk",
    "Stepwise",
    "canonical_splits",
    "check",
    "costs_chart",
    "explore",
    "facts_table",
    "lattice_of",
    "load_ordinary",
    "position_table",
    "recorded",
    "slots_chart",
    "walk_table",
    "window_table",
]


def __getattr__(name: str) -> Any:
    if name == "recorded":
        return import_module(".recorded", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
