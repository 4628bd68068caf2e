"""bench/gpu_hints.py without a GPU: which kernels it compares."""

from __future__ import annotations

import pytest

from bench import gpu_hints
from bench.gpu_attention import LARGE, Case
from power_lab.kernels.triton.attention import Plan


def test_every_case_begins_with_the_plan_of_its_steps() -> None:
    for case in gpu_hints.cases():
        own, *others = gpu_hints.arms(case)
        assert own == case.plan and own not in others and others
        assert {(arm.heads, arm.rows, arm.programs) for arm in others} == {(own.heads, own.rows, own.programs)}


@pytest.mark.parametrize(
    ("sequences", "keys", "wanted"),
    [
        (1, 32768, {(True, 2, 0), (True, 2, 2), *((False, 1, hints) for hints in range(4))}),
        (64, 256, {(False, 2, 0), (True, 2, 0), (True, 3, 0)}),
    ],
)
def test_arms_are_kernels_that_differ(sequences: int, keys: int, wanted: set[tuple[bool, int, int]]) -> None:
    """(described, stages, hints): no hint where Triton passes none on."""
    arms: list[Plan] = gpu_hints.arms(Case("hints", LARGE, sequences, 1, keys))
    assert {(arm.described, arm.stages, arm.hints) for arm in arms} == wanted and len(arms) == len(wanted)
