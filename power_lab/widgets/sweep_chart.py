"""What all views of a sweep share: places on a picture that lead to a point's trace, the check of outputs, words and scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import traitlets

from power_lab.errors import ConfigError, PowerLabError
from power_lab.tuning.point import FIGURES, Point
from power_lab.widgets.export import to_csv
from power_lab.widgets.figure import sideways
from power_lab.widgets.picture import image
from power_lab.widgets.text import count, nbytes, seconds
from power_lab.widgets.view import View, Work, content_only, script

if TYPE_CHECKING:
    import xarray

    from power_lab.jupyter.cancel import CancelToken
    from power_lab.tuning.sweep import Sweep

Spot = tuple[int, float, float, str] | tuple[int, float, float, str, float, float]
"""A point's place on the picture: number, left and top in percent, words; of a cell width and height in percent too."""

SHORT = {
    "tokens_per_s": "tokens/s",
    "decode_tokens_per_s": "decode tokens/s",
    "time_to_first_token_s": "first token",
    "acceptance": "accepted",
    "tokens_per_pass": "tokens a pass",
    "planned_bytes": "planned memory",
    "graph_hits": "graph hits",
    "cached_tokens": "cached tokens",
    "prompt_tokens": "prompt tokens",
    "wasted": "drafted in vain",
}
_LISTED = 8  # differences told one by one


class SweepChart(View):
    """A view of a sweep. A click on a point asks the kernel for the trace of its run.

    Attributes:
        spots: where points are on the picture.
        sweep_id: which sweep it is, for plots beside it that lead to the same traces.
    """

    _esm = script("view", "choices", "zoom", "range", "sweep")

    spots = traitlets.List().tag(sync=True)
    sweep_id = traitlets.Unicode().tag(sync=True)

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._opened: Any = None
        super().__init__(sweep_id=sweep.id)
        self.spots = [list(spot) for spot in self.places()]

    @property
    def dataset(self) -> xarray.Dataset:
        """The cube."""
        return self.sweep.dataset

    def places(self) -> Sequence[Spot]:
        """Of the points on the picture; none where there is no picture."""
        return ()

    def summary(self) -> str:
        return self.sweep.summary()

    def plot(self, words: str) -> str:
        """The picture as an image that points can be laid on."""
        drawing = self.picture()
        return sideways(f'<div class="pl-plot">{image(drawing, words)}</div>', "Picture") if drawing else ""

    def _file(self, kind: str) -> bytes:
        return to_csv(self.sweep.table, "point") if kind == "csv" else super()._file(kind)

    def asked(self, kind: str, content: dict[str, Any]) -> Work | None:
        if kind == "trace":
            return lambda token: self._trace(content, token)
        if kind == "what-if" and (opened := self._opened) is not None:
            return lambda token: self._part(
                opened.choices.rounds(str(content.get("drafter")), content.get("width")), token
            )
        return None

    def _part(self, html: str, token: CancelToken) -> None:
        with self.settled(token):
            self.send({"kind": "part", "html": html})

    def _trace(self, content: dict[str, Any], token: CancelToken) -> None:
        told, opened = self._traced(content, token)
        with self.settled(token):
            self._opened = opened
            self.send({"kind": "traced", **told})

    def _traced(self, content: dict[str, Any], token: CancelToken) -> tuple[dict[str, Any], Any]:
        """The trace that the page asks for, or why there is none, and the view of it, where that has sliders."""
        number, prompt, what = content.get("point"), content.get("prompt", 0), content.get("what")
        if not isinstance(number, int) or not isinstance(prompt, int) or what not in ("acceptance", "timeline"):
            return {"failed": "That is no question about a point."}, None
        try:
            point = self.sweep.point(number)
            with content_only():
                view = point.acceptance(prompt) if what == "acceptance" else point.timeline(prompt)
        except (ConfigError, PowerLabError) as error:
            return {"failed": str(error)}, None
        token.check()
        html = view.body()
        told = {"point": number, "prompt": prompt, "what": what, "prompts": len(point.typical.records)}
        shown = {**told, "html": html, "title": f"Point {number}: {self.sweep.plan.told(point.trial)}"}
        return shown, view if what == "acceptance" else None


