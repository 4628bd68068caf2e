"""SVG as an image that a page keeps whatever it thinks of the notebook: JupyterLab takes inline SVG out of untrusted outputs, but not this.

An image cannot read the page's colours. So a picture has light paper of its own, and on dark themes the style sheet turns it around
(`.pl-picture`); where that is taken out, the paper stays light and the ink on it readable.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from urllib.parse import quote

PAPER, INK, FAINT = "#ffffff", "#3b4148", "#d4d8dd"
_SAFE = " !$&'()*+,-./:;=?@_~"  # what a data address may hold within double quotes of HTML


def svg(width: float, height: float, content: str, *, stretch: bool = False) -> str:
    """A drawing of its own: paper and content. `stretch`: it fills its box in both directions, for lanes that are zoomed."""
    ratio = " preserveAspectRatio='none'" if stretch else ""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' width='{width:g}' height='{height:g}'{ratio} "
        f"font-family='system-ui,sans-serif' font-size='11' fill='{INK}'>"
        f"<rect width='{width:g}' height='{height:g}' fill='{PAPER}'/>{content}</svg>"
    )


def image(drawing: str, alt: str, *, style: str = "max-width:100%;height:auto") -> str:
    """An SVG as `<img>`; `alt` says what it shows to who cannot see it."""
    source = quote(drawing, safe=_SAFE).replace("&", "&amp;")
    return f'<img class="pl-picture" alt="{escape(alt)}" style="{escape(style)}" src="data:image/svg+xml,{source}">'


def bars(boxes: Iterable[tuple[float, float, float, float]]) -> str:
    """Path data of many boxes (left, top, width, height): one element, however many there are. Equal ones that touch become one."""
    drawn: list[list[float]] = []
    for x, y, width, height in boxes:
        if width <= 0 or height <= 0:
            continue
        last = drawn[-1] if drawn else None
        if last and abs(last[0] + last[2] - x) < 0.05 and abs(last[1] - y) < 0.05 and abs(last[3] - height) < 0.05:
            last[2] += width
        else:
            drawn.append([x, y, width, height])
    return "".join(f"M{_short(x)} {_short(y)}h{_short(w)}v{_short(h)}h-{_short(w)}z" for x, y, w, h in drawn)


def path(data: str, look: str) -> str:
    """A path element, nothing where there is no data."""
    return f"<path d='{data}' {look}/>" if data else ""


def text(x: float, y: float, words: str, look: str = "") -> str:
    return f"<text x='{x:g}' y='{y:g}'{' ' + look if look else ''}>{escape(words)}</text>"


def line(points: Iterable[tuple[float, float]], look: str) -> str:
    """A line through points, none where there are fewer than two."""
    data = [f"{_short(x)} {_short(y)}" for x, y in points]
    return f"<path d='M{'L'.join(data)}' fill='none' {look}/>" if len(data) > 1 else ""


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
