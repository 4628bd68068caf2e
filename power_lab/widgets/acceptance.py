"""The acceptance inspector: what each speculation round drafted, what the target said, what was kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from power_lab.engine.trace import Round, RunRecord
from power_lab.evidence.dataset import check, kinds_of
from power_lab.run import Run
from power_lab.widgets.palette import TOKENS, legend
from power_lab.widgets.text import count, percent, seconds, stat, visible
from power_lab.widgets.view import View

if TYPE_CHECKING:
    import xarray


class Acceptance(View):
    """Rounds as rows of tokens.

    Args:
        run: the run to show. Raises EvidenceError if its record contradicts itself.
        rows: most table rows drawn; the dataset has all rounds.
    """

    def __init__(self, run: Run, rows: int = 300) -> None:
        check(run.record)
        self.run = run
        self._pieces = _pieces(run.record)
        self._rows = rows
        super().__init__()

    @property
    def dataset(self) -> xarray.Dataset:
        """The trace of the run."""
        return self.run.trace

    def summary(self) -> str:
        run = self.run
        if not run.drafted:
            return f"No speculation: {count(len(run.tokens), 'token')} in {count(len(run.record.rounds), 'round')}"
        return (
            f"Acceptance {percent(run.accepted, run.drafted)} ({run.accepted} of {run.drafted} drafts), "
            f"{run.tokens_per_pass:.2f} tokens per pass over {count(len(run.record.rounds), 'round')}"
        )

    def body(self) -> str:
        record = self.run.record
        if not self.run.drafted:
            return _empty(record)
        return (
            _head(self.run)
            + legend(TOKENS, _counts(record))
            + _table(record, self._pieces, self._rows)
            + _notes(record)
        )


def _pieces(record: RunRecord) -> dict[int, str]:
    """Text of every token id that the run names."""
    named = {token: f"#{token}" for entry in record.rounds for token in entry.drafted}
    return named | record.draft_pieces | dict(zip(record.tokens, record.pieces, strict=True))


@dataclass(slots=True)
class _Row:
    """One row of the table: a round with a draft, or a stretch of rounds without one."""

    first: int
    rounds: list[Round] = field(default_factory=list)

    @property
    def number(self) -> str:
        return _range(self.first, self.first + len(self.rounds) - 1)

    @property
    def positions(self) -> str:
        last = self.rounds[-1]
        return _range(self.rounds[0].start, last.start + len(last.emitted) - 1)

    @property
    def times(self) -> str:
        rounds = self.rounds
        parts = [
            f"step {_range(rounds[0].step, rounds[-1].step)}",
            f"draft {seconds(sum(entry.draft_s for entry in rounds))}",
            f"model {seconds(sum(entry.forward_s for entry in rounds))}",
            f"sampling {seconds(sum(entry.sample_s for entry in rounds))}",
            f"commit {seconds(sum(entry.commit_s for entry in rounds))}",
            f"ended {seconds(rounds[-1].at)} after submission",
        ]
        if len(rounds) == 1:
            parts.append(f"{count(rounds[0].rows, 'row')} of {count(rounds[0].requests, 'request')} in the step")
        return " · ".join(parts)


def _rows(record: RunRecord) -> Iterator[_Row]:
    for drafted, stretch in groupby(enumerate(record.rounds), key=lambda pair: bool(pair[1].drafted)):
        members = list(stretch)
        if drafted:
            yield from (_Row(index, [entry]) for index, entry in members)
        else:
            yield _Row(members[0][0], [entry for _, entry in members])


def _head(run: Run) -> str:
    record, params = run.record, run.record.params
    drafter, width = str(params.get("speculate", "off")), params.get("width")
    return (
        '<div class="pl-head">'
        + stat(percent(run.accepted, run.drafted), "accepted", f"{run.accepted:,} of {run.drafted:,} draft tokens")
        + stat(f"{run.tokens_per_pass:.2f}", "tokens per pass", "output tokens per pass of the target model")
        + stat(f"{len(record.tokens):,}", "tokens")
        + stat(f"{len(record.rounds):,}", "rounds")
        + stat(drafter, "drafter" if width is None else f"drafter, up to {width} a round")
        + "</div>"
    )


def _counts(record: RunRecord) -> dict[str, int]:
    counts = Counter(kind for entry in record.rounds for kind in kinds_of(entry))
    counts["rejected"] = sum(len(entry.rejected) for entry in record.rounds)
    return counts


def _table(record: RunRecord, text: dict[int, str], limit: int) -> str:
    drafter = escape(str(record.params.get("speculate", "off")))
    accepted = drafted = emitted = passes = 0
    lines: list[str] = []
    left_out = 0
    for row in _rows(record):
        for entry in row.rounds:
            accepted += entry.accepted
            drafted += len(entry.drafted)
            emitted += len(entry.emitted)
            passes += 1
        if len(lines) >= limit:
            left_out += len(row.rounds)
            continue
        cells = "".join(_tokens(entry, text) for entry in row.rounds)
        lines.append(
            f'<tr><th scope="row" title="{escape(row.times)}">{row.number}</th><td class="pl-num">{row.positions}</td>'
            f'<td class="pl-tokens" style="text-align:left">{cells}</td>{_draft(row, drafter)}'
            f'<td class="pl-num pl-far">{percent(accepted, drafted)}</td><td class="pl-num pl-far">{emitted / passes:.2f}</td></tr>'
        )
    more = (
        f'<p class="pl-note">{count(left_out, "more round")} not drawn; the dataset has them all.</p>'
        if left_out
        else ""
    )
    # The suppress attribute keeps the notebook's own arrow-key shortcuts out of the table.
    return (
        '<div class="pl-scroll" tabindex="0" role="region" aria-label="Rounds" data-lm-suppress-shortcuts="true" '
        'style="max-height:30em;overflow:auto"><table class="pl-rounds"><thead><tr><th scope="col">Round</th><th scope="col">Position</th>'
        '<th scope="col" class="pl-tokens" style="text-align:left">Tokens</th><th scope="col">Draft</th>'
        '<th scope="col" class="pl-far" title="Accepted of all drafted so far">Accepted<br>so far</th>'
        '<th scope="col" class="pl-far" title="Output tokens per pass of the target so far">Per pass<br>so far</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{more}"
    )


def _tokens(entry: Round, text: dict[int, str]) -> str:
    logprobs = [f" · logprob {item.value:.2f}" for item in entry.logprobs] or [""] * len(entry.emitted)
    kept = [
        _token(kind, text[token], f"position {entry.start + index} · token {token}{logprobs[index]}")
        for index, (token, kind) in enumerate(zip(entry.emitted, kinds_of(entry), strict=True))
    ]
    stopped = len(entry.emitted) <= entry.accepted  # nothing was refused: the output ended before
    dropped = []
    for index, token in enumerate(entry.rejected):
        reason = (
            "the output ended before" if stopped else "after a refused draft" if index else "the target drew another"
        )
        dropped.append(
            _token(
                "rejected",
                text[token],
                f"for position {entry.start + entry.accepted + index} · token {token} · {reason}",
            )
        )
    return "".join(kept + dropped)


def _token(kind: str, text: str, title: str) -> str:
    mark = TOKENS[kind]
    style = f' style="{mark.inline()}"' if mark.inline() else ""
    sign = f"{mark.glyph}\u202f" if mark.glyph else ""
    return (
        f'<{mark.tag} class="pl-t pl-{kind}"{style} title="{mark.label} · {title}">{sign}{visible(text)}</{mark.tag}> '
    )


def _draft(row: _Row, drafter: str) -> str:
    entry = row.rounds[0]
    if not entry.drafted:
        reasons = "; ".join(sorted({item.note for item in row.rounds if item.note}))
        return f'<td class="pl-num" title="{escape(reasons)}"><small>none</small></td>'
    width = len(entry.drafted)
    bar = f"{'■' * entry.accepted}{'□' * (width - entry.accepted)}" if width <= 16 else ""
    return (
        f'<td class="pl-num" title="{entry.accepted} of {count(width, "draft")} by {drafter} accepted">'
        f'<span class="pl-bar" aria-hidden="true">{bar}</span> {entry.accepted}/{width}</td>'
    )


def _notes(record: RunRecord) -> str:
    notes = Counter(entry.note for entry in record.rounds if entry.note)
    if not notes:
        return ""
    items = "; ".join(f"{escape(note)} ({count(times, 'round')})" for note, times in notes.most_common(5))
    return f'<p class="pl-note">Rounds without a draft: {items}.</p>'


def _empty(record: RunRecord) -> str:
    drafter = str(record.params.get("speculate", "off"))
    if drafter == "off":
        what = "This run did not speculate, so there is no acceptance to show."
        do = 'Run it again with a drafter, such as <code>speculate="lookup"</code>. In exact mode the tokens stay the same.'
    else:
        what = f"The drafter <code>{escape(drafter)}</code> proposed nothing in this run."
        do = "It needs earlier text to find repeats in: try a longer prompt, or a task that quotes its input."
    facts = f"{count(len(record.tokens), 'token')} in {count(len(record.rounds), 'round')}."
    return f'<div class="pl-empty"><p><b>{what}</b></p><p>{do}</p><p class="pl-note">{facts}</p></div>{_notes(record)}'


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"
