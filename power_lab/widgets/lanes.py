"""Lanes of a timeline: one small picture each, all along the same axis, in a table whose labels stay text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from power_lab.widgets.moments import Axis, Moment, gaps
from power_lab.widgets.palette import BLOCKS, GRAPHS, PARTS, STEPS
from power_lab.widgets.picture import FAINT, INK, bars, image, path, svg, text
from power_lab.widgets.text import count, seconds

WIDTH = 720  # px of a lane before the page stretches it
MOST = 360  # bars of a lane; a bar stands for several steps in a row where there are more
_LEFT = 112  # px of labels in the exported picture
_HAIR = 0.6  # px: the narrowest bar


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane. label, detail: its name and scale; words: what it shows, for who cannot see it; height: px; content: SVG."""

    label: str
    detail: str
    words: str
    height: int
    content: str


@dataclass(frozen=True, slots=True)
class _Bar:
    """Steps in a row that are drawn as one."""

    steps: Sequence[Moment]
    left: float
    width: float

    def mean(self, value: Callable[[Moment], float]) -> float:
        return sum(map(value, self.steps)) / len(self.steps)


def lanes(moments: Sequence[Moment], axis: Axis) -> list[Lane]:
    """All lanes that have something to show."""
    bars_ = _bars(moments, axis)
    found = [
        _rows(bars_, "prefill", lambda one: one.prefill),
        _rows(bars_, "decode", lambda one: one.decode),
        _rows(bars_, "verify", lambda one: one.verify),
        _requests(bars_),
        _preempted(moments, axis),
        _device(bars_),
        _gaps(moments, axis),
        _graphs(bars_),
        _parts(bars_),
        _blocks(bars_),
    ]
    return [lane for lane in found if lane is not None]


def lanes_html(found: Sequence[Lane], axis: Axis, origin: float | None = None) -> str:
    """The table: a row a lane, and the axis below.

    origin: for lanes that will be drawn anew, the time on a lasting clock at which their own begins: by it the page finds its place again.
    """
    rows = "".join(_row(lane, axis) for lane in found)
    # Text, and not a picture: the lanes are stretched when one zooms in. Without its style it is still a row of times.
    ticks = "".join(
        f'<span style="position:absolute;left:{100 * place:.2f}%;transform:translateX({_shift(place)}%)">{_time(at)}</span> '
        for at, place in axis.ticks()
    )
    times = f'<div class="pl-axis" style="position:relative;height:1.5em">{ticks}</div>'
    rows += f'<tr><th scope="row"><small>time</small></th><td>{times}</td></tr>'
    knots = ""
    if origin is not None:
        told = ",".join(f"[{origin + at:.5f},{place:.5f}]" for at, place in axis.knots)
        knots = f'data-knots="[{told}]" '
    return (
        '<div class="pl-lanes pl-scroll" tabindex="0" role="region" aria-label="Timeline" data-lm-suppress-shortcuts="true" '
        f'{knots}style="overflow-x:auto"><table class="pl-lane"><tbody>{rows}</tbody></table></div>'
    )


def lanes_svg(found: Sequence[Lane], axis: Axis) -> str:
    """The same as one picture."""
    parts, top = [], 4.0
    for lane in found:
        parts.append(text(4, top + lane.height / 2 - 1, lane.label))
        parts.append(text(4, top + lane.height / 2 + 11, lane.detail, "font-size='9'"))
        parts.append(f"<g transform='translate({_LEFT} {top:g})'>{_grid(axis, lane.height)}{lane.content}</g>")
        top += max(lane.height, 24) + 8
    for at, place in axis.ticks():
        x = _LEFT + place * WIDTH
        anchor = {0: "start", -50: "middle", -100: "end"}[_shift(place)]
        parts.append(text(x, top + 10, _time(at), f"text-anchor='{anchor}'"))
    return svg(_LEFT + WIDTH + 10, top + 16, "".join(parts))


def _row(lane: Lane, axis: Axis) -> str:
    drawing = svg(WIDTH, lane.height, _grid(axis, lane.height) + lane.content, stretch=True)
    label = f"{escape(lane.label)}<br><small>{escape(lane.detail)}</small>" if lane.detail else escape(lane.label)
    return f'<tr><th scope="row">{label}</th><td>{image(drawing, lane.words, style=_style(lane.height))}</td></tr>'


def _style(height: int) -> str:
    return f"width:{WIDTH}px;height:{height}px"


def _shift(place: float) -> int:
    """How far a label moves left of its tick, in percent of itself, so that it stays within the picture."""
    return 0 if place < 0.02 else -100 if place > 0.97 else -50


def _time(at: float) -> str:
    return seconds(at) if at else "0"


