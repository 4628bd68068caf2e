"""The same through Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from power_lab.kernels.triton import resume
from tests.kernels import onward

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
COUNTS = ([1], [8], [1, 16, 3, 1, 7], [70, 2], [4] * 20)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_marks_stand_behind_the_last_draft_that_was_drawn(counts: list[int], seed: int) -> None:
    case = onward.case(counts, seed)
    if seed:  # nearly all match, so that long windows are looked through
        case.batch.ids[1:] = np.where(
            np.random.default_rng(seed).random(len(case.drawn) - 1) < 0.99, case.drawn[:-1], 9
        )
    on = case.on(torch.from_numpy)
    want = onward.marked(case)
    resume.mark(on.batch, on.onward, on.drawn, on.marks)
    assert np.array_equal(on.marks.numpy(), want)


@pytest.mark.parametrize("parts", ["rows", "blocks"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_move_to_where_their_marks_say(counts: list[int], seed: int, parts: str) -> None:
    case = onward.case(counts, seed)
    on, want = case.on(torch.from_numpy), onward.resumed(case)
    moved = on.moved(lambda part: torch.full_like(part, onward.POISON))
    beside = (on.last, on.anchors) if parts == "blocks" else (None, None)
    resume.resume(on.batch, on.onward, on.marks, on.drafts, on.draws, moved, *beside)
    if parts == "rows":
        want |= {name: np.full_like(want[name], onward.POISON) for name in ("last", "anchors")}
    for name, array in want.items():
        assert np.array_equal(getattr(moved, name).numpy(), array), name