def shown(figure: str, value: float) -> str:
    """A figure with its unit in words: `104 MB`, `12.3 ms`, `62%`; a dash where it was not measured."""
    if math.isnan(value):
        return "–"
    unit = FIGURES[figure][0]
    if unit == "byte":
        return nbytes(value)
    if unit == "s":
        return seconds(value)
    if figure in ("acceptance", "graph_hits"):
        return f"{100 * value:.0f}%"
    if figure == "tokens_per_pass":
        return f"{value:.2f}"
    return f"{value:.1f}" if unit == "token/s" and value < 1000 else f"{value:,.0f}"


def passes(number: int) -> str:
    """`1 pass`, `2 passes`."""
    return f"{number:,} pass" if number == 1 else f"{number:,} passes"


def named(figure: str) -> str:
    """A figure's name on an axis or above a column."""
    return SHORT.get(figure, figure.removesuffix("_bytes").removesuffix("_s").replace("_", " "))


def told(sweep: Sweep, point: Point, figures: Sequence[str]) -> str:
    """A point in a line: settings, then figures or the reason."""
    parts = [sweep.plan.told(point.trial)]
    parts += (
        [f"{named(name)} {shown(name, point.figures[name])}" for name in figures] if point.measured else [point.reason]
    )
    return f"point {point.number}: {' · '.join(parts)}"


def outputs_band(sweep: Sweep, always: bool = False) -> str:
    """Whether points that must have the same outputs have them. A difference is told in the colour of errors.

    Args:
        always: say too that all is well.
    """
    agree = sweep.exactness
    if not agree.families or not (always or agree.broken):
        return ""
    if agree.broken:
        items = "".join(
            f"<li>{escape(str(one))}: {escape(_settings(sweep, one.point))}</li>" for one in agree.broken[:_LISTED]
        )
        more = len(agree.broken) - _LISTED
        items += f"<li>and {more} more</li>" if more > 0 else ""
        what = f"Outputs differ in {count(len({one.point for one in agree.broken}), 'point')} that must have the same."
        why = "In exact mode these settings never change a token, so this is a fault of the engine or of the machine: please report it."
        return f'<div class="pl-band pl-broken" role="alert"><b>✕ {what}</b> {why}<ul>{items}</ul></div>'
    lines = [_kept(family) for family in agree.families if family.exact]
    lines += [_loose(family) for family in agree.families if not family.exact]
    return f'<div class="pl-band">{"<br>".join(lines)}</div>'


def _kept(family: Any) -> str:
    where = _family(family)
    if len(family.points) == 1:
        return f"<b>One point{where}</b>: the same outputs in {passes(family.passes)}."
    return (
        f"<b>✓ The same outputs at all {len(family.points)} points{where}</b>, in all {family.passes} passes: "
        f"SHA-256 <code>{family.digest[:16]}…</code>"
    )


def _loose(family: Any) -> str:
    same = family.passes - len(family.differences)
    return f"Fast mode{_family(family)} promises no equal outputs: {same} of {family.passes} passes have the same."


def _family(family: Any) -> str:
    kept = {
        key: value.strip("'") for key, value in family.settings.items() if key not in ("model", "mode", "max_tokens")
    }
    return f" with {escape(', '.join(f'{key} {value}' for key, value in kept.items()))}" if kept else ""


def _settings(sweep: Sweep, number: int) -> str:
    return sweep.plan.told(sweep.point(number).trial)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within low..high, at most about `most`."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    raw = span / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * by for by in (1, 2, 2.5, 5, 10) if size * by >= raw)
    first = math.ceil(low / step)
    return [at * step for at in range(first, math.floor(high / step) + 1)]


def shade(share: float) -> tuple[str, str]:
    """Fill and ink of a share 0..1 on one hue, light to dark: it reads in grey too."""
    low, high = (0xE8, 0xF1, 0xF8), (0x00, 0x4F, 0x8A)
    mixed = [round(a + (b - a) * min(1.0, max(0.0, share))) for a, b in zip(low, high, strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed), "#ffffff" if share > 0.55 else "#1f2428"
