"""Where sequences stand after a step, and steps that go on from there, on the CPU."""

from __future__ import annotations

import copy
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.kernels.numba import resume
from tests.kernels import onward

COUNTS = st.lists(st.integers(1, 20), min_size=1, max_size=6)


@given(COUNTS, st.integers(0, 10**6))
def test_marks_stand_behind_the_last_draft_that_was_drawn(counts: list[int], seed: int) -> None:
    case = onward.case(counts, seed)
    want = onward.marked(case)
    resume.mark(case.batch, case.onward, case.drawn, case.marks)
    assert np.array_equal(case.marks, want)


@given(COUNTS, st.integers(0, 10**6))
def test_rows_move_to_where_their_marks_say(counts: list[int], seed: int) -> None:
    case = onward.case(counts, seed)
    want, before = onward.resumed(case), copy.deepcopy(case)
    moved = case.moved(lambda part: np.full_like(part, onward.POISON))
    resume.resume(case.batch, case.onward, case.marks, case.drafts, case.draws, moved, case.last, case.anchors)
    for name, array in want.items():
        assert np.array_equal(getattr(moved, name), array), name
    for part in ("batch", "onward"):
        for field in fields(getattr(case, part)):
            now, then = (getattr(getattr(one, part), field.name) for one in (case, before))
            assert np.array_equal(now, then), field.name


@pytest.mark.parametrize("accepted", [0, 1, 6, 7])
def test_as_many_drafts_as_match_from_the_first_on_are_kept(accepted: int) -> None:
    case = onward.case([8])
    case.batch.ids[1:8] = np.arange(7)
    case.drawn[:8] = [*range(7), 42]
    case.drawn[accepted] = 77
    case.onward.windows[0] = 0, 0, 8
    resume.mark(case.batch, case.onward, case.drawn, case.marks)
    assert case.marks[0].tolist() == [case.batch.positions[0] + accepted + 1, 77]
