"""The acceptance inspector: what each speculation round drafted, what the target said, what was kept, and what other settings would do."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from power_lab.engine.trace import RunRecord
from power_lab.evidence.dataset import check, kinds_of
from power_lab.run import Run
from power_lab.widgets.explorer import Choices
from power_lab.widgets.palette import TOKENS, legend
from power_lab.widgets.rounds_chart import course_chart, rounds_svg
from power_lab.widgets.rounds_table import reasons, rounds_table
from power_lab.widgets.text import count, finished, percent, stat
from power_lab.widgets.view import View, script

if TYPE_CHECKING:
    import xarray


class Acceptance(View):
    """Rounds as rows of tokens.

    Args:
        run: the run to show. Raises EvidenceError if its record contradicts itself.
        rows: most table rows drawn; the dataset has all rounds.
    """

    _esm = script("view", "choices")
    rows: ClassVar[str] = "round"

    def __init__(self, run: Run, rows: int = 150) -> None:
        check(run.record)
        self.run = run
        self._most = rows
        super().__init__()

    @property
    def dataset(self) -> xarray.Dataset:
        """The trace of the run."""
        return self.run.trace

    @cached_property
    def choices(self) -> Choices:
        """The run under other drafters and widths."""
        return Choices.of(self.run)

    def summary(self) -> str:
        run = self.run
        if not run.drafted:
            return f"No speculation: {count(len(run.tokens), 'token')} in {count(len(run.record.rounds), 'round')}"
        return (
            f"Acceptance {percent(run.accepted, run.drafted)} ({run.accepted} of {run.drafted} drafts), "
            f"{run.tokens_per_pass:.2f} tokens per pass over {count(len(run.record.rounds), 'round')}"
        )

    def picture(self) -> str:
        return rounds_svg(self.run.record.rounds)

    def body(self) -> str:
        record = self.run.record
        note = finished(record.id, record.finish)
        if not self.run.drafted:
            return note + _empty(record) + self.choices.html()
        return (
            note
            + _head(self.run)
            + legend(TOKENS, _counts(record))
            + course_chart(record.rounds)
            + rounds_table(record, self._most)
            + reasons(record)
            + self.choices.html()
        )

    def asked(self, kind: str, content: dict[str, Any]) -> None:
        """The rounds of another setting, for the sliders."""
        if kind == "what-if":
            html = self.choices.rounds(str(content.get("drafter")), content.get("width"))
            self.send({"kind": "part", "html": html})


def _head(run: Run) -> str:
    record, params = run.record, run.record.params
    drafter, width = str(params.get("speculate", "off")), params.get("width")
    trained = record.engine.draft.name
    return (
        '<div class="pl-head">'
        + stat(percent(run.accepted, run.drafted), "accepted", f"{run.accepted:,} of {run.drafted:,} draft tokens")
        + stat(f"{run.tokens_per_pass:.2f}", "tokens per pass", "output tokens per pass of the target model")
        + stat(f"{len(record.tokens):,}", "tokens")
        + stat(f"{len(record.rounds):,}", "rounds")
        + stat(
            drafter,
            "drafter" if width is None else f"drafter, up to {width} a round",
            f"the engine's own drafter is {trained}" if trained else "",
        )
        + "</div>"
    )


def _counts(record: RunRecord) -> dict[str, int]:
    counts = Counter(kind for entry in record.rounds for kind in kinds_of(entry))
    counts["rejected"] = sum(len(entry.rejected) for entry in record.rounds)
    return counts


def _empty(record: RunRecord) -> str:
    drafter = str(record.params.get("speculate", "off"))
    if drafter == "off":
        what = "This run did not speculate, so there is no acceptance to show."
        do = 'Run it again with a drafter, such as <code>speculate="lookup"</code>. In exact mode the tokens stay the same.'
    else:
        what = f"The drafter <code>{escape(drafter)}</code> proposed nothing in this run."
        do = "It needs earlier text to find repeats in: try a longer prompt, or a task that quotes its input."
    facts = f"{count(len(record.tokens), 'token')} in {count(len(record.rounds), 'round')}."
    return f'<div class="pl-empty"><p><b>{what}</b></p><p>{do}</p><p class="pl-note">{facts}</p></div>{reasons(record)}'
