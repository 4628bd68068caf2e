"""Rounds as bars: what each one emitted above the line, what it drafted in vain below; and how both went on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from power_lab.widgets.palette import TOKENS
from power_lab.widgets.picture import FAINT, INK, bars, image, line, path, svg, text
from power_lab.widgets.text import count, percent

WIDTH = 760  # px
MOST = 200  # bars; a bar stands for several rounds in a row where there are more
_LEFT, _RIGHT, _SIDE, _PANEL = 92, 10, 64, 40  # px: margins; tallest side of the bars; a panel below them
_LANE = 13  # px: height of a drafter's line
_TALL, _WIDE, _SHORT = 12.0, 18.0, 160.0  # px, at most: of one token, of one bar; at least: of all bars

Columns = dict[str, list[float]]  # kind of token -> mean tokens of each bar


class Drafted(Protocol):
    """A round, recorded or replayed."""

    @property
    def drafted(self) -> tuple[int, ...]: ...
    @property
    def accepted(self) -> int: ...
    @property
    def emitted(self) -> tuple[int, ...]: ...
    @property
    def drafter(self) -> str: ...


def rounds_chart(rounds: Sequence[Drafted]) -> str:
    """The bars alone, as an image for a page; its alternative text sums them up."""
    return image(rounds_svg(rounds, course=False), _words(rounds)) + _note(rounds)


def course_chart(rounds: Sequence[Drafted]) -> str:
    """Bars with acceptance and tokens a pass below them, as an image for a page."""
    return image(rounds_svg(rounds), _words(rounds)) + _note(rounds)


def rounds_svg(rounds: Sequence[Drafted], course: bool = True) -> str:
    """Accepted drafts, the target's own token on top, drafts in vain hollow below; `course` adds what came of them so far."""
    columns = _columns(rounds)
    above = max(map(sum, zip(*(columns[kind] for kind in _ABOVE), strict=True)), default=0)
    below = max(columns["rejected"], default=0)
    unit = min(_TALL, _SIDE / max(above, below, 1))
    drawn = len(columns["rejected"])
    pitch = min(_WIDE, (WIDTH - _LEFT - _RIGHT) / max(1, drawn))
    right = _LEFT + max(_SHORT, drawn * pitch)
    middle = 8 + above * unit
    parts = [line([(_LEFT, middle), (right, middle)], f"stroke='{FAINT}'"), _bars(columns, middle, unit, pitch)]
    parts.append(_axis(above, below, middle, unit))
    bottom = middle + below * unit + 6
    lanes = _lanes(rounds, bottom + (8 if below else 4), pitch, gap=_gap(pitch))
    parts += lanes
    bottom += len(lanes) // 2 * _LANE + (6 if lanes else 0)
    if course and any(entry.drafted for entry in rounds):
        parts += _course(rounds, bottom + 12, pitch / _chunk(rounds), right)
        bottom += 2 * (_PANEL + 16) + 4
    return svg(right + _RIGHT, bottom + 4, "".join(parts))


_ABOVE = ("accepted", "correction", "bonus", "plain")


