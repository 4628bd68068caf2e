"""Plots of a sweep with Bokeh, to zoom, pan and point at. A click tells the sweep's view on the page, which opens the trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from power_lab.tuning.point import FIGURES, Point
from power_lab.widgets.palette import MARKS, POINTS
from power_lab.widgets.picture import INK
from power_lab.widgets.sweep_chart import named, shade, shown

if TYPE_CHECKING:
    from bokeh.models import ColumnDataSource, Plot

    from power_lab.tuning.sweep import Sweep

# The page's views listen to it; the first that hears it answers. Without one, nothing happens.
_TELL = """
const [at] = source.selected.indices;
if (at === undefined) return;
const detail = { sweep, point: source.data.point[at] };
document.dispatchEvent(new CustomEvent("power-lab-point", { detail, cancelable: true }));
source.selected.indices = [];
"""
_TOLD = (
    "tokens_per_s",
    "decode_tokens_per_s",
    "time_to_first_token_s",
    "acceptance",
    "tokens_per_pass",
    "planned_bytes",
)


def scatter(sweep: Sweep, points: Sequence[Point], gain: str, cost: str, kind: Callable[[Point], str]) -> Plot:
    """Cost and gain; one legend entry for each kind of point, which a click hides."""
    from power_lab.widgets.bokeh_look import dressed

    plot = _figure(420, named(cost), named(gain), tools="pan,wheel_zoom,box_zoom,reset,save")
    drawn: list[Any] = []
    for name, mark in POINTS.items():
        found = [point for point in points if kind(point) == name]
        if not found:
            continue
        source = _source(sweep, found)
        look = {
            "fill_alpha": 0.9 if name == "front" else 0.1,
            "color": mark.light,
            "size": 11,
            "marker": _MARKERS[name],
        }
        drawn.append(plot.scatter(f"raw_{cost}", f"raw_{gain}", source=source, legend_label=mark.label, **look))
        _tell(source, sweep)
    _tips(plot, drawn)
    plot.legend.click_policy = "hide"
    _legend_above(plot)
    _numbers_on(plot.xaxis, cost)
    _numbers_on(plot.yaxis, gain)
    return dressed(plot)


def cells(
    sweep: Sweep,
    x: str,
    y: str,
    figure: str,
    columns: Sequence[Any],
    rows: Sequence[Any],
    points: Sequence[Sequence[Point]],
) -> Plot:
    """A heat map; cells without the figure are left empty."""
    from power_lab.widgets.bokeh_look import dressed

    found = [
        (point, str(one), str(other))
        for other, row in zip(rows, points, strict=True)
        for one, point in zip(columns, row, strict=True)
    ]
    known = [point.figures[figure] for point, *_ in found if not math.isnan(point.figures[figure])]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    looks = [_look(point.figures[figure], low, high) for point, *_ in found]
    ranges = {"x_range": [str(value) for value in columns], "y_range": [str(value) for value in reversed(rows)]}
    plot = _figure(110 + 44 * len(rows), x, y, tools="save", **ranges)
    places = {"x": [one for _, one, _ in found], "y": [other for *_, other in found]}
    colours = {"fill": [fill for fill, _ in looks], "ink": [ink for _, ink in looks]}
    source = _source(sweep, [point for point, *_ in found], **places, **colours)
    boxes = plot.rect("x", "y", width=0.97, height=0.94, source=source, fill_color="fill", line_color=None)
    ink = {"text_color": "ink", "text_align": "center", "text_baseline": "middle", "text_font_size": "12px"}
    plot.text("x", "y", text=figure, source=source, **ink)
    _tell(source, sweep)
    _tips(plot, [boxes])
    plot.grid.visible = False
    return dressed(plot)


def lines(
    sweep: Sweep,
    points: Sequence[Point],
    axes: Sequence[str],
    height: Callable[[Point, str], float],
    ticks: Callable[[str], list[tuple[float, str]]],
    front: set[int],
) -> Plot:
    """Parallel coordinates; the line under the pointer stands out, and tells its figures."""
    from bokeh.models import Span

    from power_lab.widgets.bokeh_look import dressed

    names = [named(name) if name in FIGURES else name for name in axes]
    plot = _figure(380, "", "", tools="save", x_range=(-0.35, len(axes) - 0.4), y_range=(-0.12, 1.14))
    heights = [
        [(at, share) for at, name in enumerate(axes) if not math.isnan(share := height(point, name))]
        for point in points
    ]
    kinds = ["front" if point.number in front else "beaten" for point in points]
    source = _source(
        sweep,
        points,
        xs=[[at for at, _ in one] for one in heights],
        ys=[[share for _, share in one] for one in heights],
        colour=[POINTS[kind].light for kind in kinds],
        wide=[2.6 if kind == "front" else 1.2 for kind in kinds],
    )
    look = {"line_color": "colour", "line_width": "wide", "line_alpha": 0.65}
    hover = {"hover_line_color": MARKS["decode"].light, "hover_line_alpha": 1.0, "hover_line_width": 4}
    drawn = plot.multi_line("xs", "ys", source=source, **look, **hover)
    for at, name in enumerate(axes):
        plot.add_layout(Span(location=at, dimension="height", line_color="#888888", line_width=1))
        marks = [(share, words) for share, words in ticks(name) if not math.isnan(share)]
        halo = {"text_font_size": "11px", "text_baseline": "middle", "x_offset": 6, "text_color": INK}
        plot.text([at] * len(marks), [share for share, _ in marks], text=[words for _, words in marks], **halo)
    plot.xaxis.ticker = list(range(len(axes)))
    plot.xaxis.major_label_overrides = dict(enumerate(names))
    plot.yaxis.visible = False
    plot.grid.visible = False
    _tell(source, sweep)
    _tips(plot, [drawn])
    return dressed(plot)


_MARKERS = {"front": "circle", "beaten": "circle", "unequal": "x", "failed": "dash"}


def _figure(height: int, x: str, y: str, tools: str, **options: Any) -> Any:
    from bokeh.plotting import figure

    look = {"sizing_mode": "stretch_width", "max_width": 900, "output_backend": "canvas"}
    return figure(height=height, x_axis_label=x, y_axis_label=y, tools=f"{tools},tap", **look, **options)


def _source(sweep: Sweep, points: Sequence[Point], **further: Sequence[Any]) -> ColumnDataSource:
    from bokeh.models import ColumnDataSource

    data: dict[str, Any] = {
        "point": [point.number for point in points],
        "settings": [sweep.plan.told(point.trial) for point in points],
        "reason": [point.reason for point in points],
    }
    for name in FIGURES:
        data[name] = [shown(name, point.figures[name]) for point in points]
        data[f"raw_{name}"] = [point.figures[name] for point in points]
    return ColumnDataSource({**data, **further})


def _tips(plot: Any, renderers: Sequence[Any]) -> None:
    from bokeh.models import HoverTool

    tips = [
        ("point", "@point"),
        ("settings", "@settings"),
        *((named(name), f"@{name}") for name in _TOLD),
        ("click", "opens its trace"),
    ]
    plot.add_tools(HoverTool(tooltips=tips, renderers=[*renderers]))


def _tell(source: ColumnDataSource, sweep: Sweep) -> None:
    from bokeh.models import CustomJS

    source.selected.js_on_change("indices", CustomJS(args={"source": source, "sweep": sweep.id}, code=_TELL))


def _look(value: float, low: float, high: float) -> tuple[str, str]:
    if math.isnan(value):
        return "#ffffff", POINTS["failed"].light
    return shade((value - low) / (high - low) if high > low else 0.5)


def _legend_above(plot: Any) -> None:
    legend = plot.legend[0]
    plot.add_layout(legend, "above")  # beside the data and not on it
    legend.orientation = "horizontal"
    legend.label_text_font_size = "11px"


def _numbers_on(axis: Any, figure: str) -> None:
    from bokeh.models import NumeralTickFormatter

    axis.formatter = NumeralTickFormatter(format="0.0 b" if FIGURES[figure][0] == "byte" else "0,0.[00]")
