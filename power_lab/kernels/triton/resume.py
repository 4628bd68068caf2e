"""A step that goes on where the one before it leaves off: nobody but the device needs to know where that is."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from power_lab.kernels.ops import BLOCK, Batch, Moved, Onward
from power_lab.kernels.triton import chain

PLAN = "resume: rows of whole numbers alone, drafts kept while they are what was drawn"
ROWS = 64  # that one program moves
WINDOW = 64  # drafts that are compared at once


@triton.jit
def _mark(ids, positions, drawn, windows, marks, WINDOW: tl.constexpr, PDL: tl.constexpr):
    """One sequence."""
    chain.begin(PDL)
    chain.wait(PDL)
    s = tl.program_id(0)
    row, draw, count = tl.load(windows + s * 3), tl.load(windows + s * 3 + 1), tl.load(windows + s * 3 + 2)
    if count > 0:
        kept = count - 1
        for first in range(0, count - 1, WINDOW):
            k = first + tl.arange(0, WINDOW)
            draft = tl.load(ids + row + 1 + k, mask=k < count - 1, other=0)
            own = tl.load(drawn + draw + k, mask=k < count - 1, other=0)
            kept = tl.minimum(kept, tl.min(tl.where(draft == own, count - 1, k)))
        tl.store(marks + s * 2, (tl.load(positions + row) + kept + 1).to(tl.int64))
        tl.store(marks + s * 2 + 1, tl.load(drawn + draw + kept).to(tl.int64))


@triton.jit
def _slot(tables, pages, table, position, inside, BLOCK: tl.constexpr):
    page = tl.load(tables + table.to(tl.int64) * pages + position // BLOCK, mask=inside, other=0)
    return page.to(tl.int64) * BLOCK + position % BLOCK


@triton.jit(do_not_specialize=["rows", "logits", "sequences", "pages"])
def _resume(
    ids, positions, slots, before, table_of, tables, sampled, came, source, marks, drafts, draws, last, anchors,
    to_ids, to_positions, to_slots, to_before, to_draws, to_last, to_anchors, rows, logits, sequences, pages,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some rows, draws and sequences."""
    chain.wait(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)

    inside = r < rows
    table = tl.load(table_of + r, mask=inside, other=0)
    mark = tl.load(came + table, mask=inside, other=-1)
    goes = inside & (mark >= 0)
    start = tl.load(marks + mark * 2, mask=goes, other=0).to(tl.int32)
    token = tl.load(marks + mark * 2 + 1, mask=goes, other=0).to(tl.int32)
    position = tl.load(positions + r, mask=inside, other=0) + start
    tl.store(to_positions + r, position, mask=inside)
    asked = tl.load(source + r, mask=goes, other=0)
    draft = tl.load(drafts + asked - 2, mask=asked > 1, other=0)
    chosen = tl.maximum(tl.where(asked == 1, token, draft), 0)
    tl.store(to_ids + r, tl.where(asked > 0, chosen, tl.load(ids + r, mask=inside, other=0)), mask=inside)
    slot = tl.load(slots + r, mask=inside, other=0)
    open = goes & (slot < 0)
    tl.store(to_slots + r, tl.where(open, _slot(tables, pages, table, position, open, BLOCK), slot), mask=inside)
    if before is not None:
        slot = tl.load(before + r, mask=inside, other=0)
        open = goes & (slot < -1)
        behind = tl.maximum(position - 1, 0)
        tl.store(to_before + r, tl.where(open, _slot(tables, pages, table, behind, open, BLOCK), slot), mask=inside)
    if last is not None:
        tl.store(to_last + r, tl.load(last + r, mask=inside, other=0) + start, mask=inside)

    inside = r < logits
    row = tl.load(sampled + r, mask=inside, other=0)
    mark = tl.load(came + tl.load(table_of + row, mask=inside, other=0), mask=inside, other=-1)
    start = tl.load(marks + mark * 2, mask=inside & (mark >= 0), other=0)
    tl.store(to_draws + r, tl.load(draws + r, mask=inside, other=0) + start, mask=inside)

    if anchors is not None:
        inside = r < sequences
        mark = tl.load(came + r, mask=inside, other=-1)
        token = tl.load(marks + mark * 2 + 1, mask=mark >= 0, other=0).to(tl.int32)
        own = tl.load(anchors + r, mask=inside, other=0)
        tl.store(to_anchors + r, tl.where(mark >= 0, tl.maximum(token, 0), own), mask=inside)


@triton.jit
def _barrier():
    """Does nothing, out of the chain: it begins when all before it has ended, and what comes behind begins when it has."""


def mark(batch: Batch, onward: Onward, drawn: Tensor, marks: Tensor) -> None:
    """Where each sequence stands after a step, as in `Ops.mark`."""
    options = chain.options(marks.device)
    _mark[(len(onward.windows),)](
        batch.ids, batch.positions, drawn, onward.windows, marks, WINDOW, num_warps=1, **options
    )  # fmt: skip


def resume(
    batch: Batch,
    onward: Onward,
    marks: Tensor,
    drafts: Tensor,
    draws: Tensor,
    moved: Moved,
    last: Tensor | None,
    anchors: Tensor | None,
) -> None:
    """Rows move to where their marks say, as in `Ops.resume`."""
    rows, logits, sequences = len(batch.ids), len(draws), len(onward.came)
    _resume[(triton.cdiv(max(rows, logits, sequences), ROWS),)](
        batch.ids, batch.positions, batch.slots, batch.before, batch.table_of, batch.tables, batch.sampled, onward.came, onward.source,
        marks, drafts, draws, last, anchors, moved.ids, moved.positions, moved.slots, moved.before, moved.draws, moved.last, moved.anchors,
        rows, logits, sequences, batch.tables.shape[1], ROWS, BLOCK, num_warps=2, **chain.options(marks.device),
    )  # fmt: skip
    # Kernels read index arrays before they wait, since mostly nobody but the host writes these: now somebody else has.
    _barrier[(1,)](num_warps=1)
