"""What followed the longest match of a sequence's end in itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.kernels import reference
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.numba.recall import recalled
from tests.kernels.recalling import CASES, Case, check


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_recalled_tokens_are_the_references(ops: NumbaOps, case: Case) -> None:
    check(ops, case)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 20))
def test_searches_are_the_references(tokens: list[int], width: int) -> None:
    drafts, length = recalled(np.array(tokens), width)
    assert (drafts.tolist(), length) == reference.recall(tokens, width)


def test_a_loop_goes_on() -> None:
    drafts, length = recalled(np.array([9, 1, 2, 3, 1, 2, 3, 1, 2]), 7)
    assert drafts.tolist() == [3, 1, 2, 3, 1, 2, 3] and length == 5
    drafts, length = recalled(np.array([5, 5, 5]), 4)
    assert drafts.tolist() == [5, 5, 5, 5] and length == 2
    assert recalled(np.array([1, 2, 3]), 2)[1] == 0
