"""The promise on the GPU, over what the CPU has not: captured or eager steps, overlapped or not, batches of 50.

Cases are covering arrays of the axes, as on the CPU, over models of every family and storage type. Logits are compared by their bits
with those of the request alone, whose prompt was one prefill.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from power_lab.kernels.ops import Ops
from tests.engine.test_exactness import AXES, name_of, same_bits
from tests.pairs import all_pairs

# "crowd" is (neighbours, step_tokens): a crowd that computes row by row would take minutes and show no more.
CPUS = (
    "model",
    "neighbours",
    "step_tokens",
    "threads",
    "device",
)  # axes that are others here; those to come are the same
OURS: dict[str, list[Any]] = {
    **{name: values for name, values in AXES.items() if name not in CPUS},
    "crowd": [(0, 1), (0, 7), (0, 256), (7, 16), (7, 64), (49, 64), (49, 256)],
    "width": [1, 7, 15],
    "graphs": [True, False],
    "overlap": [True, False],
}
COVERS = 2  # of all pairs, so that each model meets several cases
CASES = [
    {"model": model} | case
    for model, case in zip(
        cycle(AXES["model"]), [case for seed in range(COVERS) for case in all_pairs(OURS, seed)], strict=False
    )
]


def test_every_model_has_its_cases() -> None:
    assert {case["model"] for case in CASES} == set(AXES["model"])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_outputs_and_logits_are_the_same_bits(case: dict[str, Any], gpu_ops: Ops) -> None:
    neighbours, step_tokens = case["crowd"]
    buckets = tuple(rows for rows in case["buckets"] if rows <= step_tokens) if case["graphs"] else ()
    case = case | {"neighbours": neighbours, "step_tokens": step_tokens, "buckets": buckets}
    same_bits(case, gpu_ops, gpu_ops, max_batch=50, graph_mb=512 if case["graphs"] else 0, overlap=case["overlap"])
