"""What inspectors are told of graph shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from power_lab.engine.graphs import Graphs
from power_lab.engine.inspection import BucketReport, ShapeRow, ShapesReport, StepRecord
from power_lab.engine.planner import PADDED_ROWS, BucketPlan, CostCurve, plan_buckets
from power_lab.engine.shapes import Coverage, ShapeStats
from power_lab.engine.speculation.width.costs import MeasuredCosts

SIZES = 512  # row counts that are planned for; the planner is quadratic in them
OFF = "Graphs are off: graph_mb is 0."
UNRECORDED = "No step was recorded as a graph so far: each ran operation by operation."


def report(graphs: Graphs, costs: MeasuredCosts, budget: int, steps: Sequence[StepRecord]) -> ShapesReport:
    """The registry's shapes, and better buckets for its demand. budget: bytes. steps: of the ring."""
    registry = graphs.registry
    totals, demand = registry.totals(), registry.demanded_rows()
    why = OFF if not graphs.enabled else UNRECORDED if totals.steps and not totals.captures else ""
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


def planned(demand: Mapping[int, int], present: Coverage, costs: MeasuredCosts) -> BucketReport | None:
    """As many buckets as there are now, placed where the demand is; None without a demand. Its rarest sizes are left out beyond `SIZES`."""
    if not demand:
        return None
    common = sorted(demand, key=lambda rows: -demand[rows])[:SIZES]
    wanted = {rows: demand[rows] for rows in sorted(common)}
    curve = _measured(wanted, present, costs)
    plan = plan_buckets(wanted, len(present.rows), present, curve or PADDED_ROWS)
    padding, declared = (sum(use.padding_rows for use in uses) for uses in (plan.uses, plan.present_uses))
    uncovered = sum(use.steps for use in plan.present_uses if use.rows == 0)
    return BucketReport(
        buckets=plan.buckets,
        declared=present.rows,
        padding_rows=padding,
        declared_padding_rows=declared,
        declared_uncovered=uncovered,
        saved_s=plan.present_cost - plan.cost if curve is not None else None,
        text=_text(plan, padding, declared, curve is not None),
    )


def _text(plan: BucketPlan, padding: int, declared: int, timed: bool) -> str:
    what = (
        f"{len(plan.buckets)} buckets would pad {padding} rows in {plan.steps} steps, the declared ones pad {declared}"
    )
    if not timed:
        return f"{what}. What that costs is not measured yet."
    return f"{what}; by the measured costs that is {plan.saved:.1%} of the steps' time."


def _measured(demand: Mapping[int, int], present: Coverage, costs: MeasuredCosts) -> CostCurve | None:
    """Seconds of a step by its rows, where at least two sizes were measured and more rows never cost less."""
    points: list[tuple[int, float]] = []
    for rows in sorted({*demand, *present.rows}):
        seconds = costs.step(rows)
        if seconds is not None:
            points.append((rows, max(seconds, points[-1][1] if points else 0.0)))
    return CostCurve(tuple(points)) if len({seconds for _, seconds in points}) > 1 else None


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
