"""Sequences whose ends occurred before, in pages, for tests of `recall` on every table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from power_lab.kernels import reference
from power_lab.kernels.ops import BLOCK, Ops


@dataclass(frozen=True)
class Case:
    """Sequences of `lengths` tokens from a small alphabet, and what `recall` is to make of them."""

    lengths: tuple[int, ...]
    width: int
    least: int
    alphabet: int
    seed: int = 0


CASES = [
    Case((1,), 7, 3, 4),
    Case((2, 64, 65), 1, 1, 2),
    Case((130, 700, 3), 15, 3, 3, 1),
    Case((513, 1100), 31, 4, 2, 2),
    Case((300, 299, 20, 1, 640), 63, 16, 6, 3),
]


def check(ops: Ops, case: Case) -> None:
    """Compare with the reference, with poison wherever nothing is told."""
    rng, count, pages = np.random.default_rng(case.seed), len(case.lengths), -(-max(case.lengths) // BLOCK) + 1
    texts = [rng.integers(0, case.alphabet, length).tolist() for length in case.lengths]
    tables = 1 + rng.permutation(count * pages).reshape(count, pages).astype(np.int32)
    told = ops.asarray(np.full((count * pages + 1) * BLOCK, -99, np.int32))
    drawn = rng.integers(0, case.alphabet, 5).astype(np.int32)
    for text, table in zip(texts, tables, strict=True):
        known = np.array(text[:-1], np.int32)
        at = np.arange(len(known))
        slots = table[at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK
        for name, part in enumerate(np.array_split(at, 2)):
            ids = known[part].copy()
            if name and len(ids):  # some tokens are the draws of the step before
                ids[::3] = rng.integers(-5, 0, len(ids[::3]))
                ids[::3] = [-1 - int(np.flatnonzero(drawn == t)[0]) if t in drawn else t for t in known[part][::3]]
            ops.note(ops.asarray(ids), ops.asarray(drawn), ops.asarray(slots[part]), told)
    places = count + 1  # the last one is nobody's
    marks = np.array([[len(text) - 1, text[-1]] for text in texts][::-1], np.int64)
    came = np.array([*range(count - 1, -1, -1), -1], np.int32)
    drafts = rng.integers(100, 200, 40).astype(np.int32)
    source = rng.integers(-1, 40, (places, case.width)).astype(np.int32)
    out = ops.asarray(np.full((places + 1, case.width), -7, np.int32))
    arrays: list[Any] = [ops.asarray(a) for a in (np.vstack([tables, 0 * tables[:1]]), came, marks)]
    for _ in range(2):  # what programs tell each other is as it was
        ops.recall(told, *arrays, case.least, ops.asarray(source), ops.asarray(drafts), out[:places])
    found = ops.tohost(out)
    for place, text in enumerate(texts):
        want, length = reference.recall(text, case.width)
        given = source[place] >= 0
        if length < case.least:
            want = np.where(given, drafts[source[place]], want).tolist()
        assert found[place].tolist() == want, (case, place, length)
    assert not found[count].any() and (found[places] == -7).all()
