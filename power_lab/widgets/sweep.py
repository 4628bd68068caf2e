"""A sweep as a table: every point with its settings, figures, digest and reason, below the check of outputs and the Pareto front."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, ClassVar

from power_lab.tables import text_table
from power_lab.tuning.point import Point
from power_lab.widgets.figure import meter
from power_lab.widgets.palette import POINTS, legend
from power_lab.widgets.sweep_chart import SweepChart, named, outputs_band, passes, shown
from power_lab.widgets.text import ago, count, seconds, stat

if TYPE_CHECKING:
    from power_lab.tuning.sweep import Sweep

FIGURES = (
    "tokens_per_s",
    "decode_tokens_per_s",
    "time_to_first_token_s",
    "acceptance",
    "tokens_per_pass",
    "planned_bytes",
)
_FURTHER = ("cached_tokens", "graph_hits")  # columns where some point has any


class SweepView(SweepChart):
    """All points, best first, those without figures last."""

    formats: ClassVar[tuple[str, ...]] = ("csv", "netcdf", "json")

    def body(self) -> str:
        sweep = self.sweep
        points = sweep.points
        if not any(point.measured for point in points):
            return _empty(sweep)
        front = {point.number for point in sweep.front()}
        kinds = {point.number: kind_of(sweep, point, front) for point in points}
        counts = {kind: sum(one == kind for one in kinds.values()) for kind in POINTS}
        return (
            _head(sweep)
            + outputs_band(sweep, always=True)
            + legend(POINTS, counts)
            + _table(sweep, kinds)
            + _notes(sweep)
        )


def kind_of(sweep: Sweep, point: Point, front: set[int]) -> str:
    """What a point is in the legend: what is wrong with it comes first."""
    if not point.measured:
        return "failed"
    if any(one.point == point.number for one in sweep.exactness.broken):
        return "unequal"
    return "front" if point.number in front else "beaten"


def as_text(sweep: Sweep) -> str:
    """The same for a terminal."""
    head = ("point", "settings", *map(named, FIGURES), "outputs")
    rows = [
        (
            str(point.number),
            sweep.plan.told(point.trial),
            *(shown(name, point.figures[name]) for name in FIGURES),
            _outputs(sweep, point),
        )
        for point in _ordered(sweep)
    ]
    broken = [f"OUTPUTS DIFFER: {one}" for one in sweep.exactness.broken]
    return "\n".join([sweep.summary(), *broken, text_table(rows, head)])


def _ordered(sweep: Sweep) -> list[Point]:
    ranked = sweep.ranked()
    return [*ranked, *(point for point in sweep.points if point not in ranked)]


def _head(sweep: Sweep) -> str:
    best = sweep.best()
    speed = best.figures["tokens_per_s"]
    plain = [point for point in sweep.ranked() if point.settings.get("speculate", "off") == "off"]
    parts = [stat(f"{speed:.1f}", "tokens/s at best", sweep.plan.told(best.trial))]
    if plain and len(plain) < len(sweep.ranked()):
        parts.append(stat(f"{speed / plain[0].figures['tokens_per_s']:.2f}×", "of the best plain decoding"))
    parts.append(stat(f"{sum(point.measured for point in sweep.points)} of {len(sweep.points)}", "points measured"))
    parts.append(stat(str(len(sweep.plan.groups)), "engine" if len(sweep.plan.groups) == 1 else "engines"))
    parts.append(stat(ago(sweep.seconds), "in all"))
    stopped = (
        f'<p class="pl-note">Stopped: {escape(sweep.stopped)}. <code>.resume()</code> goes on.</p>'
        if sweep.stopped
        else ""
    )
    best_words = f'<p class="pl-note">Best: <b>{escape(sweep.plan.told(best.trial))}</b>, point {best.number}.</p>'
    return f'<div class="pl-head">{"".join(parts)}</div>{best_words}{stopped}<p></p>'


def _table(sweep: Sweep, kinds: dict[int, str]) -> str:
    axes = tuple(sweep.plan.axes)
    points = _ordered(sweep)
    figures = [*FIGURES, *(name for name in _FURTHER if any(point.figures[name] > 0 for point in points))]
    head = ["point", *axes, *map(named, figures), "outputs"]
    most = max((point.figures["tokens_per_s"] for point in points if point.measured), default=1.0)
    rows = "".join(_row(sweep, point, axes, figures, kinds[point.number], most) for point in points)
    speed = named("tokens_per_s")
    top = "".join(f'<th scope="col"{" colspan=2" if name == speed else ""}>{escape(name)}</th>' for name in head)
    table = f'<table class="pl-lesson"><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<div class="pl-points" tabindex="0" role="group" aria-label="Points">{table}</div>'


def _row(sweep: Sweep, point: Point, axes: tuple[str, ...], figures: list[str], kind: str, most: float) -> str:
    mark = POINTS[kind]
    measured = " data-measured" if point.measured else ""
    sign = f'<span class="pl-{kind}" title="{escape(mark.meaning)}">{mark.glyph}</span>'
    cells = [f'<td class="pl-number" data-point="{point.number}"{measured}>{point.number}</td>']
    cells += [f"<td>{escape(_value(point, name))}</td>" for name in axes]
    if not point.measured:
        words = f'<td class="pl-reason" colspan="{len(figures) + 2}">{sign} {escape(point.reason)}</td>'
        return f"<tr>{''.join(cells)}{words}</tr>"
    speed = point.figures["tokens_per_s"]
    spread = [one.tokens_per_s for one in point.passes]
    hint = f"{passes(len(spread))}: {min(spread):.1f} to {max(spread):.1f}"
    cells.append(f'<td class="pl-left">{sign}&nbsp;{meter(speed / most, kind, wide=8)}</td>')
    cells.append(f'<td title="{hint}">{shown("tokens_per_s", speed)}</td>')
    words = (shown(name, point.figures[name]) for name in figures[1:])
    cells += [f"<td>{one.replace(' ', '&nbsp;')}</td>" for one in words]  # one line, also where no style of ours holds
    cells.append(f'<td title="SHA-256 {point.digest}">{_outputs(sweep, point)}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _value(point: Point, name: str) -> str:
    """A setting's value, a dash where it has no effect."""
    if name not in point.settings:
        return "–"
    value = point.settings[name]
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _outputs(sweep: Sweep, point: Point) -> str:
    """The digest's beginning, with a cross where it is not what it must be; of a point without outputs the reason."""
    if not point.measured:
        return point.reason
    broken = any(one.point == point.number for one in sweep.exactness.broken)
    return f"{'✕ ' if broken else ''}{point.digest[:8]}"


