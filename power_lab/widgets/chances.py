"""How likely a token was, in a few words: as the run recorded it, or as an engine says that is asked again."""

from __future__ import annotations

import math
from collections.abc import Iterable

from power_lab.engine.inspection import LensReport
from power_lab.engine.trace import Logprob

RIVALS = 3  # other candidates named beside a token
HINT = " · logprobs=3 records probabilities"
"""For pages on which nobody can be asked."""


def recorded(item: Logprob, token: int, pieces: dict[int, str]) -> str:
    """Probability of an emitted token, and its rivals', as the run recorded it."""
    rivals = zip(item.top_ids, item.top_values, strict=False)
    named = ((pieces.get(other, f"#{other}"), math.exp(min(0.0, value))) for other, value in rivals if other != token)
    return _probability(math.exp(min(0.0, item.value)), item.value, named)


def recorded_rejected(item: Logprob, token: int) -> str:
    """What the target gave a refused draft, where that was recorded."""
    known = dict(zip(item.top_ids, item.top_values, strict=False))
    return f", which gave this one {share(math.exp(min(0.0, known[token])))}" if token in known else ""


def asked(report: LensReport, token: int) -> str:
    """The same of a position that an engine computed again, with what the drafter thought of this token."""
    raw = {one.token: one.raw for one in report.candidates}
    rivals = ((one.piece, one.raw) for one in report.candidates if one.token != token)
    value = raw.get(token)
    target = "" if value is None else _probability(value, math.log(value) if value else -math.inf, rivals)
    other = "" if report.exact else f" · computed again, the target says {quoted(report.piece)} here"
    return f"{target}{_draft(report, token)}{other}"


def _draft(report: LensReport, token: int) -> str:
    draft = report.draft
    if draft is None:
        return f" · {report.why.rstrip('.')}" if report.why else ""
    shares = {one: value for one, _, value in draft.candidates}
    if draft.probability is not None:
        shares.setdefault(report.chosen, draft.probability)
    if token in shares:
        return f" · {draft.drafter} gave it {share(shares[token])}"
    said = "it" if draft.chosen == token else quoted(draft.piece)
    if draft.chosen in shares:
        return f" · {draft.drafter} drafted {said} with {share(shares[draft.chosen])}"
    return f" · {draft.drafter} drafted {said} and has no probability for it" if draft.chosen >= 0 else ""


def _probability(value: float, logprob: float, rivals: Iterable[tuple[str, float]]) -> str:
    named = [f"{quoted(piece)} {share(other)}" for piece, other in rivals][:RIVALS]
    beside = f", beside {', '.join(named)}" if named else ""
    return f" · probability {share(value)} (logprob {logprob:.2f}){beside}"


def share(value: float) -> str:
    """A probability in per cent."""
    return f"{100 * value:.1f}%" if value >= 0.0005 else "under 0.05%"


def quoted(text: str) -> str:
    return f"“{text}”"
