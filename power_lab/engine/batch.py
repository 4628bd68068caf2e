"""From a step plan to flat index arrays on the device."""

from __future__ import annotations

import numpy as np

from power_lab.engine.plan import StepPlan
from power_lab.kernels.ops import BLOCK, Batch, Ops


class Inputs:
    """A runner's index arrays. They stay where they are, so that captured graphs find each step's values in them.

    Args:
        ops: the device.
        rows, sampled, spans: most rows, logit rows and spans of a step.
        pages: most pages of a sequence.
    """

    def __init__(self, ops: Ops, rows: int, sampled: int, spans: int, pages: int) -> None:
        self._ops = ops
        self._arrays = Batch(
            ids=ops.empty((rows,), "int32"),
            positions=ops.empty((rows,), "int32"),
            slots=ops.empty((rows,), "int64"),
            table_of=ops.empty((rows,), "int32"),
            tables=ops.empty((spans, pages), "int32"),
            sampled=ops.empty((sampled,), "int32"),
        )
        self._tables = np.zeros((spans, pages), np.int32)

    @property
    def nbytes(self) -> int:
        return sum(getattr(self._arrays, name).nbytes for name in Batch.__slots__)

    def fill(self, plan: StepPlan) -> Batch:
        """Flatten a plan's spans: one row a token, one table row a span. Shapes as in `kernels.ops.Batch`; views of the arrays."""
        counts = np.array([span.rows for span in plan.spans])
        starts = np.array([span.start for span in plan.spans])
        first = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        positions = np.arange(counts.sum()) - np.repeat(first - starts, counts)
        tables = self._tables[: len(plan.spans)]
        tables[:] = 0
        for row, span in enumerate(plan.spans):
            tables[row, : len(span.blocks)] = span.blocks
        pages = tables[owner, positions // BLOCK].astype(np.int64)
        ends = first + counts
        sampled = [np.arange(end - span.sampled, end) for end, span in zip(ends, plan.spans, strict=True)]
        return Batch(
            ids=self._put(np.concatenate([np.asarray(span.tokens) for span in plan.spans]), self._arrays.ids),
            positions=self._put(positions, self._arrays.positions),
            slots=self._put(pages * BLOCK + positions % BLOCK, self._arrays.slots),
            table_of=self._put(owner, self._arrays.table_of),
            tables=self._put(tables, self._arrays.tables),
            sampled=self._put(np.concatenate(sampled), self._arrays.sampled),
        )

    def _put(self, host: np.ndarray, array: np.ndarray) -> np.ndarray:
        """Write a step's values to the front of an array; returns that part of it."""
        part = array[: len(host)]
        self._ops.upload(host, part)
        return part
