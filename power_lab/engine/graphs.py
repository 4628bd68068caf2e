"""Captured forward passes by shape: what a step does is recorded once and replayed without Python in between."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from power_lab.kernels.ops import Array, Graph, Ops

# Steps of more rows, prompts mostly, seldom come twice in one size and are called operation by operation.
KEPT_ROWS = 64
KEPT = 128  # graphs; the one that was not used for longest goes first


class Graphs:
    """The graphs of one model on one workspace.

    Args:
        ops: the device.

    Attributes:
        captured, replayed: steps that were recorded, and that found their graph.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._kept: OrderedDict[tuple[int, int], tuple[Graph, Array]] = OrderedDict()
        self.captured = 0
        self.replayed = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return sum(graph.nbytes for graph, _ in self._kept.values())

    def run(self, rows: int, sampled: int, forward: Callable[[], Array]) -> Array:
        """Do what `forward` does, whose operations depend on these two counts and on nothing else but the content of arrays.

        Returns its result, an array that it fills.
        """
        shape = (rows, sampled)
        if rows > KEPT_ROWS:
            return forward()
        if shape in self._kept:
            self._kept.move_to_end(shape)
            self.replayed += 1
        else:
            graph = self._ops.capture(forward)
            if graph is None:
                return forward()
            self.captured += 1
            self._kept[shape] = graph
        graph, result = self._kept[shape]
        self._ops.replay(graph)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return result

    def clear(self) -> None:
        self._kept.clear()
