"""The rounds of a run as a table: a row of tokens for each round, what was drafted and why so much, and what it came to so far."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from power_lab.engine.trace import Logprob, Round, RunRecord
from power_lab.evidence.dataset import kinds_of
from power_lab.widgets.palette import TOKENS
from power_lab.widgets.text import count, percent, seconds, visible

_RIVALS = 3  # other candidates named in a token's details
_REASONS = 3  # named below the table; each round's own is in its details


def rounds_table(record: RunRecord, limit: int) -> str:
    """At most `limit` rows of HTML; stretches of rounds without a draft share one."""
    text = _pieces(record)
    drafter = escape(str(record.params.get("speculate", "off")))
    accepted = drafted = emitted = passes = left_out = 0
    width = -1
    lines: list[str] = []
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
            f'<td class="pl-tokens" style="text-align:left">{cells}</td>{_draft(row, drafter)}{_width(row, width)}'
            f'<td class="pl-num pl-far">{percent(accepted, drafted)}</td><td class="pl-num pl-far">{emitted / passes:.2f}</td></tr>'
        )
        width = max(row.rounds[-1].width, -1) if row.rounds[-1].width >= 0 else width
    more = (
        f'<p class="pl-note">{count(left_out, "more round")} not drawn; the dataset has them all.</p>'
        if left_out
        else ""
    )
    # The suppress attribute keeps the notebook's own arrow-key shortcuts out of the table.
    return (
        '<div class="pl-scroll" tabindex="0" role="region" aria-label="Rounds" data-lm-suppress-shortcuts="true" '
        'style="max-height:30em;overflow:auto"><table class="pl-rounds"><thead><tr><th scope="col">Round</th><th scope="col">Position</th>'
        '<th scope="col" class="pl-tokens" style="text-align:left">Tokens</th><th scope="col" title="Accepted of drafted">Draft</th>'
        '<th scope="col" title="Most drafts that the controller allowed, and whether that is more or fewer than before">Width</th>'
        '<th scope="col" class="pl-far" title="Accepted of all drafted so far">Accepted<br>so far</th>'
        '<th scope="col" class="pl-far" title="Output tokens per pass of the target so far">Per pass<br>so far</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{more}"
    )


def reasons(record: RunRecord) -> str:
    """Why rounds had no draft, and why widths changed, the most frequent reasons first."""
    without = Counter(entry.note for entry in record.rounds if entry.note)
    changed: Counter[str] = Counter()
    last = -1
    for entry in record.rounds:
        if entry.width >= 0:
            if last >= 0 and entry.width != last:
                way = "wider" if entry.width > last else "narrower"
                changed[f"{way}: {why}" if (why := _why(entry)) else way] += 1
            last = entry.width
    return _reasons("Rounds without a draft", without, "round") + _reasons("Why the width changed", changed, "time")


def _why(entry: Round) -> str:
    """The controller's reason without the width that it begins with, which stands beside it."""
    why = entry.why.removeprefix(f"{entry.width}: ")
    return "all that the drafter had" if why == "fixed" else why


def _reasons(title: str, found: Counter[str], noun: str) -> str:
    if not found:
        return ""
    items = "; ".join(f"{escape(reason)} ({count(times, noun)})" for reason, times in found.most_common(_REASONS))
    rest = f"; {count(len(found) - _REASONS, 'more reason')}" if len(found) > _REASONS else ""
    return f'<p class="pl-note">{title}: {items}{rest}.</p>'


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


def _tokens(entry: Round, text: dict[int, str]) -> str:
    chances = [_chance(item, token, text) for item, token in zip(entry.logprobs, entry.emitted, strict=False)]
    chances += [""] * (len(entry.emitted) - len(chances))
    kept = [
        _token(kind, text[token], f"position {entry.start + index} · token {token}{chances[index]}")
        for index, (token, kind) in enumerate(zip(entry.emitted, kinds_of(entry), strict=True))
    ]
    stopped = len(entry.emitted) <= entry.accepted  # nothing was refused: the output ended before
    dropped = []
    for index, token in enumerate(entry.rejected):
        reason = (
            "the output ended before" if stopped else "after a refused draft" if index else "the target drew another"
        )
        where = f"for position {entry.start + entry.accepted + index} · token {token} · {reason}"
        if not index and not stopped and entry.logprobs:
            where += _rejected_chance(entry.logprobs[-1], token)
        dropped.append(_token("rejected", text[token], where))
    return "".join(kept + dropped)


def _chance(item: Logprob, token: int, text: dict[int, str]) -> str:
    """Probability of an emitted token, and its rivals'."""
    rivals = [
        f"{_quoted(text.get(other, f'#{other}'))} {_share(value)}"
        for other, value in zip(item.top_ids, item.top_values, strict=False)
        if other != token
    ]
    beside = f", beside {', '.join(rivals[:_RIVALS])}" if rivals else ""
    return f" · probability {_share(item.value)} (logprob {item.value:.2f}){beside}"


def _rejected_chance(item: Logprob, token: int) -> str:
    known = dict(zip(item.top_ids, item.top_values, strict=False))
    return f", which gave this one {_share(known[token])}" if token in known else ""


def _share(logprob: float) -> str:
    value = math.exp(min(0.0, logprob))
    return f"{100 * value:.1f}%" if value >= 0.0005 else "under 0.05%"


def _quoted(text: str) -> str:
    return f"“{text}”"


def _token(kind: str, text: str, title: str) -> str:
    mark = TOKENS[kind]
    style = f' style="{mark.inline()}"' if mark.inline() else ""
    sign = f"{mark.glyph}\u202f" if mark.glyph else ""
    details = visible(f"{mark.label} · {title}", spaces=False, longest=400)
    return f'<{mark.tag} class="pl-t pl-{kind}"{style} title="{details}">{sign}{visible(text)}</{mark.tag}> '


def _draft(row: _Row, drafter: str) -> str:
    entry = row.rounds[0]
    if not entry.drafted:
        why = "; ".join(sorted({item.note for item in row.rounds if item.note}))
        return f'<td class="pl-num" title="{escape(why)}"><small>none</small></td>'
    size = len(entry.drafted)
    # A longer one takes the tokens' room.
    bar = f"{'■' * entry.accepted}{'□' * (size - entry.accepted)}" if size <= 8 else ""
    return (
        f'<td class="pl-num" title="{entry.accepted} of {count(size, "draft")} by {drafter} accepted">'
        f'<span class="pl-bar" aria-hidden="true">{bar}</span> {entry.accepted}/{size}</td>'
    )


def _width(row: _Row, before: int) -> str:
    """What the controller allowed, with an arrow where that changed, and its reason."""
    widths = [entry.width for entry in row.rounds if entry.width >= 0]
    if not widths:
        return '<td class="pl-num"><small title="The controller was not asked">–</small></td>'
    low, high = min(widths), max(widths)
    way = "" if before < 0 or widths[0] == before else "▲" if widths[0] > before else "▼"
    why = next((_why(entry) for entry in row.rounds if entry.why), "") or "no reason given"
    moved = f"from {before} to {widths[0]}: " if way else ""
    return f'<td class="pl-num" title="{escape(f"{moved}{why}")}">{f"<small>{way}</small> " if way else ""}{_range(low, high)}</td>'


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"
