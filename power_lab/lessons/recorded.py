"""Figures that were measured on a GPU and written down, for lessons that run where there is none."""

from __future__ import annotations

from power_lab.engine.planner import CostCurve

SOURCE = "bench/results/h200-models-2026-11-30.json: one NVIDIA H200, commit ec2b893"
GEOMETRY = "Qwen3-8B geometry, bf16"

GRAPH_MS = {1: 4.2604, 4: 4.3722, 8: 4.3883, 16: 4.5733, 64: 6.2726, 128: 7.7016}
"""Rows of a step -> milliseconds of its captured graph. 1 and 8 rows: a verify step; the others: so many requests that decode."""

STEP_MS = {1: 4.2731, 4: 4.3939, 8: 5.0049, 16: 4.7151, 64: 6.2137, 128: 7.7167}
"""The same of the whole step, with all that the host does."""

LAUNCH_MS = {1: 0.0111, 4: 0.0143, 8: 0.0226, 16: 0.0113, 64: 0.0140, 128: 0.0186}
"""The same of the call that launches the graph."""


def graph_costs() -> CostCurve:
    """`GRAPH_MS` for the planner."""
    return CostCurve(tuple(sorted(GRAPH_MS.items())), "ms")
