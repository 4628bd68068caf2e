"""The timeline with Bokeh: panels on one time axis that zoom and pan together, and details under the pointer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from power_lab.widgets.moments import Moment, gaps
from power_lab.widgets.palette import STEPS

if TYPE_CHECKING:
    from bokeh.models import Column

_TIPS = [
    ("step", "@number"),
    ("took", "@took ms"),
    ("rows", "@prefill prefill, @decode decode, @verify verify"),
    ("requests", "@running running, @waiting waiting"),
    ("device", "@busy"),
    ("graph", "@graph"),
    ("tokens", "@tokens"),
]


def explorer(moments: Sequence[Moment]) -> Column:
    """Rows, requests and device work of steps. Drag to pan, wheel to zoom along time; a double click on the tool shows all again."""
    from bokeh.layouts import column
    from bokeh.models import ColumnDataSource, DataRange1d, HoverTool
    from bokeh.plotting import figure

    from power_lab.widgets.bokeh_look import dressed

    source = ColumnDataSource(_columns(moments))
    plots: list[Any] = []
    for height, title in ((240, "rows"), (140, "requests"), (130, "device")):
        options = {"x_range": plots[0].x_range} if plots else {}
        plot = figure(
            height=height,
            sizing_mode="stretch_width",
            tools="xpan,xwheel_zoom,xbox_zoom,reset,save",
            active_drag="xpan",
            active_scroll="xwheel_zoom",
            y_range=DataRange1d(start=0),
            y_axis_label=title,
            x_axis_label="ms",
            output_backend="canvas",
            **options,
        )
        plot.ygrid.grid_line_alpha = 0.4
        plots.append(plot)
    rows, requests, device = plots
    looks = [STEPS[kind].light for kind in ("prefill", "decode", "verify")]
    tops = [
        rows.quad(
            left="begin",
            right="end",
            bottom=bottom,
            top=top,
            source=source,
            color=colour,
            line_color=None,
            legend_label=kind,
        )
        for kind, bottom, top, colour in zip(
            ("prefill", "decode", "verify"), ("zero", "one", "two"), ("one", "two", "three"), looks, strict=True
        )
    ]
    box = {"left": "begin", "right": "end", "source": source, "line_color": None}
    held = requests.quad(bottom="zero", top="running", color=STEPS["running"].light, legend_label="running", **box)
    requests.quad(bottom="running", top="all", color=STEPS["waiting"].light, alpha=0.5, legend_label="waiting", **box)
    work = device.quad(
        bottom="zero",
        top="share",
        color=STEPS["decode"].light,
        alpha=0.7,
        legend_label="device work, share of the step",
        **box,
    )
    pauses = gaps(moments)
    device.quad(
        left=[1e3 * low for low, _ in pauses],
        right=[1e3 * high for _, high in pauses],
        bottom=0,
        top=1,
        color=STEPS["gap"].light,
        alpha=0.35,
        line_color=None,
        legend_label="no step in flight",
    )
    for plot, drawn in ((rows, tops), (requests, [held]), (device, [work])):
        plot.add_tools(HoverTool(tooltips=_TIPS, renderers=drawn))
        legend = plot.legend[0]
        plot.add_layout(legend, "above")  # beside the data and not on it
        legend.orientation = "horizontal"
        legend.padding = 2
        legend.label_text_font_size = "11px"
    return dressed(column(*plots, sizing_mode="stretch_width"))


def _columns(moments: Sequence[Moment]) -> dict[str, Any]:
    def share(one: Moment) -> float:
        return min(1.0, (one.busy or 0.0) / one.duration) if one.duration > 0 else 0.0

    return {
        "number": [one.number for one in moments],
        "begin": [1e3 * one.begin for one in moments],
        "end": [1e3 * one.end for one in moments],
        "took": [f"{1e3 * one.duration:.2f}" for one in moments],
        "prefill": [one.prefill for one in moments],
        "decode": [one.decode for one in moments],
        "verify": [one.verify for one in moments],
        "running": [one.running for one in moments],
        "waiting": [one.waiting for one in moments],
        "all": [one.running + one.waiting for one in moments],
        "zero": [0] * len(moments),
        "one": [one.prefill for one in moments],
        "two": [one.prefill + one.decode for one in moments],
        "three": [one.rows for one in moments],
        "share": [share(one) for one in moments],
        "busy": ["not measured" if one.busy is None else f"busy {1e3 * one.busy:.2f} ms" for one in moments],
        "graph": [": ".join(filter(None, (one.how, one.why))) or "not told" for one in moments],
        "tokens": [one.tokens for one in moments],
    }
