"""A slice of the tokenizers' fuzzing at every change; bench/fuzz.py --module tests.fuzz.tokenizers runs it at length."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.targets import REFUSED
from tests.fuzz.tokenizers import TARGETS

CASES = 500


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_tokenizers_are_refused_or_right(name: str, tmp_path: Path) -> None:
    case = TARGETS[name](tmp_path)
    outcomes = Counter(case(seed) for seed in range(CASES))
    assert outcomes[REFUSED] > CASES // 20 and sum(outcomes.values()) - outcomes[REFUSED] > CASES // 20
    assert [case(seed) for seed in range(5)] == [case(seed) for seed in range(5)]  # a seed says it all
