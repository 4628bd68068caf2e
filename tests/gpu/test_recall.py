"""What followed the longest match of a sequence's end in itself, on the GPU."""

from __future__ import annotations

import pytest

from power_lab.kernels.ops import Ops
from tests.kernels.recalling import CASES, Case, check


@pytest.mark.parametrize("case", [*CASES, Case((8000, 3, 4100) * 8, 31, 5, 2, 4)], ids=repr)
def test_recalled_tokens_are_the_references(gpu_ops: Ops, case: Case) -> None:
    check(gpu_ops, case)
