"""What-if results by width, to open one after the other on a saved page: HTML's own disclosures, no script and no kernel.

The disclosures are one group, so that opening one closes the others; Tab and Enter do what the pointer does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from uuid import uuid4

from power_lab.lessons.figures import Figure, meter, scrolling, table
from power_lab.tables import text_table
from power_lab.what_if import WhatIf
from power_lab.widgets.text import count

_HEAD = ("width", "rounds", "drafted", "in vain", "tokens a round", "predicted tokens/s")


def explore(results: Mapping[int, WhatIf], chosen: int = 0) -> Figure:
    """A row for each width, and below them the rounds of each, one open.

    Args:
        results: width -> what it comes to.
        chosen: the width that is open at first; 0 is the fastest, or the one of fewest rounds where nothing was measured.
    """
    speeds = {width: result.tokens_per_s for width, result in results.items()}
    known = {width: speed for width, speed in speeds.items() if not math.isnan(speed)}
    if not chosen:
        fewest = min(results, key=lambda width: (results[width].target_passes, width))
        chosen = max(known, key=lambda width: known[width], default=fewest)
    cells, lines = [], []
    for width, result in results.items():
        numbers = (width, result.target_passes, result.drafted, result.wasted)
        line = (
            *map(str, numbers),
            f"{result.tokens_per_pass:.2f}",
            f"{known[width]:.0f}" if width in known else "not measured",
        )
        bar = meter(known[width] / max(known.values()), "accepted", wide=12) if width in known else ""
        cells.append((*line[:-1], bar + line[-1]))
        lines.append(line)
    group = f"pl-{uuid4().hex[:10]}"
    opened = "".join(_rounds(width, result, group, width == chosen) for width, result in results.items())
    return Figure(f"{table(_HEAD, cells, left=(5,))}<div>{opened}</div>", text_table(lines, _HEAD))


def _rounds(width: int, result: WhatIf, group: str, shown: bool) -> str:
    """One width: a column for each round that drafted or emitted."""
    rounds = result.rounds
    rows = [
        ("drafts kept", *(str(entry.accepted) for entry in rounds)),
        ("drafts in vain", *(str(len(entry.drafted) - entry.accepted) for entry in rounds)),
        ("tokens", *(str(len(entry.emitted)) for entry in rounds)),
    ]
    what = f"Width {width}: {count(result.target_passes, 'round')} for {count(result.tokens, 'token')}"
    head = ("round", *map(str, range(len(rounds))))
    return scrolling(what, table(head, rows, left=(0,)), shown, group)
