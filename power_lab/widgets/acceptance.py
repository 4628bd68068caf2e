"""The acceptance inspector: what each speculation round drafted, what the target said, what was kept, and what other settings would do."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from power_lab.engine.inspection import LensAsk, LensReport
from power_lab.engine.trace import Round, RunRecord
from power_lab.errors import ConfigError, PowerLabError
from power_lab.evidence.dataset import check, kinds_of
from power_lab.run import Run
from power_lab.widgets import chances
from power_lab.widgets.explorer import Choices
from power_lab.widgets.palette import TOKENS, legend
from power_lab.widgets.rounds_chart import course_chart, rounds_svg
from power_lab.widgets.rounds_table import reasons, rounds_table, title_of
from power_lab.widgets.text import count, finished, percent, stat
from power_lab.widgets.view import View, Work, script

if TYPE_CHECKING:
    import xarray

    from power_lab.jupyter.cancel import CancelToken


class Acceptance(View):
    """Rounds as rows of tokens.

    Args:
        run: the run to show. Raises EvidenceError if its record contradicts itself.
        rows: most table rows drawn; the dataset has all rounds.
        engine: gives the engine that is loaded now, which is asked for probabilities; None where there is none.
    """

    _esm = script("view", "choices", "chances")
    rows: ClassVar[str] = "round"

    def __init__(self, run: Run, rows: int = 150, engine: Callable[[], Any] = lambda: None) -> None:
        check(run.record)
        self.run = run
        self._most, self._engine = rows, engine
        self._reports: dict[int, LensReport] = {}
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

    def asked(self, kind: str, content: dict[str, Any]) -> Work | None:
        """The rounds of another setting, for the sliders; the probabilities of one token."""
        if kind == "what-if":
            return lambda token: self._part(content, token)
        return (lambda token: self._chance(content, token)) if kind == "chance" else None

    def _part(self, content: dict[str, Any], token: CancelToken) -> None:
        html = self.choices.rounds(str(content.get("drafter")), content.get("width"))
        with self.settled(token):
            self.send({"kind": "part", "html": html})

    def _chance(self, content: dict[str, Any], token: CancelToken) -> None:
        """Details of one token with its probabilities, or why there are none. What is no token of the run is not answered."""
        position, rejected = content.get("position"), content.get("rejected") is True
        entry = self._round_of(position)
        if entry is None or not isinstance(position, int):
            return
        row = position - entry.start
        refused = row == entry.accepted < len(entry.drafted)
        if rejected and not refused:
            return
        try:
            report = self._reports.get(position) or self._looked(position, token)
            told, known = chances.asked(report, entry.drafted[row] if rejected else entry.emitted[row]), True
        except PowerLabError as error:
            token.check()
            told, known = f" · no probability: {error}", False
        with self.settled(token):
            title = title_of(entry, position, rejected, told)
            self.send({"kind": "chance", "position": position, "rejected": rejected, "title": title, "known": known})

    def _round_of(self, position: object) -> Round | None:
        """The round that emitted what is at this position."""
        if not isinstance(position, int) or isinstance(position, bool):
            return None
        rounds = self.run.record.rounds
        at = bisect_right(rounds, position, key=lambda entry: entry.start) - 1
        return rounds[at] if at >= 0 and position < rounds[at].start + len(rounds[at].emitted) else None

    def _looked(self, position: int, token: CancelToken) -> LensReport:
        record, engine = self.run.record, self._engine()
        if engine is None:
            raise ConfigError(
                "engine", "none is loaded that could compute it", "Load the run's model, or record with logprobs=3."
            )
        if (engine.facts.sha256, engine.facts.mode) != (record.engine.sha256, record.engine.mode):
            raise ConfigError("engine", "another one is loaded than the run's", f"Load {record.engine.model} again.")
        report = engine.lens(LensAsk.of(record, position, top=chances.RIVALS + 1), lambda: token.cancelled)
        return self._reports.setdefault(position, report)


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
