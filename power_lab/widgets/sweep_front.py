"""Points of a sweep by what they cost and what they give, with the Pareto front as a staircase."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from power_lab.tuning.point import FIGURES, Point
from power_lab.widgets.palette import POINTS, legend
from power_lab.widgets.picture import FAINT, INK, PAPER, line, svg, text
from power_lab.widgets.sweep import kind_of
from power_lab.widgets.sweep_chart import Spot, SweepChart, named, outputs_band, shown, ticks, told
from power_lab.widgets.text import count

if TYPE_CHECKING:
    from bokeh.models import Plot

    from power_lab.tuning.sweep import Sweep

WIDTH, HEIGHT = 760.0, 340.0  # px
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 170.0, 26.0, 44.0  # px around the frame; labels of the front reach to the right
_R = 5.0  # px
_MIB = 1 << 20
_LETTER = 6.2  # px, about, of a letter


class FrontView(SweepChart):
    """A scatter.

    Args:
        gain: figure on the vertical axis, more is better; cost: on the horizontal one, less is better.
    """

    def __init__(self, sweep: Sweep, gain: str, cost: str) -> None:
        self.gain, self.cost = gain, cost
        self._front = sweep.front(gain, cost)  # refuses unknown figures
        self._drawn = [point for point in sweep.points if _known(point, gain, cost)]
        super().__init__(sweep)

    def summary(self) -> str:
        words = f"{named(self.gain)} against {named(self.cost)}"
        return f"{words}: {len(self._front)} of {count(len(self._drawn), 'point')} on the Pareto front"

    def body(self) -> str:
        if not self._drawn:
            return f'<div class="pl-empty"><p><b>No point has both figures.</b></p><p>{escape(self.sweep.summary())}</p></div>'
        kinds = [self._kind(point) for point in self._drawn]
        left = len(self.sweep.points) - len(self._drawn)
        counts = {kind: kinds.count(kind) for kind in POINTS} | {"failed": left}
        items = "".join(f"<li>{escape(told(self.sweep, point, (self.gain, self.cost)))}</li>" for point in self._front)
        front = f"<details><summary>The front in words</summary><ul>{items}</ul></details>"
        return outputs_band(self.sweep) + legend(POINTS, counts) + self.plot(self.summary()) + front

    def picture(self) -> str:
        if not self._drawn:
            return ""
        parts = [self._grid()]
        stairs = self._stairs()
        parts.append(line(stairs, f"stroke='{POINTS['front'].light}' stroke-width='1.6' stroke-opacity='.75'"))
        order = sorted(self._drawn, key=lambda point: self._kind(point) == "front")  # the front is drawn last, on top
        parts += [self._dot(point) for point in order]
        parts += self._labels()
        return svg(WIDTH, HEIGHT, "".join(parts))

    def places(self) -> list[Spot]:
        found = []
        for point in sorted(self._drawn, key=self._at):
            x, y = self._at(point)
            words = told(self.sweep, point, (self.gain, self.cost))
            found.append((point.number, round(100 * x / WIDTH, 3), round(100 * y / HEIGHT, 3), words))
        return found

    def explore(self) -> Plot:
        """The same with Bokeh, to zoom, pan and point at. A click on a point opens its trace in this view, where that is on the page."""
        from power_lab.widgets.sweep_bokeh import scatter

        return scatter(self.sweep, self._drawn, self.gain, self.cost, self._kind)

    def _kind(self, point: Point) -> str:
        return kind_of(self.sweep, point, {one.number for one in self._front})

    def _range(self, figure: str) -> tuple[float, float]:
        values = [point.figures[figure] for point in self._drawn]
        low, high = min(values), max(values)
        if figure == self.gain:
            low = 0.0 if low >= 0 else low
        room = (high - low or abs(high) or 1.0) * 0.08
        return (low if figure == self.gain else low - room), high + room

    def _at(self, point: Point) -> tuple[float, float]:
        return self._x(point.figures[self.cost]), self._y(point.figures[self.gain])

    def _x(self, value: float) -> float:
        low, high = self._range(self.cost)
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (value - low) / (high - low)

    def _y(self, value: float) -> float:
        low, high = self._range(self.gain)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)

    def _grid(self) -> str:
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        parts = []
        for value in _ticks(self.gain, *self._range(self.gain)):
            y = self._y(value)
            parts.append(line([(_LEFT, y), (right, y)], f"stroke='{FAINT}'"))
            parts.append(text(_LEFT - 8, y + 4, shown(self.gain, value).removesuffix(".0"), "text-anchor='end'"))
        for value in _ticks(self.cost, *self._range(self.cost)):
            x = self._x(value)
            parts.append(line([(x, bottom), (x, bottom + 5)], f"stroke='{INK}'"))
            parts.append(text(x, bottom + 18, shown(self.cost, value), "text-anchor='middle'"))
        parts.append(line([(_LEFT, bottom), (right, bottom)], f"stroke='{INK}'"))
        parts.append(text(_LEFT - 8, 13, named(self.gain), "text-anchor='start' font-weight='600'"))
        parts.append(text(right, HEIGHT - 6, named(self.cost), "text-anchor='end' font-weight='600'"))
        return "".join(parts)

    def _stairs(self) -> list[tuple[float, float]]:
        points = [self._at(point) for point in self._front]
        found: list[tuple[float, float]] = []
        for x, y in points:
            if found:
                found.append((x, found[-1][1]))
            found.append((x, y))
        return [*found, (WIDTH - _RIGHT, found[-1][1])] if found else []

    def _dot(self, point: Point) -> str:
        x, y = self._at(point)
        kind = self._kind(point)
        colour = POINTS[kind].light
        if kind == "unequal":
            return text(x, y + 5, "✕", f"text-anchor='middle' font-size='15' font-weight='700' fill='{colour}'")
        fill = colour if kind == "front" else "#ffffff"
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{_R}' fill='{fill}' stroke='{colour}' stroke-width='1.6'/>"

    def _labels(self) -> list[str]:
        """Names of the front's points, where there is room for them."""
        parts: list[str] = []
        taken: list[float] = []
        for point in reversed(self._front):
            x, y = self._at(point)
            at = y - 9
            if any(abs(at - other) < 13 for other in taken):
                continue
            taken.append(at)
            words = self.sweep.plan.told(point.trial)
            words = words if len(words) <= 40 else words[:39] + "…"
            fits = x + 8 + _LETTER * len(words) < WIDTH
            side = "" if fits else "text-anchor='end' "
            halo = f"{side}fill='{INK}' paint-order='stroke' stroke='{PAPER}' stroke-width='3'"
            parts.append(text(x + 8 if fits else x - 8, at, words, halo))
        return parts


def _ticks(figure: str, low: float, high: float) -> list[float]:
    """Round numbers of the unit in which the figure is shown."""
    unit = _MIB if FIGURES[figure][0] == "byte" else 1
    return [unit * value for value in ticks(low / unit, high / unit)]


def _known(point: Point, *figures: str) -> bool:
    return not any(math.isnan(point.figures[name]) for name in figures)
