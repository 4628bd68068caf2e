"""What an engine says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from power_lab.kernels.ops import Ops
from tests import tiny


@pytest.mark.parametrize(
    ("settings", "value", "reason"),
    [
        ({}, "1024", "default"),
        ({"context": 512}, "512", "as asked"),
        ({"kv_tokens": 256}, "256", "the KV pool (kv_tokens); the model itself reaches 1024"),
    ],
)
def test_explain_tells_the_context_that_is_in_force(
    settings: dict[str, Any], value: str, reason: str, numba_ops: Callable[[int], Ops]
) -> None:
    engine = tiny.engine(tiny.Shape(layers=1), numba_ops(2), **settings)
    context = next(decision for decision in engine.explain() if decision.key == "context")
    assert (context.value, context.reason) == (value, reason)
    assert context.value == str(engine.context)


def test_every_decision_says_its_value(numba_ops: Callable[[int], Ops]) -> None:
    decisions = {one.key: one.value for one in tiny.engine(tiny.Shape(), numba_ops(2)).explain()}
    assert all(decisions.values()) and decisions["draft_ranking"] == "none"
