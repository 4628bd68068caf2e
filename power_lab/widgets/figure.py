"""Figures as HTML tables, which stay readable where scripts, styles and SVG are taken out. Each has a text form too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from power_lab.widgets.palette import MARKS, TOKENS
from power_lab.widgets.style import framed
from power_lab.widgets.text import visible

LEFT = ' class="pl-left"'


class Figure:
    """HTML for a page, text for a terminal."""

    def __init__(self, html: str, text: str) -> None:
        self.html, self.text = html, text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return framed(self.html)


def scrolling(title: str, html: str, shown: bool, group: str = "") -> str:
    """Something wide, in a box that scrolls. Its title takes the keyboard's focus, also where `tabindex` is taken out."""
    name = f' name="{group}"' if group else ""
    inner = f"<details{name}{' open' if shown else ''}><summary>{title}</summary>{html}</details>"
    return f'<div class="pl-scroll" style="overflow-x:auto" tabindex="0">{inner}</div>'


def sideways(html: str, name: str) -> str:
    """Something that narrow places cannot show whole, in a box that scrolls to the side, by keys too; `name` is read out for it."""
    return f'<div class="pl-sideways" tabindex="0" role="group" aria-label="{name}">{html}</div>'


def marked(text: str, kind: str) -> str:
    """A token as its kind looks everywhere."""
    mark = TOKENS[kind]
    return f'<{mark.tag} class="pl-{kind} pl-t" style="{mark.inline()}">{visible(text)}</{mark.tag}>'


def meter(share: float, kind: str, wide: int = 10) -> str:
    """A bar of characters, `wide` of them at a share of 1: what is drawn by style alone is lost on pages that take styles out."""
    eighths = max(1, round(share * wide * 8))
    bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
    return f'<span class="pl-meter" aria-hidden="true" style="color:var(--pl-{kind},{MARKS[kind].light})">{bar}</span> '


def table(head: Iterable[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Cells are HTML; `left` columns are aligned to the left."""
    def side(at: int) -> str:
        return LEFT if at in left else ""

    top = "".join(f'<th scope="col"{side(at)}>{cell}</th>' for at, cell in enumerate(head))
    lines = ("".join(f"<td{side(at)}>{cell}</td>" for at, cell in enumerate(row)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table class="pl-lesson"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
