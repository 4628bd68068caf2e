"""Row buckets in the graph-shape inspector: whether the declared ones fit the traffic, and which others would serve it better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from power_lab.engine.bucket_report import commonest
from power_lab.engine.planner import PADDED_ROWS, BucketUse, CostCurve, plan_buckets
from power_lab.engine.shapes import Coverage
from power_lab.engine.vitals import BucketReport, ShapesReport
from power_lab.widgets.figure import LEFT, meter, sideways
from power_lab.widgets.palette import GRAPHS
from power_lab.widgets.picture import FAINT, bars, image, path, svg, text
from power_lab.widgets.text import count, percent, seconds

_CHOICES = (1, 2, 4, 8, 16, 32)  # how many buckets are compared
_WORTH = 0.01  # share of the cost below which other buckets are not called better


def section(report: ShapesReport, planned: BucketReport) -> str:
    """The verdict, the demand as a picture, and sets of other sizes, all by the same costs."""
    demand = commonest(report.demand)
    alt = f"Steps by the token rows that they asked for, with the declared and the better buckets. {planned.text}"
    lines = "".join(
        f'<tr><th scope="row" class="pl-left">{name}</th><td class="pl-left pl-wrap">{_listed(rows)}</td></tr>'
        for name, rows in (("Declared", planned.declared), ("Better", planned.buckets))
    )
    sets = f'<table class="pl-lesson"><tbody>{lines}</tbody></table>'
    told = f"<p>{verdict(planned, sum(demand.values()))}</p>{image(drawing(report), alt)}{sets}"
    return f'{told}<p class="pl-note">{_criterion(planned)}</p>{_setting(planned)}{_choices(planned, demand)}'


def _setting(planned: BucketReport) -> str:
    """The better buckets as the call that takes them, to be copied; nothing where they serve no better."""
    if not planned.declared_uncovered and planned.saved < _WORTH:
        return ""
    return f'<p class="pl-note">To take them: <code>lab.configure(buckets={planned.buckets!r})</code></p>'


def verdict(planned: BucketReport, steps: int) -> str:
    """Whether the declared buckets fit so many steps, as HTML. They do not where a step is longer than the largest of them."""
    missed, largest = planned.declared_uncovered, planned.declared[-1]
    better = planned.saved >= _WORTH
    sets = f"{count(len(planned.buckets), 'bucket')} placed where the traffic is"
    longer = (
        f"{count(missed, 'step')} had more rows than the largest declared bucket, {largest:,}: "
        "no graph holds such a step, so it runs operation by operation."
    )
    if better:
        held = " and hold every step" if missed else ""
        return f"<b>{sets} would save {_gain(planned)}{held}.</b>" + (f" {longer}" if missed else "")
    if missed:
        fit = f"The declared buckets fit {steps - missed:,} of {count(steps, 'step')}." if missed < steps else ""
        return f"<b>{fit or 'The declared buckets hold none of the steps.'}</b> {longer} {sets} would hold all, {_padded(planned)}."
    spare = len(planned.declared) - len(planned.buckets)
    fewer = f" {count(len(planned.buckets), 'bucket')} would do." if spare > 0 else ""
    return f"<b>The declared buckets already fit this traffic.{fewer}</b>"


def _gain(planned: BucketReport) -> str:
    if planned.saved_s is not None:
        return (
            f"{seconds(planned.saved_s)} ({planned.saved:.0%} of the steps' time by measured costs), {_padded(planned)}"
        )
    return f"{count(planned.declared_padding_rows - planned.padding_rows, 'padding row')}"


def _padded(planned: BucketReport) -> str:
    return f"with {count(planned.padding_rows, 'padding row')} instead of {planned.declared_padding_rows:,}"


def _criterion(planned: BucketReport) -> str:
    """By what all sets below the verdict are placed: another cost places them elsewhere."""
    if planned.costs:
        return (
            "Sets are placed so that these steps take the least time, by what steps of each size took here; "
            "padding that costs no time is left."
        )
    return "Sets are placed so that the fewest rows are padded: what steps of each size take is not measured."


def _choices(planned: BucketReport, demand: Mapping[int, int]) -> str:
    """What fewer or more buckets would pad and cost: the trade between captures and waste."""
    curve, present = CostCurve(planned.costs) if planned.costs else PADDED_ROWS, Coverage(planned.declared)
    real = sum(rows * steps for rows, steps in demand.items())

    def line(name: str, buckets: Sequence[int], uses: Sequence[BucketUse], cost: float) -> str:
        padding = sum(use.padding_rows for use in uses)
        bar = meter(padding / (real + padding), "padding", 10) if padding else ""
        time = f"<td>{seconds(cost)}</td>" if planned.costs else ""
        return (
            f"<tr><td>{len(buckets):,}{name}</td><td>{bar}{percent(padding, real + padding)}</td>"
            f'<td>{padding:,}</td>{time}<td class="pl-left pl-wrap">{_listed(buckets)}</td></tr>'
        )

    lines, before = [], 0
    for most in sorted({*_CHOICES, len(planned.buckets)}):
        plan = plan_buckets(demand, most, present, curve)
        if len(plan.buckets) == before:
            break
        before = len(plan.buckets)
        name = " (better)" if plan.buckets == planned.buckets else ""
        lines.append(line(name, plan.buckets, plan.uses, plan.cost))
    now = plan_buckets(demand, 1, present, curve)
    lines.insert(0, line(" (declared)", planned.declared, now.present_uses, now.present_cost))
    names = ("Buckets", "Padding", "Rows padded", *(("Time of the steps",) if planned.costs else ()))
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    head = f'<thead><tr>{head}<th scope="col"{LEFT}>Placed at</th></tr></thead>'
    table = f'<table class="pl-lesson pl-options">{head}<tbody>{"".join(lines)}</tbody></table>'
    return sideways(table, "Sets of buckets")


def _listed(buckets: Sequence[int]) -> str:
    """Runs of neighbours as ranges."""
    runs: list[list[int]] = []
    for rows in buckets:
        if runs and rows == runs[-1][-1] + 1:
            runs[-1].append(rows)
        else:
            runs.append([rows])
    told = [
        f"{run[0]:,}" if len(run) == 1 else f"{run[0]:,}–{run[-1]:,}" if len(run) > 2 else f"{run[0]:,}, {run[1]:,}"
        for run in runs
    ]
    return ", ".join(told[:40]) + (f" and {len(told) - 40} more" if len(told) > 40 else "")


def drawing(report: ShapesReport) -> str:
    """Steps by the rows that they asked for, over a scale that gives small sizes room; buckets as ticks below."""
    planned = report.planned
    declared, better = (planned.declared, planned.buckets) if planned else ((), ())
    largest = max([*report.demand, *better, 1])
    width, left, top, base = 640, 66, 18, 96

    def across(rows: float) -> float:
        return left + (width - left - 12) * np.log2(1 + rows) / np.log2(1 + largest)

    most = max(report.demand.values())
    columns = bars(
        (across(rows) - 1.5, base - 76 * steps / most, 3, max(1.0, 76 * steps / most))
        for rows, steps in report.demand.items()
    )
    ticks = [rows for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if rows <= largest]
    labels = "".join(text(across(rows), base + 14, f"{rows:,}", "text-anchor='middle'") for rows in ticks)
    marks = _ticks([across(rows) for rows in declared if rows <= largest], base + 24, GRAPHS["padding"].light)
    marks += _ticks([across(rows) for rows in better], base + 40, GRAPHS["replay"].light)
    words = (
        text(left - 8, base + 33, "declared", "text-anchor='end'")
        + text(left - 8, base + 49, "better", "text-anchor='end'")
        + text(left - 8, base + 14, "rows", "text-anchor='end'")
        + text(left - 8, top + 8, f"{most:,}", "text-anchor='end'")
        + text(left - 8, top + 20, "steps", "text-anchor='end'")
    )
    axis = path(f"M{left} {base}H{width - 6}", f"stroke='{FAINT}'")
    return svg(width, base + 58, axis + path(columns, f"fill='{GRAPHS['capture'].light}'") + labels + marks + words)


def _ticks(places: Sequence[float], y: float, colour: str) -> str:
    return path("".join(f"M{x:.1f} {y}v10" for x in places), f"stroke='{colour}' stroke-width='2'")
