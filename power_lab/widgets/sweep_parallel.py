"""Parallel coordinates: settings and figures of a sweep as axes side by side, every point a line through them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from power_lab.tuning.point import FIGURES, Point
from power_lab.widgets.palette import POINTS, legend
from power_lab.widgets.picture import FAINT, INK, line, svg, text
from power_lab.widgets.sweep import kind_of
from power_lab.widgets.sweep_chart import Spot, SweepChart, named, outputs_band, shown, told
from power_lab.widgets.text import count

if TYPE_CHECKING:
    from bokeh.models import Plot

    from power_lab.tuning.sweep import Sweep

WIDTH, HEIGHT = 860.0, 320.0  # px
_SIDE, _TOP, _BOTTOM = 70.0, 48.0, 22.0  # px
_DEFAULT = ("tokens_per_pass", "time_to_first_token_s", "planned_bytes", "tokens_per_s")
_LONGEST = 14  # characters of a label


class ParallelView(SweepChart):
    """Lines from setting to figure.

    Args:
        figures: the axes behind the settings; speeds, passes, waits and memory if none are named. The last one has the places to click.
    """

    def __init__(self, sweep: Sweep, figures: Sequence[str] = ()) -> None:
        for name in figures:
            sweep.ranked(name)  # refuses an unknown one
        drawn = [point for point in sweep.points if point.measured]
        wanted = figures or [name for name in _DEFAULT if _varies(drawn, name)] or ["tokens_per_s"]
        self.figures = tuple(wanted)
        self.axes = (*sweep.plan.axes, *self.figures)
        self._drawn = drawn
        self._front = {point.number for point in sweep.front()}
        super().__init__(sweep)

    def summary(self) -> str:
        return (
            f"{count(len(self._drawn), 'point')} over {', '.join([*self.sweep.plan.axes, *map(named, self.figures)])}"
        )

    def body(self) -> str:
        if not self._drawn:
            return '<div class="pl-empty"><p><b>No point was measured.</b></p></div>'
        kinds = [kind_of(self.sweep, point, self._front) for point in self._drawn]
        counts = {kind: kinds.count(kind) for kind in POINTS} | {"failed": len(self.sweep.points) - len(self._drawn)}
        return outputs_band(self.sweep) + legend(POINTS, counts) + self.plot(self.summary())

    def picture(self) -> str:
        if not self._drawn:
            return ""
        parts = [self._axis(at, name) for at, name in enumerate(self.axes)]
        lines = sorted(self._drawn, key=lambda point: kind_of(self.sweep, point, self._front) != "beaten")
        return svg(WIDTH, HEIGHT, "".join([*map(self._line, lines), *parts]))

    def places(self) -> list[Spot]:
        x = 100 * self._x(len(self.axes) - 1) / WIDTH
        found = []
        for point in sorted(self._drawn, key=lambda one: self.height(one, self.axes[-1])):
            if self.axes[-1] in FIGURES and math.isnan(point.figures[self.axes[-1]]):
                continue
            y = 100 * self._y(self.height(point, self.axes[-1])) / HEIGHT
            found.append((point.number, round(x, 3), round(y, 3), told(self.sweep, point, self.figures)))
        return found

    def explore(self) -> Plot:
        """The same with Bokeh: a line under the pointer tells all its figures, a click opens its trace in this view."""
        from power_lab.widgets.sweep_bokeh import lines

        return lines(self.sweep, self._drawn, self.axes, self.height, self.ticks, self._front)

    def height(self, point: Point, name: str) -> float:
        """Where a line crosses an axis, 0 at its lower end to 1; NaN where the point has no such value."""
        if name in self.figures:
            value = point.figures[name]
            low, high = self._range(name)
            return (value - low) / (high - low) if high > low else 0.5
        values = self._values(name)
        if name not in point.settings:  # without effect there: the line leaves the axis out
            return math.nan
        at = values.index(point.settings[name])
        return at / (len(values) - 1) if len(values) > 1 else 0.5

    def ticks(self, name: str) -> list[tuple[float, str]]:
        """Labels of an axis: all values of a setting, both ends of a figure."""
        if name in self.figures:
            low, high = self._range(name)
            return [(0.0, shown(name, low)), (1.0, shown(name, high))] if high > low else [(0.5, shown(name, low))]
        values = self._values(name)
        last = max(1, len(values) - 1)
        return [(at / last if len(values) > 1 else 0.5, _short(value)) for at, value in enumerate(values)]

    def _values(self, name: str) -> Sequence[Any]:
        """Of a setting, from below: numbers by size, anything else as it was given."""
        values = self.sweep.plan.axes[name]
        return sorted(values) if all(isinstance(value, (int, float)) for value in values) else values

    def _range(self, name: str) -> tuple[float, float]:
        known = [value for point in self._drawn if not math.isnan(value := point.figures[name])]
        return (min(known), max(known)) if known else (math.nan, math.nan)

    def _x(self, at: int) -> float:
        return _SIDE + (WIDTH - 2 * _SIDE) * (at / max(1, len(self.axes) - 1))

    def _y(self, share: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * share

    def _line(self, point: Point) -> str:
        kind = kind_of(self.sweep, point, self._front)
        heights = [self.height(point, name) for name in self.axes]
        drawn = [(self._x(at), self._y(share)) for at, share in enumerate(heights) if not math.isnan(share)]
        wide, opacity = (1.1, 0.5) if kind == "beaten" else (2.4, 0.95)
        dash = " stroke-dasharray='5 3'" if kind == "unequal" else ""
        colour = POINTS[kind].light
        end = drawn[-1]
        fill = "#ffffff" if kind == "beaten" else colour
        dot = f"<circle cx='{end[0]:.1f}' cy='{end[1]:.1f}' r='4' fill='{fill}' stroke='{colour}' stroke-width='1.4'/>"
        look = f"stroke='{colour}' stroke-width='{wide}' stroke-opacity='{opacity}' stroke-linejoin='round'{dash}"
        return line(drawn, look) + dot

    def _axis(self, at: int, name: str) -> str:
        x = self._x(at)
        figure = name in self.figures
        title = named(name) if figure else name
        parts = [
            line([(x, self._y(0)), (x, self._y(1))], f"stroke='{INK if figure else FAINT}' stroke-width='1.2'"),
            text(x, 14 if at % 2 == 0 else 28, title, "text-anchor='middle' font-weight='600'"),
        ]
        halo = "paint-order='stroke' stroke='#ffffff' stroke-width='3'"
        for share, words in self.ticks(name):
            if share != share:
                continue
            side = "text-anchor='end'" if at == len(self.axes) - 1 and not figure else ""
            parts.append(
                text(
                    x + (-6 if side else 6),
                    self._y(share) + (-5 if share < 1 else -4),
                    words,
                    f"{side} font-size='10' {halo}",
                )
            )
        return "".join(parts)


def _varies(points: Sequence[Point], name: str) -> bool:
    """Whether an axis would tell points apart."""
    values = {point.figures[name] for point in points if not math.isnan(point.figures[name])}
    return len(values) > 1


def _short(value: Any) -> str:
    words = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…"
