"""bench/gpu_hints.py without a GPU: which kernels it compares."""

from __future__ import annotations

import pytest

from bench import gpu_attention, gpu_hints
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


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize(("sequences", "length"), [(1, 200), (50, 3)])
def test_bits_are_compared_before_time_is_taken(sequences: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Triton's interpreter."""
    monkeypatch.setattr(gpu_attention, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_hints, "seconds", lambda call, times: 1e-6)
    case = Case("hints", (2, 1, 16), sequences, 1, length)
    records = list(gpu_hints.measure(case, 1e12))
    assert [record["hints"] for record in records] == [arm.hints for arm in gpu_hints.arms(case)]
    assert all(record["us"] == 1.0 for record in records)

    attended = gpu_hints._attended
    monkeypatch.setattr(gpu_hints, "_attended", lambda step, plan: attended(step, plan) + plan.described)
    with pytest.raises(SystemExit, match=r"described=True.* has other bits"):
        list(gpu_hints.measure(case, 1e12))
