"""Better buckets for the rows that steps asked for, as inspectors are told of them: from counts alone, so a record can be asked too."""

from __future__ import annotations

from collections.abc import Mapping

from power_lab.engine.inspection import BucketReport
from power_lab.engine.planner import PADDED_ROWS, BucketPlan, CostCurve, plan_buckets
from power_lab.engine.shapes import Coverage
from power_lab.engine.speculation.width.costs import MeasuredCosts

SIZES = 256  # row counts that are planned for; the planner is quadratic in them


def planned(demand: Mapping[int, int], present: Coverage, costs: MeasuredCosts | None = None) -> BucketReport | None:
    """As many buckets as there are now, placed where the demand is; None without a demand. Without costs, padded rows count alone."""
    if not demand:
        return None
    wanted = commonest(demand)
    curve = None if costs is None else _measured(wanted, present, costs)
    plan = plan_buckets(wanted, len(present.rows), present, curve or PADDED_ROWS)
    padding, declared = (sum(use.padding_rows for use in uses) for uses in (plan.uses, plan.present_uses))
    uncovered = sum(use.steps for use in plan.present_uses if use.rows == 0)
    return BucketReport(
        buckets=plan.buckets,
        declared=present.rows,
        padding_rows=padding,
        declared_padding_rows=declared,
        declared_uncovered=uncovered,
        saved=plan.saved,
        saved_s=plan.present_cost - plan.cost if curve is not None else None,
        costs=() if curve is None else curve.points,
        text=_text(plan, padding, declared, uncovered, curve is not None),
    )


def commonest(demand: Mapping[int, int]) -> dict[int, int]:
    """The demand that is planned for, ascending: its rarest sizes are left out beyond `SIZES`."""
    common = sorted(demand, key=lambda rows: -demand[rows])[:SIZES]
    return {rows: demand[rows] for rows in sorted(common)}


def _text(plan: BucketPlan, padding: int, declared: int, uncovered: int, timed: bool) -> str:
    what = (
        f"{len(plan.buckets)} buckets would pad {padding} rows in {plan.steps} steps, the declared ones pad {declared}"
    )
    if uncovered:
        what += f" and do not hold {uncovered} of the steps"
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
