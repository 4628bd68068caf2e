"""bench/gpu_walks.py without a GPU: which kernels it compares."""

from __future__ import annotations

from collections import Counter

import pytest

from bench import gpu_attention, gpu_walks
from bench.gpu_attention import GEMMA, LARGE, SMOLLM2, Case, Heads
from power_lab.kernels.triton.attention import ways


def test_every_case_begins_with_the_plan_of_its_steps() -> None:
    for case in gpu_walks.cases():
        own, *others = gpu_walks.arms(case)
        assert own == case.plan and own not in others and others
        assert {arm.programs for arm in others} == {0 if case.part == "walks" else own.programs}
        assert {(arm.heads, arm.rows, arm.head_blocks) for arm in others} == {(own.heads, own.rows, own.head_blocks)}


def test_what_plans_choose_between_is_timed() -> None:
    """Each way of a width is an arm of its heads."""
    for heads in (LARGE, SMOLLM2, GEMMA):
        timed = {
            (plan.programs == 0, plan.stages, plan.described)
            for case in gpu_walks.cases()
            if case.heads == heads
            for plan in gpu_walks.arms(case)
        }
        wanted = {(way.whole, way.stages, way.described) for way in ways(heads[2])}
        assert wanted <= timed, heads


WALKS = {(True, 2, False), (True, 2, True), (True, 3, True)}


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (Case("walks", LARGE, 64, 1, 256), WALKS),
        (Case("walks", GEMMA, 64, 1, 256), WALKS),
        (Case("walks", LARGE, 1, 512, 2048), WALKS),
        (Case("shares", LARGE, 8, 1, 2048), {(False, 1, False), (False, 2, True)}),
        (Case("shares", GEMMA, 32, 1, 512), {(False, 1, False), (False, 2, True)}),
    ],
    ids=repr,
)
def test_arms_are_kernels_that_differ(case: Case, wanted: set[tuple[bool, int, bool]]) -> None:
    """(whole, stages, described)."""
    assert Counter((arm.programs == 0, arm.stages, arm.described) for arm in gpu_walks.arms(case)) == Counter(wanted)


def test_every_kernel_is_compiled_once_before() -> None:
    """Whatever the number of programs and, where keys are walked whole, of rows."""
    kernels = [
        (case.heads, plan.stages, plan.described, plan.bare, 1 << (len(case.rows) - 1).bit_length() if plan.programs else 0)
        for case in gpu_walks.variants(gpu_walks.cases())
        if (plan := case.plan)
    ]
    assert len(set(kernels)) == len(kernels)
    some = {(LARGE, 3, True, False, 0), (LARGE, 1, False, True, 1), (LARGE, 2, True, True, 32), (GEMMA, 1, False, True, 32)}
    assert some < set(kernels)


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize(
    ("part", "heads", "sequences", "length"),
    [("shares", (2, 1, 16), 1, 200), ("walks", (2, 1, 16), 50, 3), ("walks", (1, 1, 256), 2, 70)],
)
def test_bits_are_compared_before_time_is_taken(
    part: str, heads: Heads, sequences: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through Triton's interpreter."""
    monkeypatch.setattr(gpu_attention, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_walks, "CACHES", 1)
    monkeypatch.setattr(gpu_walks, "captured", lambda call, times: times)
    monkeypatch.setattr(gpu_walks, "replayed", lambda graph, replays: 1e-6 * graph)
    case = Case(part, heads, sequences, 1, length)
    records = list(gpu_walks.measure(case, 1e12))
    plans = gpu_walks.arms(case)
    assert [(record["plan"]["described"], record["own"]) for record in records] == [
        (plan.described, plan == plans[0]) for plan in plans
    ]
    named = {"heads": heads, "sequences": sequences, "rows": 1, "keys": length}
    assert all(record["us"] == 1.0 and record["case"] == named for record in records)
    assert all(f"{sequences}x1@{length}" in gpu_walks.said(record) for record in records)

    attended = gpu_walks._attended
    monkeypatch.setattr(gpu_walks, "_attended", lambda step, plan: attended(step, plan) + plan.described)
    with pytest.raises(SystemExit, match="has other bits"):
        list(gpu_walks.measure(case, 1e12))