def _chunk(rounds: Sequence[Drafted]) -> int:
    """Rounds of one bar."""
    return max(1, -(-len(rounds) // MOST))


def _columns(rounds: Sequence[Drafted]) -> Columns:
    size = _chunk(rounds)
    found: Columns = {kind: [] for kind in (*_ABOVE, "rejected")}
    for start in range(0, len(rounds), size):
        part = rounds[start : start + size]
        sums = dict.fromkeys(found, 0)
        for entry in part:
            for kind, tokens in _tokens(entry):
                sums[kind] += tokens
        for kind, total in sums.items():
            found[kind].append(total / len(part))
    return found


def _tokens(entry: Drafted) -> Iterator[tuple[str, int]]:
    drafted, kept = len(entry.drafted), min(entry.accepted, len(entry.emitted))
    own = "plain" if not drafted else "correction" if entry.accepted < drafted else "bonus"
    return iter((("accepted", kept), (own, len(entry.emitted) - kept), ("rejected", drafted - entry.accepted)))


def _bars(columns: Columns, middle: float, unit: float, pitch: float) -> str:
    gap = _gap(pitch)
    parts, levels = [], [middle] * len(columns["rejected"])
    for kind in _ABOVE:
        boxes = []
        for at, tokens in enumerate(columns[kind]):
            levels[at] -= tokens * unit
            boxes.append((_LEFT + at * pitch, levels[at], pitch - gap, tokens * unit))
        parts.append(path(bars(boxes), f"class='{kind}' fill='{TOKENS[kind].light}'"))
    boxes = [(_LEFT + at * pitch + 0.5, middle, pitch - gap - 1, n * unit) for at, n in enumerate(columns["rejected"])]
    colour = TOKENS["rejected"].light
    parts.append(
        path(bars(boxes), f"class='rejected' fill='{colour}' fill-opacity='.12' stroke='{colour}' stroke-width='.8'")
    )
    return "".join(parts)


def _gap(pitch: float) -> float:
    return 1.5 if pitch > 6 else 0.5 if pitch > 2 else 0


def _lanes(rounds: Sequence[Drafted], top: float, pitch: float, gap: float) -> list[str]:
    """A line for each drafter with a mark where it drafted: its name and its marks in turn. Nothing where one made all drafts."""
    names = drafters_of(rounds)
    if len(names) < 2:
        return []
    size, parts = _chunk(rounds), []
    for lane, name in enumerate(names):
        low, boxes = top + (lane + 1) * _LANE - 2, []
        for at, start in enumerate(range(0, len(rounds), size)):
            part = rounds[start : start + size]
            tall = (_LANE - 4) * sum(entry.drafter == name for entry in part) / len(part)
            if tall:
                boxes.append((_LEFT + at * pitch, low - tall, pitch - gap, tall))
        parts += [
            text(_LEFT - 6, low, name, "text-anchor='end' font-size='10'"),
            path(bars(boxes), f"class='by' fill='{INK}'"),
        ]
    return parts


def drafters_of(rounds: Sequence[Drafted]) -> dict[str, int]:
    """Who drafted -> rounds, in order of their first."""
    return dict(Counter(entry.drafter for entry in rounds if entry.drafter))


def _axis(above: float, below: float, middle: float, unit: float) -> str:
    right = "text-anchor='end'"
    labels = [
        text(_LEFT - 6, middle - above * unit + 9, f"{above:.0f}", right),
        text(_LEFT - 6, middle + 4, "0", right),
    ]
    if below:
        labels.append(text(_LEFT - 6, middle + max(12, below * unit + 4), f"−{below:.0f}", right))
    words = text(0, middle - 1, "emitted") + (text(0, middle + 11, "in vain") if below else "")
    return "".join(labels) + words


def _course(rounds: Sequence[Drafted], top: float, pitch: float, right: float) -> list[str]:
    """Two panels: acceptance so far, and tokens a pass so far."""
    kept = list(accumulate(entry.accepted for entry in rounds))
    drafted = list(accumulate(len(entry.drafted) for entry in rounds))
    emitted = list(accumulate(len(entry.emitted) for entry in rounds))
    share = [(at, part / whole) for at, (part, whole) in enumerate(zip(kept, drafted, strict=True)) if whole]
    rate = [(at, tokens / (at + 1)) for at, tokens in enumerate(emitted)]
    most = max(value for _, value in rate)
    second = top + _PANEL + 16
    return [
        *_panel(share, 1.0, top, pitch, right, TOKENS["accepted"].light, ("accepted", "so far"), ("100%", "0%")),
        *_panel(
            rate, most, second, pitch, right, TOKENS["correction"].light, ("per pass", "so far"), (f"{most:.1f}", "0")
        ),
    ]


def _panel(
    points: list[tuple[int, float]],
    most: float,
    top: float,
    pitch: float,
    right: float,
    colour: str,
    words: tuple[str, str],
    ends: tuple[str, str],
) -> list[str]:
    step = max(1, len(points) // 250)
    drawn = [
        (_LEFT + (at + 0.5) * pitch, top + _PANEL * (1 - value / most)) for at, value in (points[::step] + points[-1:])
    ]
    frame = "".join(line([(_LEFT, y), (right, y)], f"stroke='{FAINT}'") for y in (top, top + _PANEL))
    return [
        frame,
        line(drawn, f"stroke='{colour}' stroke-width='1.6' stroke-linejoin='round'"),
        text(0, top + 18, words[0]),
        text(0, top + 30, words[1]),
        text(_LEFT - 6, top + 5, ends[0], "text-anchor='end' font-size='9'"),
        text(_LEFT - 6, top + _PANEL + 3, ends[1], "text-anchor='end' font-size='9'"),
    ]


def _words(rounds: Sequence[Drafted]) -> str:
    kept, drafted = sum(entry.accepted for entry in rounds), sum(len(entry.drafted) for entry in rounds)
    emitted = sum(len(entry.emitted) for entry in rounds)
    said = f"{count(len(rounds), 'round')} as bars: {count(emitted, 'token')}"
    return f"{said}, {kept:,} of {count(drafted, 'draft')} accepted ({percent(kept, drafted)})" if drafted else said


def _note(rounds: Sequence[Drafted]) -> str:
    size = _chunk(rounds)
    return f"<p><small>Each bar is the mean of {size} rounds in a row.</small></p>" if size > 1 else ""
