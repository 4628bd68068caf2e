"""How Bokeh's figures look: ink and paper of our pictures, and on dark themes turned around as those are (`.pl-picture`).

A figure draws on a canvas, which knows no variables of the page. So it has light paper, readable wherever it is shown, and one rule on
the page turns it around while the page's theme is dark, also when the theme is switched later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from bokeh.models import Axis, GlobalInlineStyleSheet, Grid, LayoutDOM, Legend, Plot

from power_lab.widgets.picture import FAINT, INK, PAPER

Root = TypeVar("Root", bound=LayoutDOM)

CLASS = "pl-figure"
DARK = f'[data-jp-theme-light="false"] .{CLASS},.vscode-dark .{CLASS}{{filter:invert(.93) hue-rotate(180deg)}}'
FONT = "system-ui, sans-serif"


def dressed(root: Root) -> Root:
    """A figure, or a layout of several, with our look. Call it when axes and legends are there."""
    root.css_classes = [*root.css_classes, CLASS]
    root.stylesheets = [*root.stylesheets, GlobalInlineStyleSheet(css=DARK)]
    for plot in _all(root, Plot):
        plot.background_fill_color = plot.border_fill_color = PAPER
        plot.outline_line_color = FAINT
        plot.toolbar.logo = None
    for axis in _all(root, Axis):
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = axis.major_label_text_color = INK
        axis.axis_line_color = axis.major_tick_line_color = FAINT
        axis.minor_tick_line_color = None
    for grid in _all(root, Grid):
        grid.grid_line_color = FAINT
    for legend in _all(root, Legend):
        legend.label_text_font, legend.label_text_color = FONT, INK
        legend.border_line_color = None
    return root


def _all(root: LayoutDOM, kind: type) -> Iterable[Any]:
    return root.select({"type": kind})
