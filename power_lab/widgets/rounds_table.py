"""The rounds of a run as a table: a row of tokens for each round, what was drafted and why so much, and what it came to so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape, unescape
from itertools import groupby

from power_lab.engine.trace import Round, RunRecord
from power_lab.evidence.dataset import kinds_of
from power_lab.widgets.chances import HINT, recorded, recorded_rejected
from power_lab.widgets.palette import TOKENS
from power_lab.widgets.rounds_chart import drafters_of
from power_lab.widgets.text import count, percent, seconds, visible

_REASONS = 3  # named below the table; each round's own is in its details


def rounds_table(record: RunRecord, limit: int) -> str:
    """At most `limit` rows of HTML; stretches of rounds without a draft share one."""
    text = _pieces(record)
    drafter = str(record.params.get("speculate", "off"))
    several = any(name != drafter for name in drafters_of(record.rounds))
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
            f'<td class="pl-tokens" style="text-align:left">{cells}</td>{_draft(row, drafter, several)}{_width(row, width)}'
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
        '<div class="pl-scroll" tabindex="0" role="group" aria-label="Rounds" data-lm-suppress-shortcuts="true" '
        'style="max-height:30em;overflow:auto"><table class="pl-rounds"><thead><tr><th scope="col">Round</th><th scope="col">Position</th>'
        '<th scope="col" class="pl-tokens" style="text-align:left">Tokens</th><th scope="col" title="Accepted of drafted">Draft</th>'
        '<th scope="col" title="Most drafts that the controller allowed, and whether that is more or fewer than before">Width</th>'
        '<th scope="col" class="pl-far" title="Accepted of all drafted so far">Accepted<br>so far</th>'
        '<th scope="col" class="pl-far" title="Output tokens per pass of the target so far">Per pass<br>so far</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{more}"
    )


def reasons(record: RunRecord) -> str:
    """Who drafted, why rounds had no draft, and why widths changed, the most frequent reasons first."""
    without = Counter(entry.note for entry in record.rounds if entry.note)
    changed: Counter[str] = Counter()
    last = -1
    for entry in record.rounds:
        if entry.width >= 0:
            if last >= 0 and entry.width != last:
                way = "wider" if entry.width > last else "narrower"
                changed[f"{way}: {why}" if (why := _why(entry)) else way] += 1
            last = entry.width
    parts = drafters_of(record.rounds)
    told = ", ".join(f"{escape(name)} ({count(rounds, 'round')})" for name, rounds in parts.items())
    by = (
        f'<p class="pl-note">Drafted by: {told}.</p>'
        if set(parts) - {str(record.params.get("speculate", "off"))}
        else ""
    )
    return (
        by + _reasons("Rounds without a draft", without, "round") + _reasons("Why the width changed", changed, "time")
    )


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


def title_of(entry: Round, position: int, rejected: bool, chance: str) -> str:
    """Details of one token as plain text: of the emitted one at an absolute position, or of the draft that was refused there.

    Raises IndexError where the round has none such.
    """
    index = position - entry.start
    if rejected:
        return unescape(_title("rejected", _dropped(entry, index - entry.accepted) + chance))
    return unescape(_title(kinds_of(entry)[index], _kept(entry, index) + chance))


def _tokens(entry: Round, text: dict[int, str]) -> str:
    chances = [recorded(item, token, text) for item, token in zip(entry.logprobs, entry.emitted, strict=False)]
    chances += [HINT] * (len(entry.emitted) - len(chances))
    parts = [
        _token(kind, text[token], _kept(entry, index) + chances[index], entry.start + index)
        for index, (token, kind) in enumerate(zip(entry.emitted, kinds_of(entry), strict=True))
    ]
    for index, token in enumerate(entry.rejected):
        weighed = not index and not _stopped(entry)  # behind the first one the target looked at nothing
        chance = (recorded_rejected(entry.logprobs[-1], token) if entry.logprobs else HINT) if weighed else ""
        where = entry.start + entry.accepted if weighed else None
        parts.append(_token("rejected", text[token], _dropped(entry, index) + chance, where))
    return "".join(parts)


def _stopped(entry: Round) -> bool:
    """Whether nothing was refused: the output ended before."""
    return len(entry.emitted) <= entry.accepted


def _kept(entry: Round, index: int) -> str:
    return f"position {entry.start + index} · token {entry.emitted[index]}"


def _dropped(entry: Round, index: int) -> str:
    later = "after a refused draft" if index else "the target drew another"
    reason = "the output ended before" if _stopped(entry) else later
    return f"for position {entry.start + entry.accepted + index} · token {entry.rejected[index]} · {reason}"


def _title(kind: str, facts: str) -> str:
    return visible(f"{TOKENS[kind].label} · {facts}", spaces=False, longest=400)


def _token(kind: str, text: str, facts: str, at: int | None) -> str:
    """at: the position that can be asked for, for the page's script."""
    mark = TOKENS[kind]
    style = f' style="{mark.inline()}"' if mark.inline() else ""
    sign = f"{mark.glyph}\u202f" if mark.glyph else ""
    asked = "" if at is None else f' data-at="{at}"'
    return f'<{mark.tag} class="pl-t pl-{kind}"{style}{asked} title="{_title(kind, facts)}">{sign}{visible(text)}</{mark.tag}> '


def _draft(row: _Row, drafter: str, several: bool) -> str:
    """drafter: the run's; several: whether not all drafts are by one of that name, so that each round says whose they are."""
    entry = row.rounds[0]
    if not entry.drafted:
        why = "; ".join(sorted({item.note for item in row.rounds if item.note}))
        return f'<td class="pl-num" title="{escape(why)}"><small>none</small></td>'
    size = len(entry.drafted)
    # A longer one takes the tokens' room.
    bar = f"{'■' * entry.accepted}{'□' * (size - entry.accepted)}" if size <= 8 else ""
    by = escape(entry.drafter or drafter)
    name = f" <small>{by}</small>" if several else ""
    return (
        f'<td class="pl-num" title="{entry.accepted} of {count(size, "draft")} by {by} accepted">'
        f'<span class="pl-bar" aria-hidden="true">{bar}</span> {entry.accepted}/{size}{name}</td>'
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
