"""Captured steps by shape: what a step does is recorded once and replayed without Python in between."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from power_lab.engine.shapes import Coverage, Registry, Shape, pad
from power_lab.errors import CapacityError
from power_lab.kernels.ops import Array, Graph, Ops

KEPT_ROWS = 64  # where any count of rows is captured as it is: prompts, which are longer, seldom come twice in one size
DECODE_ROWS = 128  # where rows are padded: steps of up to so many are captured when they first come, longer ones when they come again
KEPT = 128  # graphs; the one that was not used for longest goes first

LONG = "a prompt's step: more rows than the largest declared shape"
FIRST = "the first step of its shape: captured when it comes again"
COMPILED = "the first step of its shape: it compiles, and is captured behind"
CANNOT = "this mode's library calls cannot be recorded"
OFF = "graphs are off"


def coverage_of(ops: Ops, buckets: tuple[int, ...] = ()) -> Coverage:
    """The rows of captured steps on a device: these buckets, or where there are none its own."""
    declared = buckets or ops.row_buckets
    return Coverage(declared) if declared else Coverage.exact(KEPT_ROWS)


class Graphs:
    """The graphs of one model on one workspace.

    Args:
        ops: the device.
        budget: bytes that graphs may occupy; the one that was not used for longest goes first.
        enabled: False runs every step operation by operation.
        buckets: row counts that shapes are padded to; without, the device's.

    Attributes:
        coverage: the declared row buckets.
        registry: what became of each shape.
    """

    def __init__(self, ops: Ops, budget: int, enabled: bool = True, buckets: tuple[int, ...] = ()) -> None:
        self._ops = ops
        self._budget = budget
        self._kept: OrderedDict[Shape, tuple[Graph, Array]] = OrderedDict()
        self._seen: set[Shape] = set()
        self._refused: dict[Shape, str] = {}  # what could not be captured, and why
        self.enabled = enabled
        self.coverage = coverage_of(ops, buckets)
        self.registry = Registry()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return sum(graph.nbytes for graph, _ in self._kept.values())

    def cover(self, asked: Shape) -> Shape:
        """The shape that such a step is run in: padded where it is to be captured, else as it is."""
        return (pad(asked, self.coverage, self.coverage) if self.enabled else None) or asked

    def run(self, asked: Shape, shape: Shape, forward: Callable[[], Array]) -> Array:
        """Do what `forward` does, whose operations depend on `shape` and on nothing else but the content of arrays.

        Returns its result, an array that it fills. `forward` runs once a step: what it overwrites, it may have read before. A capture that
        fails changes nothing.
        """
        reason = self._not_captured(shape)
        if shape not in self._kept and (reason or self._ops.asynchronous):
            result = forward()
            self.registry.eager(asked, shape, reason or COMPILED)
            if not reason:
                self._capture(shape, forward)
            return result
        hit = shape in self._kept
        if not hit and not self._capture(shape, forward):
            self.registry.eager(asked, shape, self._refused[shape])
            return forward()
        self._kept.move_to_end(shape)
        graph, result = self._kept[shape]
        self._ops.replay(graph)
        self.registry.replayed(asked, shape, hit=hit)
        return result

    def _capture(self, shape: Shape, forward: Callable[[], Array]) -> bool:
        """Record a step, and drop the graphs that were not used for longest until all fit. False when it cannot be recorded."""
        try:
            captured = self._ops.capture(forward)
        except CapacityError as error:
            self._refused[shape] = str(error)
            return False
        if captured is None:
            self._refused[shape] = CANNOT
            return False
        self._kept[shape] = captured
        self.registry.captured(shape, captured[0].nbytes)
        while len(self._kept) > 1 and (len(self._kept) > KEPT or self.nbytes > self._budget):
            oldest, _ = self._kept.popitem(last=False)
            self.registry.evicted(oldest)
        return True

    def clear(self) -> None:
        for shape in self._kept:
            self.registry.evicted(shape)
        self._kept.clear()
        self._refused.clear()

    def _not_captured(self, shape: Shape) -> str:
        """Why a step of this shape is run operation by operation, or nothing."""
        if not self.enabled:
            return OFF
        if shape.rows > self.coverage.most:
            return LONG
        if shape.rows > DECODE_ROWS and shape not in self._seen:
            self._seen.add(shape)
            return FIRST
        return self._refused.get(shape, "")
