"""What-if results by width, to page through on a saved page: radio buttons and style alone, no script and no kernel.

The buttons are one group, so the arrow keys walk through the widths as on a slider. Where styles are stripped, all widths are shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from uuid import uuid4

from power_lab.lessons.figures import Figure, meter, table
from power_lab.tables import text_table
from power_lab.what_if import WhatIf
from power_lab.widgets.palette import TOKENS
from power_lab.widgets.rounds_chart import rounds_chart

_HEAD = ("width", "rounds", "drafted", "wasted", "tokens a pass", "predicted tokens/s")
_STYLE = (
    ".power-lab .pl-pick{{margin-top:14px}}.power-lab .pl-pick label{{display:inline-block;padding:3px 11px;margin:0 4px 6px 0;"
    "border:1px solid rgba(128,128,128,.5);border-radius:4px;cursor:pointer}}"
    ".power-lab .pl-pick>input{{position:absolute;opacity:0}}.power-lab .pl-pick .pl-panel{{display:none}}"
    ".power-lab .pl-pick>input:focus-visible+label{{outline:2px solid var(--jp-brand-color1,#1976d2)}}"
    ".power-lab .pl-pick>input:checked+label{{font-weight:700;border-width:2px;border-color:currentColor}}{shown}"
)


def explore(results: Mapping[int, WhatIf], chosen: int = 0) -> Figure:
    """A row for each width, and below them the rounds of the one that is chosen.

    Args:
        results: width -> what it comes to.
        chosen: the width that is shown at first; 0 is the fastest, or the one of fewest rounds where nothing was measured.
    """
    speeds = {width: result.tokens_per_s for width, result in results.items()}
    known = [speed for speed in speeds.values() if not math.isnan(speed)]
    if not chosen:
        fewest = min(results, key=lambda width: (results[width].target_passes, width))
        chosen = max((w for w in speeds if not math.isnan(speeds[w])), key=lambda w: speeds[w], default=fewest)
    cells, lines = [], []
    for width, result in results.items():
        speed = speeds[width]
        numbers = (
            str(width),
            f"{result.target_passes}",
            f"{result.drafted}",
            f"{result.wasted}",
            f"{result.tokens_per_pass:.2f}",
        )
        shown = "not measured" if math.isnan(speed) else f"{speed:.0f}"
        bar = "" if math.isnan(speed) else meter(speed / max(known), "accepted", wide=160)
        cells.append((*numbers, f"{bar}{shown}"))
        lines.append((*numbers, shown))
    return Figure(table(_HEAD, cells, left=(5,)) + _picks(results, chosen), text_table(lines, _HEAD))


def _picks(results: Mapping[int, WhatIf], chosen: int) -> str:
    group = f"pl-{uuid4().hex[:10]}"
    buttons = "".join(
        f'<input type="radio" name="{group}" id="{group}-{width}"{" checked" if width == chosen else ""}>'
        f'<label for="{group}-{width}">{width}</label>'
        for width in results
    )
    panels = "".join(
        f'<div class="pl-panel pl-panel-{width}"><p class="pl-note">Width {width}: '
        f"{result.target_passes} rounds for {result.tokens} tokens.</p>{rounds_chart(result.rounds)}</div>"
        for width, result in results.items()
    )
    shown = "".join(
        f".power-lab #{group}-{width}:checked~.pl-panels .pl-panel-{width}{{display:block}}" for width in results
    )
    return (
        f'<style>{_STYLE.format(shown=shown)}</style><div class="pl-pick" role="group" aria-label="Width">{buttons}'
        f'<div class="pl-panels">{panels}</div></div>{_key()}'
    )


def _key() -> str:
    words = {"accepted": "kept drafts", "plain": "the target's own token", "rejected": "drafts in vain, below the line"}
    items = "".join(
        f'<span style="display:inline-block;width:10px;height:10px;margin:0 5px 0 14px;{_look(name)}"></span>{word}'
        for name, word in words.items()
    )
    return f'<p class="pl-note">{items}</p>'


def _look(name: str) -> str:
    mark = TOKENS[name]
    if name == "rejected":
        return f"border:1px solid {mark.light}"
    return f"background:{mark.dark if name == 'plain' else mark.light}"