def _grid(axis: Axis, height: float) -> str:
    """Lines at the ticks, and hatching where the axis was cut."""
    lines = "".join(f"M{place * WIDTH:.1f} 0v{height:g}" for _, place in axis.ticks())
    cuts = [(axis.place(low) * WIDTH, axis.place(high) * WIDTH) for low, high in axis.cuts]
    hatched = "".join(
        f"M{x:.1f} {height:g}l4-{height:g}" for left, right in cuts for x in _steps(left, max(left, right - 4), 5)
    )
    return path(lines, f"stroke='{FAINT}' stroke-width='.7'") + path(
        hatched, f"stroke='{INK}' stroke-opacity='.35' stroke-width='.7'"
    )


def _steps(start: float, stop: float, by: float) -> Iterator[float]:
    while start <= stop:
        yield start
        start += by


def _bars(moments: Sequence[Moment], axis: Axis) -> list[_Bar]:
    size = max(1, -(-len(moments) // MOST))
    found = []
    for at in range(0, len(moments), size):
        part = moments[at : at + size]
        left, right = axis.place(part[0].begin) * WIDTH, axis.place(max(one.end for one in part)) * WIDTH
        if size > 1 and at + size < len(moments):
            right = max(
                right, min(right + 0.6, axis.place(moments[at + size].begin) * WIDTH)
            )  # hairs between bars tell nothing
        found.append(_Bar(part, left, max(_HAIR, right - left)))
    return found


def _rows(found: Sequence[_Bar], kind: str, value: Callable[[Moment], int]) -> Lane | None:
    most = max((bar.mean(value) for bar in found), default=0)
    if not most:
        return None
    height = 30
    tall = [(bar, bar.mean(value) / most * (height - 1)) for bar in found]
    # Two shades in turn, so that steps next to each other stay apart; not where bars are steps in a row anyway.
    turns = 2 if all(len(bar.steps) == 1 for bar in found) else 1
    shades = [bars((bar.left, height - up, bar.width, up) for bar, up in tall[turn::turns]) for turn in range(turns)]
    content = "".join(
        path(data, f"fill='{STEPS[kind].light}' fill-opacity='{opacity}'")
        for data, opacity in zip(shades, (1, 0.72), strict=False)
    )
    total = sum(value(one) for bar in found for one in bar.steps)
    steps = sum(1 for bar in found for one in bar.steps if value(one))
    return Lane(
        STEPS[kind].label,
        f"up to {count(round(most), 'row')}",
        f"{STEPS[kind].label}: {count(total, 'row')} in {count(steps, 'step')}, at most {most:.0f} in one",
        height,
        content,
    )


def _requests(found: Sequence[_Bar]) -> Lane:
    height = 30
    most = max((bar.mean(lambda one: one.running + one.waiting) for bar in found), default=0) or 1
    low, high = [], []
    for bar in found:
        running = bar.mean(lambda one: one.running) / most * (height - 1)
        waiting = bar.mean(lambda one: one.waiting) / most * (height - 1)
        low.append((bar.left, height - running, bar.width, running))
        high.append((bar.left, height - running - waiting, bar.width, waiting))
    looks = STEPS["running"].light, STEPS["waiting"].light
    content = path(bars(low), f"fill='{looks[0]}' fill-opacity='.75'") + path(
        bars(high), f"fill='{looks[1]}' fill-opacity='.4'"
    )
    waiting_most = max((one.waiting for bar in found for one in bar.steps), default=0)
    running_most = max((one.running for bar in found for one in bar.steps), default=0)
    return Lane(
        "requests",
        f"{running_most} running, {waiting_most} waiting",
        f"Requests: at most {running_most} running and {waiting_most} waiting",
        height,
        content,
    )


def _preempted(moments: Sequence[Moment], axis: Axis) -> Lane | None:
    found = [one for one in moments if one.preempted]
    if not found:
        return None
    data = "".join(f"M{axis.place(one.begin) * WIDTH - 4:.1f} 3l8 8m0-8l-8 8" for one in found[:MOST])
    total = sum(one.preempted for one in found)
    return Lane(
        "preempted",
        count(total, "time"),
        f"{count(total, 'preemption')} in {count(len(found), 'step')}",
        14,
        path(data, f"stroke='{STEPS['preempted'].light}' stroke-width='1.8' fill='none'"),
    )


def _device(found: Sequence[_Bar]) -> Lane | None:
    """Share of each step in which the device was known to work."""
    known = [(bar, [one for one in bar.steps if one.busy is not None]) for bar in found]
    if not any(steps for _, steps in known):
        return None
    height, boxes, idle = 24, [], []
    for bar, steps in known:
        took = sum(one.duration for one in steps)
        share = min(1.0, sum(one.busy or 0.0 for one in steps) / took) if took > 0 else 0.0
        boxes.append((bar.left, height * (1 - share), bar.width, height * share))
        if steps:
            idle.append((bar.left, 0.0, bar.width, height * (1 - share)))
    took = sum(one.duration for _, steps in known for one in steps)
    busy = sum(one.busy or 0.0 for _, steps in known for one in steps)
    share = min(1.0, busy / took) if took else 0.0
    content = path(bars(boxes), f"fill='{STEPS['decode'].light}' fill-opacity='.55'")
    content += path(bars(idle), f"fill='{STEPS['gap'].light}' fill-opacity='.3'")
    return Lane(
        "device",
        f"busy {100 * share:.0f}% of steps",
        f"Device work: {100 * share:.0f}% of the steps' time",
        height,
        content,
    )


def _gaps(moments: Sequence[Moment], axis: Axis) -> Lane | None:
    found = [(low, high) for low, high in gaps(moments) if (low, high) not in axis.cuts]
    if not found:
        return None
    boxes = [
        (axis.place(low) * WIDTH, 0.0, max(_HAIR, (axis.place(high) - axis.place(low)) * WIDTH), 14.0)
        for low, high in found
    ]
    boxes = sorted(boxes, key=lambda box: -box[2])[:MOST]
    total = sum(high - low for low, high in found)
    return Lane(
        "between steps",
        f"{seconds(total)} in {len(found):,}",
        f"No step in flight: {seconds(total)} in {count(len(found), 'gap')}",
        14,
        path(bars(boxes), f"fill='{STEPS['gap'].light}' fill-opacity='.8'"),
    )


def _graphs(found: Sequence[_Bar]) -> Lane | None:
    hows = [one.how for bar in found for one in bar.steps]
    if not any(how in GRAPHS and how != "eager" for how in hows):
        return None  # all eager: graphs are off, or not known
    content = ""
    for how in ("replay", "capture", "eager"):
        shares = [(bar, bar.mean(lambda one, how=how: one.how == how)) for bar in found]
        boxes = [(bar.left, 0.0, bar.width, 12 * share) for bar, share in shares]
        content += path(bars(boxes), f"fill='{GRAPHS[how].light}' fill-opacity='.85'")
    told = ", ".join(
        f"{hows.count(how):,} {GRAPHS[how].label}" for how in ("replay", "capture", "eager") if how in hows
    )
    share = f"{100 * hows.count('replay') / len(hows):.0f}% replayed"
    return Lane("graphs", share, f"Graphs: {told}", 12, content)


def _parts(found: Sequence[_Bar]) -> Lane | None:
    """What a run's own rounds spent their time on, as shares of each step."""
    if not any(one.parts for bar in found for one in bar.steps):
        return None
    height, content = 30, ""
    levels = [float(height)] * len(found)
    totals = dict.fromkeys(PARTS, 0.0)
    for part, mark in PARTS.items():
        boxes = []
        for at, bar in enumerate(found):
            took = sum(one.duration for one in bar.steps)
            spent = sum(one.parts.get(part, 0.0) for one in bar.steps)
            totals[part] += spent
            tall = min(levels[at], height * spent / took) if took > 0 else 0.0
            levels[at] -= tall
            boxes.append((bar.left, levels[at], bar.width, tall))
        content += path(bars(boxes), f"fill='{mark.light}' fill-opacity='.8'")
    told = ", ".join(f"{part} {seconds(total)}" for part, total in totals.items())
    whole = sum(totals.values()) or 1.0
    return Lane(
        "round",
        f"model {100 * totals['model'] / whole:.0f}% of it",
        f"Where the rounds' time went: {told}",
        height,
        content,
    )


def _blocks(found: Sequence[_Bar]) -> Lane | None:
    total = max((one.used + one.cached + one.free for bar in found for one in bar.steps), default=0)
    if not total:
        return None
    height = 22
    used = [(bar, bar.mean(lambda one: one.used) / total * height) for bar in found]
    cached = [bar.mean(lambda one: one.cached) / total * height for bar in found]
    content = path(
        bars((bar.left, height - tall, bar.width, tall) for bar, tall in used),
        f"fill='{BLOCKS['used'].light}' fill-opacity='.6'",
    )
    content += path(
        bars((bar.left, height - tall - kept, bar.width, kept) for (bar, tall), kept in zip(used, cached, strict=True)),
        f"fill='{BLOCKS['cached'].light}' fill-opacity='.45'",
    )
    most = max(one.used for bar in found for one in bar.steps)
    return Lane(
        "blocks", f"{most:,} of {total:,} used", f"Blocks: at most {most:,} of {total:,} in use", height, content
    )
