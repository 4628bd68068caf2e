"""An operation table that does without what a device can do, so that the ways of running a step can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from power_lab.kernels.ops import Array, Graph, Ops


class Restricted:
    """Stands in for `ops`.

    Args:
        graphs: False runs every step operation by operation.
        overlap: False collects each step before the next is planned.
    """

    def __init__(self, ops: Ops, *, graphs: bool = True, overlap: bool = True) -> None:
        self._ops = ops
        self._graphs = graphs
        self.asynchronous = overlap and ops.asynchronous

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def capture(self, forward: Callable[[], Array]) -> tuple[Graph, Array] | None:
        if not self._graphs:
            return None
        if self._ops.asynchronous and not self.asynchronous:
            forward()  # the engine compiles kernels before a capture only where it overlaps steps
        return self._ops.capture(forward)
