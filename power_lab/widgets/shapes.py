"""The graph-shape inspector: which padded shapes steps ran in, what they waste, and which row buckets would serve the traffic better."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from power_lab.engine.bucket_report import planned
from power_lab.engine.shapes import Coverage
from power_lab.engine.vitals import ShapeRow, ShapesReport
from power_lab.widgets import buckets
from power_lab.widgets.figure import LEFT, meter
from power_lab.widgets.palette import GRAPHS, legend
from power_lab.widgets.picture import FAINT, image, line, path, svg, text
from power_lab.widgets.text import count, nbytes, percent, stat
from power_lab.widgets.view import View

if TYPE_CHECKING:
    import xarray

    from power_lab.engine.trace import RunRecord

SCHEMA = "power-lab.shapes/1"
_ROWS = 60  # shapes listed
_STRETCHES = 120  # points of the hit rate


class Shapes(View):
    """Shapes as a table, their demand as a picture, and what other buckets would save.

    Args:
        read: gives the report; it raises a PowerLabError when the engine is gone.
        live: ask again every second while the view can be seen.
    """

    rows = "shape"

    def __init__(self, read: Callable[[], ShapesReport], live: bool = False, refreshable: bool = True) -> None:
        self._read = read
        self._report = read()
        super().__init__(refreshable=refreshable, live=live)

    @property
    def report(self) -> ShapesReport:
        """As it was read last."""
        return self._report

    @property
    def dataset(self) -> xarray.Dataset:
        """Dimensions `shape`, `reason` (of eager steps), `step` (hits of the steps in the ring), `size` (demanded rows), `bucket`."""
        import xarray

        report = self._report
        shapes, reasons = report.shapes, sorted({why for shape in report.shapes for why in shape.why})
        variables: dict[str, Any] = {
            name: ("shape", np.array([getattr(shape, name) for shape in shapes], dtype=kind), _told(unit, title))
            for name, (kind, unit, title) in _COLUMNS.items()
        }
        eager = [[shape.why.get(why, 0) for why in reasons] for shape in shapes]
        variables["eager_by_reason"] = (
            ("shape", "reason"),
            np.array(eager, np.int64).reshape(len(shapes), len(reasons)),
            _told("step", "eager steps by reason"),
        )
        variables["hit"] = (
            "step",
            [hit for _, hit in report.history],
            _told("1", "1 where a recorded graph was replayed"),
        )
        variables["demand"] = ("size", list(report.demand.values()), _told("step", "steps that asked for so many rows"))
        better = report.planned
        variables["planned_rows"] = (
            "bucket",
            np.array(better.buckets if better else (), np.int64),
            _told("token row", "buckets that would serve the demand better"),
        )
        coordinates: dict[str, Any] = {
            "shape": ("shape", np.arange(len(shapes)), _told("1", "shapes in order of rows, logits, sampling")),
            "reason": ("reason", np.array(reasons, dtype=object), _told("1", "why steps ran operation by operation")),
            "step": ("step", np.array([number for number, _ in report.history], np.int64), _told("1", "step number")),
            "size": ("size", np.array([*report.demand], np.int64), _told("token row", "rows asked for")),
        }
        attributes = {
            "schema": SCHEMA,
            "budget_bytes": report.budget,
            "enabled": int(report.enabled),
            "why": report.why,
            "saved_s": np.nan if better is None or better.saved_s is None else better.saved_s,
        }
        return xarray.Dataset(variables, coordinates, attributes)

    def summary(self) -> str:
        report = self._report
        if not report.steps and not report.demand:
            return f"Graph shapes: no steps yet. {report.why}".strip()
        real, padding = _rows_of(report.shapes)
        return (
            f"{count(len(report.shapes), 'graph shape')}: {report.replays:,} replayed, {report.captures:,} captured, "
            f"{report.eager:,} eager steps, {percent(padding, real + padding)} padding, {nbytes(report.nbytes)}"
        )

    def body(self) -> str:
        return _body(self._report)

    def picture(self) -> str:
        return buckets.drawing(self._report) if self._report.demand else ""

    def renew(self) -> str:
        self._report = self._read()
        return self.body()


def report_of(records: Sequence[RunRecord], declared: Coverage | None = None) -> ShapesReport:
    """What the steps of recorded runs, of one engine, would have asked of `declared` buckets (by default those that GPUs have)."""
    steps: dict[tuple[str, int], int] = {}
    for record in records:
        for step in record.steps:
            steps[record.engine.digest, step.step] = step.prefill_rows + step.decode_rows + step.verify_rows
    demand = dict(sorted(Counter(rows for rows in steps.values() if rows).items()))
    declared = declared or Coverage.standard(max(demand, default=1))
    return ShapesReport(
        enabled=False,
        why="From recorded runs: these do not tell which graphs ran.",
        shapes=(),
        steps=0,
        captures=0,
        replays=0,
        eager=0,
        evictions=0,
        graphs=0,
        nbytes=0,
        budget=0,
        hit_rate=None,
        window=0,
        history=(),
        demand=demand,
        planned=planned(demand, declared),
    )


def _told(units: str, long_name: str) -> dict[str, str]:
    return {"units": units, "long_name": long_name}


_COLUMNS: dict[str, tuple[Any, str, str]] = {
    "rows": (np.int64, "token row", "token rows of the shape; 0: all shapes without a line of their own"),
    "logits": (np.int64, "logit row", "logit rows of the shape"),
    "sampling": (object, "1", "how tokens are drawn in it"),
    "captures": (np.int64, "step", "steps whose graph was recorded for them"),
    "replays": (np.int64, "step", "steps that replayed its graph"),
    "eager": (np.int64, "step", "steps that ran operation by operation"),
    "evictions": (np.int64, "1", "how often its graph was given up"),
    "real_rows": (np.int64, "token row", "rows that were asked for"),
    "padding_rows": (np.int64, "token row", "rows that were added"),
    "waste": (np.float64, "1", "share of the computed rows that was padding"),
    "nbytes": (np.int64, "byte", "of its graph"),
    "held": (bool, "1", "whether a graph is held now"),
    "last_step": (np.int64, "1", "when it was used last, in steps counted from 1"),
}


def _rows_of(shapes: Sequence[ShapeRow]) -> tuple[int, int]:
    return sum(shape.real_rows for shape in shapes), sum(shape.padding_rows for shape in shapes)


def _body(report: ShapesReport) -> str:
    if not report.demand and not report.shapes:
        return (
            '<div class="pl-empty"><p><b>No steps yet.</b></p>'
            + (f"<p>{escape(report.why)}</p>" if report.why else "")
            + '<p class="pl-note">Generate something, for example <code>lab.generate("Hello")</code>, and refresh.</p></div>'
        )
    why = f'<p class="pl-note pl-reason">{escape(report.why)}</p>' if report.why else ""
    return _head(report) + why + _over_time(report) + _table(report) + _better(report)


def _head(report: ShapesReport) -> str:
    real, padding = _rows_of(report.shapes)
    rate = "–" if report.hit_rate is None else f"{report.hit_rate:.0%}"
    steps = report.steps or sum(report.demand.values())
    ran = (
        stat(rate, "replayed", f"share of the last {count(report.window, 'step')} that replayed a graph that was there")
        + stat(percent(padding, real + padding), "padding", f"{padding:,} of {real + padding:,} computed token rows")
        + stat(f"{report.graphs:,}", "graphs held", f"{report.evictions:,} were given up so far")
        + stat(nbytes(report.nbytes), f"of {nbytes(report.budget)}", "that graphs occupy, of the budget graph_mb")
        if report.shapes
        else ""
    )
    return f'<div class="pl-head">{stat(f"{steps:,}", "steps")}{ran}</div>'


def _over_time(report: ShapesReport) -> str:
    """The hit rate over the steps in the ring; a picture, and its ends in words."""
    hits = [hit for _, hit in report.history]
    if len(hits) < 2 or not report.captures + report.replays:
        return ""
    stretches = np.array_split(np.array(hits, float), min(_STRETCHES, len(hits)))
    rates = [float(stretch.mean()) for stretch in stretches]
    width, height, left = 640, 64, 34
    reach = width - left - 6
    points = [(left + reach * at / max(1, len(rates) - 1), 8 + 44 * (1 - rate)) for at, rate in enumerate(rates)]
    grid = path(f"M{left} 8H{width - 6}M{left} 52H{width - 6}", f"stroke='{FAINT}'")
    words = text(left - 4, 12, "100%", "text-anchor='end'") + text(left - 4, 56, "0%", "text-anchor='end'")
    drawing = svg(width, height, grid + line(points, f"stroke='{GRAPHS['replay'].light}' stroke-width='1.5'") + words)
    first, last = report.history[0][0], report.history[-1][0]
    alt = (
        f"Share of steps that replayed a graph, from step {first:,} ({rates[0]:.0%}) to step {last:,} ({rates[-1]:.0%})"
    )
    return _titled(f"Hit rate, steps {first:,} to {last:,}", image(drawing, alt))


def _table(report: ShapesReport) -> str:
    if not report.shapes:
        return ""
    sums = {
        "replay": report.replays,
        "capture": report.captures,
        "eager": report.eager,
        "padding": _rows_of(report.shapes)[1],
    }
    used = sorted(report.shapes, key=lambda shape: -(shape.replays + shape.captures + shape.eager))
    listed = sorted(used[:_ROWS], key=lambda shape: (shape.rows, shape.logits, shape.sampling))
    reasons = list(dict.fromkeys(why for shape in used for why in shape.why))
    most = max(1, max(shape.replays + shape.captures + shape.eager for shape in used))
    head = "".join(
        f'<th scope="col" title="{title}"{LEFT if name in {"Steps", "Why eager"} else ""}>{name}</th>'
        for name, title in (
            ("Rows", "token rows of the shape"),
            ("Logits", "rows that tokens are drawn from"),
            ("Steps", "how steps of this shape ran"),
            ("Replayed", GRAPHS["replay"].meaning),
            ("Captured", GRAPHS["capture"].meaning),
            ("Eager", GRAPHS["eager"].meaning),
            ("Padding", "share of the computed rows that was added"),
            ("Bytes", "that its graph occupies; a dash where none is held"),
            ("Why eager", "reasons of eager steps"),
        )
    )
    body = "".join(_shape(shape, most, reasons) for shape in listed)
    more = f'<p class="pl-note">{count(len(used) - _ROWS, "rarer shape")} not listed.</p>' if len(used) > _ROWS else ""
    box = (
        '<div class="pl-scroll" tabindex="0" role="region" aria-label="Graph shapes" style="max-height:26em;overflow:auto">'
        f'<table class="pl-rounds pl-shapes"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
    return _titled("Shapes", legend(GRAPHS, sums) + box + more + _reasons(used, reasons))


def _reasons(shapes: Sequence[ShapeRow], reasons: Sequence[str]) -> str:
    """What the numbers in the table stand for, and what kept sampling out of graphs."""
    lines = [f"[{at}] {escape(reason)}" for at, reason in enumerate(reasons, 1)]
    apart: Counter[str] = Counter()
    for shape in shapes:
        apart.update(shape.apart)
    lines += [
        f"Sampling ran after the graph in {count(steps, 'step')}: {escape(why)}" for why, steps in apart.most_common()
    ]
    return "".join(f'<p class="pl-note pl-why">{one}.</p>' for one in lines)


def _shape(shape: ShapeRow, most: int, reasons: Sequence[str]) -> str:
    why = " ".join(f"{steps:,} × [{reasons.index(reason) + 1}]" for reason, steps in shape.why.items())
    share = "".join(
        meter(steps / most, kind, 8).replace("</span> ", "</span>")
        for kind, steps in (("replay", shape.replays), ("capture", shape.captures), ("eager", shape.eager))
        if steps
    )
    title = f"{shape.sampling}; last used in step {shape.last_step:,}; evicted {count(shape.evictions, 'time')}"
    numbers = "".join(
        f'<td class="pl-num">{n or "–"}</td>'
        for n in (f"{k:,}" if k else "" for k in (shape.replays, shape.captures, shape.eager))
    )
    return (
        f'<tr><th scope="row" title="{escape(title)}">{f"{shape.rows:,}" if shape.rows else "others"}</th><td>{shape.logits:,}</td>'
        f'<td class="pl-left" style="text-align:left">{share}</td>{numbers}'
        f"<td>{shape.waste:.0%}</td><td>{nbytes(shape.nbytes) if shape.held else '–'}</td>"
        f'<td class="pl-left">{why or "–"}</td></tr>'
    )


def _better(report: ShapesReport) -> str:
    return "" if report.planned is None else _titled("Better buckets", buckets.section(report, report.planned))


def _titled(title: str, html: str) -> str:
    return f'<p class="pl-title">{title}</p>{html}'
