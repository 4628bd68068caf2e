"""Steps that go on from one another: cases for every device's `mark` and `resume`, and what they come to, row by row."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from power_lab.kernels import reference
from power_lab.kernels.ops import BLOCK, Batch, Moved, Onward

PAGES = 4
ROWS = ("ids", "positions", "slots")
POISON = -777


@dataclass
class Case:
    """The arrays of one step. marks: of the step before; drafts: drawn for this one."""

    batch: Batch
    onward: Onward
    drawn: np.ndarray
    marks: np.ndarray
    drafts: np.ndarray
    draws: np.ndarray
    last: np.ndarray
    anchors: np.ndarray

    def moved(self, empty: Any) -> Moved:
        """Where its rows go: arrays that `empty` makes of those that they are made from."""
        b = self.batch
        parts = {"draws": self.draws, "before": b.before, "last": self.last, "anchors": self.anchors}
        return Moved(**{name: empty(part) for name, part in (parts | {n: getattr(b, n) for n in ROWS}).items()})

    def on(self, array: Any) -> Case:
        """The same on a device: `array` makes its arrays."""

        def moved(part: Any) -> Any:
            values = {f.name: getattr(part, f.name) for f in fields(part)}
            return type(part)(**{name: None if value is None else array(value) for name, value in values.items()})

        rest = {f.name: array(getattr(self, f.name)) for f in fields(self) if f.name not in ("batch", "onward")}
        return Case(moved(self.batch), moved(self.onward), **rest)


def case(counts: list[int], seed: int = 0) -> Case:
    """A step of sequences with so many rows each, all sampled, some of which go on from marks; one row of padding behind them."""
    rng = np.random.default_rng(seed)
    rows, sequences = sum(counts) + 1, len(counts) + 1
    owner = np.repeat(np.arange(sequences), [*counts, 1]).astype(np.int32)
    starts = np.cumsum([0, *counts])
    tables = (1 + rng.permutation(sequences * PAGES).reshape(sequences, PAGES)).astype(np.int32)
    came = np.where(rng.random(sequences) < 0.7, rng.permutation(sequences), -1).astype(np.int32)
    came[-1] = -1
    resumed = came[owner] >= 0
    offset = (np.arange(rows) - starts[owner]).astype(np.int32)
    ids = rng.integers(0, 5, rows).astype(np.int32)
    slots, before = rng.integers(0, 900, rows), rng.integers(-1, 900, rows)
    asked = resumed & (rng.random(rows) < 0.9)
    batch = Batch(
        ids=ids,
        positions=offset + np.where(resumed, 0, 17).astype(np.int32),
        slots=np.where(asked, -1, slots),
        table_of=owner,
        tables=tables,
        sampled=np.arange(rows - 1, dtype=np.int32),
        before=np.where(asked, -2, before),
    )
    source = np.where(offset == 0, 1, 2 + np.arange(rows)).astype(np.int32)
    source[rng.random(rows) < 0.2] = 0
    windows = np.zeros((sequences, 3), np.int32)
    windows[:-1] = np.stack([starts[:-1], starts[:-1], counts], axis=1)
    windows[rng.random(sequences) < 0.1, 2] = 0
    marks = np.stack([rng.integers(1, PAGES * BLOCK - max(counts), sequences), rng.integers(-1, 99, sequences)], axis=1)
    return Case(
        batch=batch,
        onward=Onward(windows, came, source),
        drawn=rng.integers(-1, 4, rows).astype(np.int32),
        marks=marks.astype(np.int64),
        drafts=rng.integers(-1, 99, rows).astype(np.int32),
        draws=batch.positions[:-1].astype(np.int64) + 1,
        last=batch.positions + 3,
        anchors=np.full(rows, 7, np.int32),
    )


def marked(given: Case) -> np.ndarray:
    """What `mark` makes of its marks."""
    marks = given.marks.copy()
    for sequence, (row, draw, count) in enumerate(given.onward.windows.tolist()):
        if count:
            drafts, drawn = given.batch.ids[row + 1 : row + count].tolist(), given.drawn[draw : draw + count].tolist()
            marks[sequence] = reference.mark(drafts, drawn, int(given.batch.positions[row]))
    return marks


def resumed(given: Case) -> dict[str, np.ndarray]:
    """What `resume` makes of its arrays."""
    b = given.batch
    made = {name: getattr(b, name).copy() for name in ("ids", "positions", "slots", "before")}
    made |= {"draws": given.draws.copy(), "last": given.last.copy(), "anchors": given.anchors.copy()}
    for row, sequence in enumerate(b.table_of.tolist()):
        if (mark := int(given.onward.came[sequence])) < 0:
            continue
        start, token = given.marks[mark].tolist()
        position = int(b.positions[row]) + start
        made["positions"][row], made["last"][row] = position, given.last[row] + start
        if source := int(given.onward.source[row]):
            made["ids"][row] = max(0, token if source == 1 else int(given.drafts[source - 2]))
        for name, at, least in (("slots", position, 0), ("before", max(0, position - 1), -1)):
            if made[name][row] < least:
                made[name][row] = b.tables[sequence, at // BLOCK] * BLOCK + at % BLOCK
    for draw, row in enumerate(b.sampled.tolist()):
        if (mark := int(given.onward.came[b.table_of[row]])) >= 0:
            made["draws"][draw] += given.marks[mark, 0]
    made["anchors"][len(given.onward.came) :] = POISON  # not written
    for sequence, mark in enumerate(given.onward.came.tolist()):
        if mark >= 0:
            made["anchors"][sequence] = max(0, given.marks[mark, 1])
    return made
