"""From a step plan to flat index arrays on the device."""

from __future__ import annotations

import numpy as np

from power_lab.engine.plan import StepPlan
from power_lab.kernels.ops import BLOCK, Batch, Ops


def build(plan: StepPlan, ops: Ops) -> Batch:
    """Flatten a plan's spans: one row a token, one table row a span. Shapes as in `kernels.ops.Batch`."""
    counts = np.array([span.rows for span in plan.spans])
    starts = np.array([span.start for span in plan.spans])
    first = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    positions = np.arange(counts.sum()) - np.repeat(first - starts, counts)
    tables = np.zeros((len(plan.spans), max(len(span.blocks) for span in plan.spans)), np.int32)
    for row, span in enumerate(plan.spans):
        tables[row, : len(span.blocks)] = span.blocks
    pages = tables[owner, positions // BLOCK].astype(np.int64)
    ends = first + counts
    sampled = [np.arange(end - span.sampled, end, dtype=np.int32) for end, span in zip(ends, plan.spans, strict=True)]
    return Batch(
        ids=ops.asarray(np.concatenate([np.asarray(span.tokens, np.int32) for span in plan.spans])),
        positions=ops.asarray(positions.astype(np.int32)),
        slots=ops.asarray(pages * BLOCK + positions % BLOCK),
        table_of=ops.asarray(owner),
        tables=ops.asarray(tables),
        sampled=ops.asarray(np.concatenate(sampled)),
    )
