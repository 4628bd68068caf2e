"""A short film of an engine and one row of attention, made by hand: what the lessons' views show, without a model."""

from __future__ import annotations

import numpy as np

from power_lab.engine.inspection import StepRecord
from power_lab.engine.trace import BlockState
from power_lab.lessons.stepwise import Attended, Frame, Part

OWNERS = {7: "A", 8: "B"}
# (rows of A, rows of B, tokens in A's block, in B's block, who waits, who ends); -1 row: preempted
STEPS = (
    (20, 12, 20, 12, "C", ""),
    (1, 1, 21, 13, "C", ""),
    (1, -1, 22, 0, "BC", ""),
    (1, 0, 23, 0, "BC", "A"),
    (0, 13, 0, 13, "C", ""),
)


def film() -> list[Frame]:
    """Two requests that share a pool too small for both: a start, decoding, a preemption, an end and a second start; a third one waits."""
    return [_frame(number, *step) for number, step in enumerate(STEPS)]


def _frame(number: int, a: int, b: int, kept_a: int, kept_b: int, waiting: str, ended: str) -> Frame:
    parts = tuple(
        Part(
            name=name,
            phase="" if rows < 0 else "prefill" if rows > 1 else "decode",
            rows=max(rows, 0),
            start=kept - max(rows, 0),
            table=(block,) if rows > 0 else (),
            preempted=rows < 0,
        )
        for name, rows, kept, block in (("A", a, kept_a, 1), ("B", b, kept_b, 2))
        if rows
    )
    blocks = tuple(
        BlockState(
            id=block,
            state="dummy" if not block else "used" if kept else "cached" if block == 3 else "free",
            refs=int(kept > 0),
            hash="",
            owners=(owner,) if kept else (),
            tokens=kept,
            parent=-1,
            depth=0,
        )
        for block, owner, kept in ((0, 0, 0), (1, 7, kept_a), (2, 8, kept_b), (3, 0, 0))
    )
    rows = [part.rows for part in parts]
    record = StepRecord(
        number=number,
        begin=float(number),
        end=number + 0.5,
        prefill_rows=sum(count for count in rows if count > 1),
        decode_rows=sum(count for count in rows if count == 1),
        verify_rows=0,
        running=len(parts),
        waiting=len(waiting),
        preempted=sum(part.preempted for part in parts),
        shape=None,
        how="eager",
        why="",
        padded_rows=0,
        busy_s=None,
        free_blocks=1,
        cached_blocks=1,
        used_blocks=2,
        tokens=len(parts),
    )
    return Frame(
        number=number,
        parts=parts,
        waiting=tuple(waiting),
        ended=tuple(ended),
        blocks=blocks,
        names=OWNERS,
        record=record,
    )


def attended(pages: int = 3) -> Attended:
    """A row at the end of `pages` pages, the last half full, of two heads that share their keys."""
    random = np.random.default_rng(5)
    dim, position = 8, 64 * pages - 33
    q = random.standard_normal((2, dim)).astype(np.float32)
    return Attended(
        name="long",
        layer=0,
        position=position,
        table=tuple(range(4, 4 + 2 * pages, 2)),
        q=q,
        out=q,
        scale=0.35,
        window=0,
        keys=random.standard_normal((pages, 1, dim, 64)).astype(np.float32),
        values=random.standard_normal((pages, 1, 64, dim)).astype(np.float32),
    )
