"""A figure over two settings of a sweep, as a heat map with its numbers in the cells."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from power_lab.errors import ConfigError
from power_lab.tuning.point import Point
from power_lab.tuning.settings import worded
from power_lab.widgets.palette import POINTS
from power_lab.widgets.picture import FAINT, PAPER, svg, text
from power_lab.widgets.sweep_chart import Spot, SweepChart, named, outputs_band, shade, shown, told

if TYPE_CHECKING:
    from bokeh.models import Plot

    from power_lab.tuning.sweep import Sweep

_LEFT, _TOP, _RIGHT = 120.0, 30.0, 10.0  # px
_WIDE, _TALL, _MOST = 92.0, 34.0, 760.0  # px: of a cell; of the whole picture at most
_GAP = 2.0  # px between cells
_REASON = 22  # characters of a reason in a cell


class HeatView(SweepChart):
    """A heat map.

    Args:
        x, y: swept settings, along and down; figure: what is shown.
        at: the value of each other setting; of those not given, the best point's.

    Raises ConfigError naming a setting that was not swept, a value that it has not, or an unknown figure.
    """

    def __init__(self, sweep: Sweep, x: str, y: str, figure: str, at: Mapping[str, Any]) -> None:
        if x == y:
            raise ConfigError("y", f"{y!r} is the other axis too", "Use two settings.")
        self.x, self.y, self.figure = x, y, figure
        self.columns, self.rows_ = sweep.axis(x), sweep.axis(y)
        for key, value in at.items():
            if value not in sweep.axis(key):
                raise ConfigError(
                    key, f"{value!r} was not measured", f"Use one of {', '.join(map(repr, sweep.axis(key)))}."
                )
        others = [name for name in sweep.plan.axes if name not in (x, y)]
        ranked = sweep.ranked(figure)
        best = ranked[0].settings if ranked else {}
        self.at = {name: at.get(name, best.get(name, sweep.axis(name)[0])) for name in others}
        self._cells = [[sweep.point(**self.at, **{x: one, y: other}) for one in self.columns] for other in self.rows_]
        super().__init__(sweep)

    def summary(self) -> str:
        where = f" at {', '.join(worded(key, value) for key, value in self.at.items())}" if self.at else ""
        return f"{named(self.figure)} by {self.x} and {self.y}{where}"

    def body(self) -> str:
        known = self._known()
        span = f" {shown(self.figure, min(known))} to {shown(self.figure, max(known))}." if known else ""
        failed = [point for row in self._cells for point in row if not point.measured]
        reasons = dict.fromkeys(f"{point.number}: {point.reason}" for point in failed)
        notes = "".join(f"<li>point {escape(one)}</li>" for one in reasons)
        title = f'<p class="pl-note"><b>{escape(self.summary())}.</b>{escape(span)} The best is framed.</p>'
        return outputs_band(self.sweep) + title + self.plot(self._words()) + (f"<ul>{notes}</ul>" if notes else "")

    def picture(self) -> str:
        wide, tall = self._cell()
        parts = [text(0, 16, self.y, "font-weight='600'"), text(_LEFT, 12, self.x, "font-weight='600'")]
        known = self._known()
        best = self.sweep.ranked(self.figure)
        numbers = {point.number for row in self._cells for point in row}
        winner = next((point.number for point in best if point.number in numbers), -1)
        for at, value in enumerate(self.columns):
            parts.append(text(_LEFT + (at + 0.5) * wide, 26, _worded(value), "text-anchor='middle'"))
        for down, row in enumerate(self._cells):
            y = _TOP + down * tall
            parts.append(text(_LEFT - 10, y + tall / 2 + 4, _worded(self.rows_[down]), "text-anchor='end'"))
            for along, point in enumerate(row):
                parts.append(self._box(point, _LEFT + along * wide, y, known, point.number == winner))
        width = _LEFT + len(self.columns) * wide + _RIGHT
        return svg(width, _TOP + len(self.rows_) * tall + 6, "".join(parts))

    def places(self) -> list[Spot]:
        wide, tall = self._cell()
        width = _LEFT + len(self.columns) * wide + _RIGHT
        height = _TOP + len(self.rows_) * tall + 6
        found: list[Spot] = []
        for down, row in enumerate(self._cells):
            for along, point in enumerate(row):
                x, y = 100 * (_LEFT + along * wide) / width, 100 * (_TOP + down * tall) / height
                words = told(self.sweep, point, (self.figure,))
                found.append(
                    (
                        point.number,
                        round(x, 3),
                        round(y, 3),
                        words,
                        round(100 * wide / width, 3),
                        round(100 * tall / height, 3),
                    )
                )
        return found

    def explore(self) -> Plot:
        """The same with Bokeh, with all figures under the pointer. A click on a cell opens its trace in this view."""
        from power_lab.widgets.sweep_bokeh import cells

        return cells(self.sweep, self.x, self.y, self.figure, self.columns, self.rows_, self._cells)

    def _cell(self) -> tuple[float, float]:
        return min(_WIDE, (_MOST - _LEFT - _RIGHT) / len(self.columns)), _TALL

    def _known(self) -> list[float]:
        values = [point.figures[self.figure] for row in self._cells for point in row]
        return [value for value in values if not math.isnan(value)]

    def _box(self, point: Point, x: float, y: float, known: list[float], best: bool) -> str:
        wide, tall = self._cell()
        value = point.figures[self.figure]
        place = (
            f"x='{x + _GAP / 2:.1f}' y='{y + _GAP / 2:.1f}' width='{wide - _GAP:.1f}' height='{tall - _GAP:.1f}' rx='2'"
        )
        middle = (x + wide / 2, y + tall / 2 + 4)
        centred = "text-anchor='middle'"
        if math.isnan(value):
            colour = POINTS["failed"].light
            words = "–" if point.measured else "✕ " + point.reason[:_REASON].partition(":")[0]
            box = (
                f"<rect {place} fill='{PAPER}' stroke='{FAINT if point.measured else colour}' stroke-dasharray='3 2'/>"
            )
            return box + text(*middle, words, f"{centred} font-size='9' fill='{colour}'")
        low, high = min(known), max(known)
        share = (value - low) / (high - low) if high > low else 0.5
        fill, ink = shade(share)
        frame = f" stroke='{POINTS['front'].light}' stroke-width='2.5'" if best else ""
        if any(one.point == point.number for one in self.sweep.exactness.broken):
            frame = f" stroke='{POINTS['unequal'].light}' stroke-width='3' stroke-dasharray='4 2'"
        weight = " font-weight='700'" if best else ""
        return f"<rect {place} fill='{fill}'{frame}/>" + text(
            *middle, shown(self.figure, value), f"{centred} fill='{ink}'{weight}"
        )

    def _words(self) -> str:
        rows = [
            f"{_worded(value)}: {', '.join(shown(self.figure, point.figures[self.figure]) for point in row)}"
            for value, row in zip(self.rows_, self._cells, strict=True)
        ]
        return f"{self.summary()}; {self.x} {', '.join(map(_worded, self.columns))}. {'; '.join(rows)}"


def _worded(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
