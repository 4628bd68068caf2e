"""Rounds as bars: what each one emitted above the line, what it drafted in vain below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from power_lab.widgets.palette import TOKENS
from power_lab.widgets.text import count

MOST = 240  # bars drawn
_BAR, _GAP, _UNIT, _TALLEST = 6, 2, 5, 80  # px: width, between bars, of one token, of one side


class Drafted(Protocol):
    """A round, recorded or replayed."""

    @property
    def drafted(self) -> tuple[int, ...]: ...
    @property
    def accepted(self) -> int: ...
    @property
    def emitted(self) -> tuple[int, ...]: ...


def rounds_chart(rounds: Sequence[Drafted]) -> str:
    """An SVG with a bar for each of the first `MOST` rounds: accepted drafts, the target's own token on top, wasted drafts hollow below."""
    drawn = rounds[:MOST]
    above = max((len(entry.emitted) for entry in drawn), default=0)
    below = max((len(entry.drafted) - entry.accepted for entry in drawn), default=0)
    unit = min(_UNIT, _TALLEST / max(above, below, 1))
    line, width = above * unit, len(drawn) * (_BAR + _GAP)
    height = line + below * unit + 1
    bars = "".join(_bar(index, entry, line, unit) for index, entry in enumerate(drawn))
    more = f"<p><small>{count(len(rounds) - MOST, 'more round')} not drawn.</small></p>" if len(rounds) > MOST else ""
    return (
        f'<svg role="img" aria-label="Tokens of each round: emitted above the line, drafted in vain below" width="{width}"'
        f' height="{height:.1f}" viewBox="0 0 {width} {height:.1f}" style="max-width:100%;display:block;margin:6px 0">'
        f'{bars}<line x1="0" x2="{width}" y1="{line:.1f}" y2="{line:.1f}" stroke="currentColor" stroke-opacity="0.5"/></svg>{more}'
    )


def _bar(index: int, entry: Drafted, line: float, unit: float) -> str:
    wasted, own = len(entry.drafted) - entry.accepted, len(entry.emitted) - entry.accepted
    left = index * (_BAR + _GAP)
    top, kept = line - len(entry.emitted) * unit, entry.accepted * unit
    title = f"round {index}: {entry.accepted} of {count(len(entry.drafted), 'draft')} accepted, {count(len(entry.emitted), 'token')}"
    parts = [_rect(left, top, own * unit, f'fill="{TOKENS["plain"].dark}"')] if own else []
    if entry.accepted:
        parts.append(_rect(left, line - kept, kept, f'fill="{TOKENS["accepted"].light}"'))
    if wasted:
        parts.append(_rect(left, line, wasted * unit, f'fill="none" stroke="{TOKENS["rejected"].light}"'))
    return f"<g><title>{title}</title>{''.join(parts)}</g>"


def _rect(left: float, top: float, height: float, look: str) -> str:
    return f'<rect x="{left}" y="{top:.1f}" width="{_BAR}" height="{height:.1f}" {look}/>'