def _notes(sweep: Sweep) -> str:
    task, plan = sweep.task, sweep.plan
    fixed = ", ".join(f"{key} {value}" for key, value in plan.fixed.items())
    notes = [
        f"{count(len(task.prompts), 'prompt')}, median of {passes(task.repeats)} after {task.warmup} that do not count.",
        "Passes alternate between the points of an engine; engines follow one another.",
        f"The same for all: {escape(fixed)}." if fixed else "",
        "A dash stands for a setting without effect there, such as a width without drafts.",
        f"Loading took {seconds(_loading(sweep))}.",
        "Click a point's number for its trace; <code>.pareto()</code>, <code>.heatmap(x, y)</code> and <code>.parallel()</code> draw.",
    ]
    return f'<p class="pl-note">{" ".join(filter(None, notes))}</p>'


def _loading(sweep: Sweep) -> float:
    """Seconds of all engines, each counted once."""
    found = {point.trial.config: point.figures["load_s"] for point in sweep.points if point.figures["load_s"] >= 0}
    return sum(found.values())


def _empty(sweep: Sweep) -> str:
    reasons = dict.fromkeys(point.reason for point in sweep.points)
    items = "".join(f"<li>{escape(one)}</li>" for one in reasons)
    stopped = f"<p>Stopped: {escape(sweep.stopped)}. <code>.resume()</code> goes on.</p>" if sweep.stopped else ""
    return f'<div class="pl-empty"><p><b>No point was measured.</b></p>{stopped}<ul>{items}</ul></div>'
