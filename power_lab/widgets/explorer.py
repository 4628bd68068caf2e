"""What other settings of speculation would have made of a run: a table, and the rounds behind each of its rows.

`explore` is for saved pages: HTML's own disclosures, no script and no kernel, one group, so that opening one closes the others; Tab and
Enter do what the pointer does. `Choices` is the same table in an inspector, where the page puts sliders on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING
from uuid import uuid4

from power_lab.errors import ConfigError, ReplayRefused
from power_lab.tables import text_table
from power_lab.what_if import WhatIf
from power_lab.widgets.figure import Figure, meter, scrolling, table
from power_lab.widgets.rounds_chart import rounds_chart
from power_lab.widgets.text import count

if TYPE_CHECKING:
    from power_lab.run import Run

_HEAD = ("width", "rounds", "drafted", "in vain", "tokens a round", "predicted tokens/s")
_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 15)
_LONG, _VERY_LONG = 1500, 6000  # tokens; of longer runs fewer choices are computed, since each replays the whole of it
_FEW, _FEWEST = (1, 3, 7, 15), (1, 7)


def explore(results: Mapping[int, WhatIf], chosen: int = 0) -> Figure:
    """A row for each width, and below them the rounds of each, one open.

    Args:
        results: width -> what it comes to.
        chosen: the width that is open at first; 0 is the fastest, or the one of fewest rounds where nothing was measured.
    """
    chosen = chosen or _best(results)
    group = f"pl-{uuid4().hex[:10]}"
    opened = "".join(_rounds(width, result, group, width == chosen) for width, result in results.items())
    cells, lines = _table(results)
    return Figure(f"{table(_HEAD, cells, left=(5,))}<div>{opened}</div>", text_table(lines, _HEAD))


@dataclass(frozen=True)
class Choices:
    """A run under several drafters and widths.

    Attributes:
        results: drafter -> width -> what it comes to; width 0 is no speculation.
        own: drafter and width of the run itself; why: why there are no results.
    """

    results: dict[str, dict[int, WhatIf]]
    own: tuple[str, int]
    why: str = ""

    @classmethod
    def of(cls, run: Run, drafters: Sequence[str] = ("lookup", "ngram")) -> Choices:
        """Under the run's own drafter where its record holds what that says, and under others."""
        params = run.record.params
        given = params.get("width")
        own = str(params.get("speculate", "off")), given if isinstance(given, int) else 0
        tokens = len(run.tokens)
        usual = _WIDTHS if tokens <= _LONG else _FEW if tokens <= _VERY_LONG else _FEWEST
        widths: list[int] = sorted({*usual, *([own[1]] if own[1] else [])})
        others = drafters if tokens <= _VERY_LONG or own[0] == "off" else ()
        names = dict.fromkeys((own[0], *run.record.drafts, *others))
        found: dict[str, dict[int, WhatIf]] = {}
        why = ""
        for name in names:
            if name == "off":
                continue
            try:
                found[name] = {width: run.what_if(speculate=name, width=width) for width in widths}
            except (ConfigError, ReplayRefused) as error:
                why = why or str(error)
        return cls(found, own, "" if found else why)

    def html(self) -> str:
        """A table for each drafter. The page's script turns the class `pl-choices` into sliders.

        `data-first` is the row that they begin at: the run's own width, of other drafters the best one.
        """
        if not self.results:
            return f'<p class="pl-note">No what-if: {escape(self.why)}</p>' if self.why else ""
        parts = []
        for name, results in self.results.items():
            cells, _ = _table(results)
            own = " · this run's" if name == self.own[0] else ""
            grid = table(_HEAD, cells, left=(5,)).replace(
                "<thead>", f"<caption>{escape(name)}{own}</caption><thead>", 1
            )
            own_width = name == self.own[0] and self.own[1] in results  # a run may have been given none
            first = list(results).index(self.own[1] if own_width else _best(results))
            parts.append(f'<div class="pl-choice" tabindex="0" role="group" aria-label="{escape(name)}" data-first="{first}">{grid}</div>')
        title = "What other settings would have done: the same tokens, other rounds"
        return f'<div class="pl-choices"><details><summary>{title}</summary>{"".join(parts)}{self._caveats()}</details></div>'

    def rounds(self, drafter: str, width: object) -> str:
        """The rounds of one choice as a chart; "" where there is none such."""
        result = self.results.get(drafter, {}).get(width) if isinstance(width, int) else None
        return "" if result is None else rounds_chart(result.rounds)

    def _caveats(self) -> str:
        found = dict.fromkeys(
            text for results in self.results.values() for one in results.values() for text in one.caveats
        )
        unknown = any(math.isnan(one.tokens_per_s) for results in self.results.values() for one in results.values())
        notes = [*found, *(["speeds only where this run had steps of as many rows"] if unknown else [])]
        return f'<p class="pl-note">Mind: {escape("; ".join(notes))}.</p>' if notes else ""


def _best(results: Mapping[int, WhatIf]) -> int:
    """The fastest width, or that of fewest rounds where nothing was measured."""
    known = _known(results)
    fewest = min(results, key=lambda width: (results[width].target_passes, width))
    return max(known, key=lambda width: known[width], default=fewest)


def _known(results: Mapping[int, WhatIf]) -> dict[int, float]:
    speeds = {width: result.tokens_per_s for width, result in results.items()}
    return {width: speed for width, speed in speeds.items() if not math.isnan(speed)}


def _table(results: Mapping[int, WhatIf]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Cells of HTML, and the same as text."""
    known = _known(results)
    cells, lines = [], []
    for width, result in results.items():
        numbers = (width, result.target_passes, result.drafted, result.wasted)
        speed = f"{known[width]:.0f}" if width in known else "not measured"
        line = (*map(str, numbers), f"{result.tokens_per_pass:.2f}", speed)
        bar = meter(known[width] / max(known.values()), "accepted", wide=12) if width in known else ""
        cells.append((*line[:-1], bar + line[-1]))
        lines.append(line)
    return cells, lines


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
