"""The dashboard's markup: complete as a static view, and what the script writes numbers and lines into."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from power_lab.widgets.history import KEPT_NAMES, OPTIONAL, History
from power_lab.widgets.palette import MARKS
from power_lab.widgets.picture import FAINT, image, line, path, svg, text
from power_lab.widgets.text import nbytes

POINTS = 120  # of a line in a static view


@dataclass(frozen=True, slots=True)
class Tile:
    """A number with its history. field: its column; unit: how it is told; mark: whose colour it has; top: fixed, or 0."""

    field: str
    label: str
    unit: str
    mark: str
    meaning: str
    top: float = 0.0


TILES = (
    Tile("tokens_per_s", "tokens/s", "rate", "accepted", "Output tokens a second, over the last second"),
    Tile("prompt_tokens_per_s", "prompt tokens/s", "rate", "prefill", "Prompt tokens a second, over the last second"),
    Tile("running", "running", "count", "running", "Requests in the batch"),
    Tile("waiting", "queue", "count", "waiting", "Requests that wait for room"),
    Tile("rows", "rows a step", "count", "decode", "Token rows of the last step"),
    Tile("acceptance", "acceptance", "share", "accepted", "Accepted drafts of all drafts, over the last second", 1.0),
    Tile(
        "tokens_per_pass", "tokens a pass", "ratio", "bonus", "Tokens for each pass of the target, over the last second"
    ),
    Tile(
        "hit_rate", "cache hits", "share", "cached", "Prompt tokens that came from the cache, over the last second", 1.0
    ),
    Tile(
        "graph_hit_rate", "graph hits", "share", "replay", "Steps that replayed a recorded graph, of the last ones", 1.0
    ),
    Tile("temperature_c", "temperature", "celsius", "rejected", "Of the device"),
    Tile("power_w", "power", "watt", "rejected", "Of the device"),
)
BARS = (
    (
        "Memory plan",
        "bytes",
        (
            ("weights_bytes", "weights", "used"),
            ("pool_bytes", "KV pool", "cached"),
            ("graph_bytes", "graphs", "replay"),
            ("workspace_bytes", "workspace", "prompt"),
        ),
    ),
    (
        "KV blocks",
        "count",
        (("used_blocks", "in use", "used"), ("cached_blocks", "cached", "cached"), ("free_blocks", "free", "free")),
    ),
)


def told(value: float, unit: str) -> str:
    """As the script tells it."""
    if math.isnan(value):
        return "–"
    if unit == "bytes":
        return nbytes(value)
    if unit == "share":
        return f"{value:.0%}"
    digits = {"rate": 1 if value < 100 else 0, "ratio": 2}.get(unit, 0)
    return f"{value:,.{digits}f}" + {"celsius": " °C", "watt": " W"}.get(unit, "")


def page(facts: Mapping[str, Any], history: History) -> str:
    """The whole view."""
    state = facts.get("state", "none")
    if not len(history):
        title = {"loading": f"Loading {escape(str(facts.get('model', '')))}", "ended": "Disconnected"}.get(
            state, "No engine to watch"
        )
        note = escape(str(facts.get("message", "")))
        empty = f'<div class="pl-empty"><p><b>{title}</b></p><p class="pl-note">{note}</p></div>'
        return f'<div class="pl-watch">{_top(facts)}{empty}</div>'
    table = dict(zip(KEPT_NAMES, history.table.T, strict=True))
    tiles = "".join(_tile(tile, table[tile.field], table["at"]) for tile in shown(history))
    bars = "".join(_bar(title, unit, parts, table) for title, unit, parts in BARS)
    return f'<div class="pl-watch">{_top(facts)}<div class="pl-tiles">{tiles}</div><div class="pl-stacks">{bars}</div></div>'


def shown(history: History) -> list[Tile]:
    """The tiles of the engine that is kept: one loaded on another device may have others."""
    return [tile for tile in TILES if tile.field not in OPTIONAL or tile.field in history.readable]


def _top(facts: Mapping[str, Any]) -> str:
    told = [str(facts[name]) for name in ("mode", "device") if facts.get(name)]
    if facts.get("drafter"):
        told.append(f"drafter {facts['drafter']}")
    if facts.get("others"):
        told.append("also loaded: " + ", ".join(facts["others"]))
    return (
        f'<p class="pl-watch-top"><b data-fact="model">{escape(str(facts.get("model", "")))}</b> '
        f'<small data-fact="rest">{escape(" · ".join(told))}</small></p>'
    )


def _tile(tile: Tile, values: np.ndarray, times: np.ndarray) -> str:
    mark = MARKS[tile.mark]
    return (
        f'<div class="pl-tile" title="{escape(tile.meaning)}" data-field="{tile.field}" data-unit="{tile.unit}"'
        f' data-mark="{mark.name}" data-top="{tile.top:g}">'
        f"<b>{told(float(values[-1]), tile.unit)}</b> <small>{escape(tile.label)}</small>"
        f'<span class="pl-spark">{image(_spark(tile, values, times), _alt(tile, values), style="width:100%;height:32px")}</span></div>'
    )


def _alt(tile: Tile, values: np.ndarray) -> str:
    known = values[~np.isnan(values)]
    if not len(known):
        return f"{tile.label}: nothing yet"
    low, high, now = (told(float(value), tile.unit) for value in (known.min(), known.max(), values[-1]))
    return f"{tile.label}: {low} to {high}, now {now}"


def _spark(tile: Tile, values: np.ndarray, times: np.ndarray, width: int = 150, height: int = 32) -> str:
    parts = _line(tile, values, times, width, height)
    return svg(width, height, path(f"M0 {height - 1}H{width}", f"stroke='{FAINT}'") + parts, stretch=True)


def _line(tile: Tile, values: np.ndarray, times: np.ndarray, width: float, height: float) -> str:
    """Along the time, for samples come at more than one rate. Gaps where nothing is known."""
    groups = min(POINTS, len(values))
    with np.errstate(all="ignore"):
        means = [
            float(np.nanmean(part)) if not np.isnan(part).all() else math.nan for part in np.array_split(values, groups)
        ]
    begin, span = times[0], max(times[-1] - times[0], 1e-9)
    places = [width * (part[-1] - begin) / span for part in np.array_split(times, groups)]
    known = [value for value in means if not math.isnan(value)]
    top = tile.top or max(known, default=0) or 1.0
    look = f"stroke='{MARKS[tile.mark].light}' stroke-width='1.5' vector-effect='non-scaling-stroke'"
    lines, run = [], []
    for at, value in enumerate([*means, math.nan]):
        if math.isnan(value):
            lines.append(line(run, look))
            run = []
        else:
            run.append((places[at], height - 2 - (height - 5) * min(1.0, value / top)))
    return "".join(lines)


def _bar(title: str, unit: str, parts: tuple[tuple[str, str, str], ...], table: Mapping[str, np.ndarray]) -> str:
    values = {field: float(np.nan_to_num(table[field][-1])) for field, _, _ in parts}
    whole = sum(values.values()) or 1.0
    segments = "".join(
        f'<span class="pl-seg pl-{mark}" data-part="{field}" style="{MARKS[mark].inline() or "background-color:rgba(128,128,128,0.1)"};'
        f'display:inline-block;height:14px;width:{100 * values[field] / whole:.2f}%"></span>'
        for field, _, mark in parts
    )
    keys = "".join(
        f'<span class="pl-key"><span class="pl-sample pl-{mark}" style="{MARKS[mark].inline()}">{MARKS[mark].glyph or "ab"}</span> {label} '
        f'<span class="pl-n" data-value="{field}">{told(values[field], unit)}</span></span> '
        for field, label, mark in parts
    )
    return (
        f'<div class="pl-stack" data-unit="{unit}"><small>{title}</small><div class="pl-segs" aria-hidden="true">{segments}</div>'
        f'<div class="pl-legend">{keys}</div></div>'
    )


def picture(history: History) -> str:
    """All tiles as one drawing."""
    if not len(history):
        return ""
    table = dict(zip(KEPT_NAMES, history.table.T, strict=True))
    shown = [tile for tile in TILES if not np.isnan(table[tile.field]).all()]
    wide, high = 240, 84
    parts = []
    for at, tile in enumerate(shown):
        x, y = 12 + (at % 3) * wide, 8 + (at // 3) * high
        words = text(0, 18, told(float(table[tile.field][-1]), tile.unit), "font-size='16'") + text(84, 18, tile.label)
        lines = _line(tile, table[tile.field], table["at"], 210, 40)
        inner = f"<g transform='translate(0 26)'>{path('M0 40H210', f'''stroke='{FAINT}' ''')}{lines}</g>"
        parts.append(f"<g transform='translate({x} {y})'>{words}{inner}</g>")
    return svg(12 + 3 * wide, 16 + -(-len(shown) // 3) * high, "".join(parts))
