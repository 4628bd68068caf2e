"""A step that goes on where the one before it leaves off, in numpy: CPUs know that step's outcome in time and never need it."""

from __future__ import annotations

import numpy as np

from power_lab.kernels.ops import BLOCK, Batch, Moved, Onward


def mark(batch: Batch, onward: Onward, drawn: np.ndarray, marks: np.ndarray) -> None:
    """Arguments as in `Ops.mark`."""
    for sequence, (row, draw, count) in enumerate(onward.windows.tolist()):
        if count:
            same = batch.ids[row + 1 : row + count] == drawn[draw : draw + count - 1]
            accepted = count - 1 if same.all() else int(same.argmin())
            marks[sequence] = batch.positions[row] + accepted + 1, drawn[draw + accepted]


def resume(
    batch: Batch,
    onward: Onward,
    marks: np.ndarray,
    drafts: np.ndarray,
    draws: np.ndarray,
    moved: Moved,
    last: np.ndarray | None,
    anchors: np.ndarray | None,
) -> None:
    """Arguments as in `Ops.resume`."""
    came = onward.came[batch.table_of]
    goes = came >= 0
    position, token = marks[np.where(goes, came, 0)].T
    source = onward.source
    chosen = np.where(source == 1, token, drafts[np.clip(source - 2, 0, len(drafts) - 1)])
    moved.ids[:] = np.where(goes & (source > 0), np.maximum(chosen, 0), batch.ids)
    sampled = batch.sampled[: len(draws)]
    moved.draws[:] = draws + np.where(goes[sampled], position[sampled], 0)
    for array, to in ((batch.positions, moved.positions), (last, moved.last)):
        if array is not None and to is not None:
            to[:] = array + np.where(goes, position, 0).astype(np.int32)
    for array, to, back, least in ((batch.slots, moved.slots, 0, 0), (batch.before, moved.before, 1, -1)):
        if array is not None and to is not None:
            at = np.maximum(moved.positions - back, 0)
            slots = batch.tables[batch.table_of, at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK
            to[:] = np.where(goes & (array < least), slots, array)
    if anchors is not None and moved.anchors is not None:
        for sequence, mark in enumerate(onward.came.tolist()):
            moved.anchors[sequence] = max(0, marks[mark, 1]) if mark >= 0 else anchors[sequence]
