"""What followed the longest match of a sequence's end in itself, in numpy: a search of some tens of microseconds a sequence."""

from __future__ import annotations

import numpy as np

from power_lab.kernels.ops import BLOCK, LONGEST_MATCH


def recalled(tokens: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    """(int32 [width] of what followed, the match's length); zeros and 0 where there is none. tokens: int [any], the last one the anchor.

    Of the ends of the longest match, `LONGEST_MATCH` tokens at most, the last one counts; what followed it goes on from its beginning
    where it comes to the sequence's end.
    """
    last = len(tokens) - 1
    found = np.flatnonzero(tokens[:last] == tokens[last])
    if not len(found):
        return np.zeros(width, np.int32), 0
    back = np.arange(min(LONGEST_MATCH, last))
    at = found[:, None] - back
    same = (tokens[at] == tokens[last - back]) & (at >= 0)
    lengths = np.logical_and.accumulate(same, axis=1).sum(1)
    chosen = len(found) - 1 - int(lengths[::-1].argmax())
    best, length = int(found[chosen]), int(lengths[chosen])
    return tokens[best + 1 + np.arange(width) % (last - best)].astype(np.int32), length


def note(ids: np.ndarray, drawn: np.ndarray | None, slots: np.ndarray, told: np.ndarray) -> None:
    """Arguments as in `Ops.note`."""
    told[slots] = ids if drawn is None else np.where(ids < 0, drawn[np.clip(-1 - ids, 0, len(drawn) - 1)], ids)


def recall(
    told: np.ndarray,
    tables: np.ndarray,
    came: np.ndarray,
    marks: np.ndarray,
    least: int,
    source: np.ndarray,
    drafts: np.ndarray,
    out: np.ndarray,
) -> None:
    """Arguments as in `Ops.recall`."""
    for sequence, mark in enumerate(came.tolist()):
        if mark < 0:
            out[sequence] = 0
            continue
        position, token = marks[mark].tolist()
        at: np.ndarray = np.arange(position)
        slots = tables[sequence, at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK
        out[sequence], length = recalled(np.append(told[slots], np.int32(max(0, token))), source.shape[1])
        if length < least:
            given = source[sequence] >= 0
            out[sequence, given] = drafts[source[sequence, given]]
