"""What inspectors are told of graph shapes."""

from __future__ import annotations

from collections.abc import Sequence

from power_lab.engine.bucket_report import planned
from power_lab.engine.graphs import Graphs
from power_lab.engine.inspection import ShapeRow, ShapesReport, StepRecord
from power_lab.engine.shapes import ShapeStats
from power_lab.engine.speculation.width.costs import MeasuredCosts

OFF = "Graphs are off: graph_mb is 0."
UNRECORDED = "No step was recorded as a graph so far: each ran operation by operation."


def report(graphs: Graphs, costs: MeasuredCosts, budget: int, steps: Sequence[StepRecord]) -> ShapesReport:
    """The registry's shapes, and better buckets for its demand. budget: bytes. steps: of the ring."""
    registry = graphs.registry
    totals, demand = registry.totals(), registry.demanded_rows()
    why = OFF if not graphs.enabled else UNRECORDED if totals.steps and not totals.recordings else ""
    return ShapesReport(
        enabled=graphs.enabled,
        why=why,
        shapes=tuple(_row(stats) for stats in registry.snapshot()),
        steps=totals.steps,
        captures=totals.captures,
        replays=totals.replays,
        eager=totals.eager,
        evictions=totals.evictions,
        graphs=totals.graphs,
        nbytes=totals.nbytes,
        budget=budget,
        hit_rate=totals.hit_rate,
        window=totals.window,
        history=tuple((step.number, int(step.how == "replay")) for step in steps),
        demand=demand,
        planned=planned(demand, graphs.coverage, costs),
    )


def _row(stats: ShapeStats) -> ShapeRow:
    return ShapeRow(
        rows=stats.shape.rows,
        logits=stats.shape.sampled,
        sampling=stats.shape.sampling,
        captures=stats.captures,
        replays=stats.replays,
        eager=sum(stats.eager.values()),
        evictions=stats.evictions,
        why=stats.eager,
        apart=stats.apart,
        real_rows=stats.real_rows,
        padding_rows=stats.padding_rows,
        nbytes=stats.nbytes,
        held=stats.held,
        last_step=stats.last_step,
    )
