"""The logit lens: target and draft at one position of a run, the noise of the draw, and why the draft was kept or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import traitlets

from power_lab.engine.inspection import LensAsk, LensReport
from power_lab.errors import ConfigError, PowerLabError
from power_lab.evidence.dataset import check, kinds_of
from power_lab.run import Run
from power_lab.widgets.figure import marked, meter, table
from power_lab.widgets.palette import TOKENS, legend
from power_lab.widgets.picture import bars, path, svg, text
from power_lab.widgets.text import count, stat, visible
from power_lab.widgets.view import View, Work, script

if TYPE_CHECKING:
    import xarray

    from power_lab.jupyter.cancel import CancelToken

Look = Callable[[LensAsk, Callable[[], bool] | None], LensReport]
"""`lens` of an engine: the position, and what says whether nobody wants it any more."""

SCHEMA = "power-lab.lens/1"
_NONE = float("nan")
_CONTEXT = 160  # characters of text shown before the position


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token as target and drafter see it; what is not known is None.

    Attributes:
        token, piece: id and text. raw, probability: of the target, before and behind the sampler chain. noise, score: of its draw.
        draft: probability under the drafter. chosen: by the target; drafted: by the drafter.
    """

    token: int
    piece: str
    raw: float | None
    probability: float | None
    noise: float | None
    score: float | None
    draft: float | None
    chosen: bool
    drafted: bool


class Lens(View):
    """One position of a run.

    Args:
        look: `lens` of an engine; it raises a PowerLabError when the engine is gone.
        run: a finished run of that engine.
        round: its number in the run; None for the first one with a refused draft, else the first with a draft, else the first.
        row: of the round, from 0: emitted tokens in order, the correction or bonus last. None for where a draft was first refused.
        top: how many of the target's candidates to ask for, 1 to 64.

    Raises:
        ConfigError for a round or row that the run has not; EvidenceError if its record contradicts itself; what `look` raises.
    """

    rows: ClassVar[str] = "candidate"
    newest = traitlets.Bool(True).tag(sync=True)
    """For the page: a click need not wait for the answer to the one before."""

    _esm = script("view", "walk")

    def __init__(
        self,
        look: Look,
        run: Run,
        round: int | None = None,
        row: int | None = None,
        top: int = 10,
    ) -> None:
        check(run.record)
        self.run, self._look, self._top = run, look, top
        self._at = self._aim = _place(run, round, row)
        self.report = self._asked_for(self._at)
        super().__init__(
            stops={"before": "‹ Position before", "after": "Position after ›", "refused": "Next refused draft »"}
        )

    @property
    def round(self) -> int:
        """The round that is looked at."""
        return self._at[0]

    @property
    def row(self) -> int:
        """The row of it."""
        return self._at[1]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The target's candidates in its order, then those that only the drafter named."""
        report = self.report
        draft = report.draft
        guessed = {token: share for token, _, share in draft.candidates} if draft is not None else {}
        drafted = draft.chosen if draft is not None else -1
        found = [
            Candidate(
                token=one.token,
                piece=one.piece,
                raw=one.raw,
                probability=one.probability,
                noise=one.noise,
                score=one.score,
                draft=guessed.get(one.token),
                chosen=one.token == report.chosen,
                drafted=one.token == drafted,
            )
            for one in report.candidates
        ]
        known = {one.token for one in found}
        more = [
            Candidate(token, piece, None, None, None, None, share, False, token == drafted)
            for token, piece, share in (draft.candidates if draft is not None else ())
            if token not in known
        ]
        return (*found, *more)

    @property
    def dataset(self) -> xarray.Dataset:
        """The candidates: dimension `candidate`. What is not known is NaN."""
        import xarray

        found = self.candidates
        columns: dict[str, tuple[str, str, Callable[[Candidate], Any]]] = {
            "raw": ("1", "target's probability by its logits alone", lambda one: one.raw),
            "probability": ("1", "target's probability behind the sampler chain", lambda one: one.probability),
            "noise": ("nat", "Gumbel noise of the draw, NaN where greedy", lambda one: one.noise),
            "score": (
                "nat",
                "log-probability and noise, or the logit where greedy: the largest is said",
                lambda one: one.score,
            ),
            "draft": ("1", "drafter's probability", lambda one: one.draft),
        }
        data: dict[str, Any] = {
            name: ("candidate", np.array([_number(value(one)) for one in found]), {"units": unit, "long_name": title})
            for name, (unit, title, value) in columns.items()
        }
        pieces = np.array([one.piece.replace("\0", "␀") for one in found], dtype=object)
        for name, title in (("chosen", "the target says it"), ("drafted", "the drafter said it")):
            values = np.array([getattr(one, name) for one in found], dtype=np.int8)
            data[name] = ("candidate", values, {"units": "1", "long_name": title})
        data["piece"] = ("candidate", pieces, {"units": "1", "long_name": "text of the token"})
        ids = np.array([one.token for one in found], dtype=np.int64)
        return xarray.Dataset(
            data, {"candidate": ("candidate", ids, {"units": "1", "long_name": "token id"})}, self._attributes()
        )

    def _attributes(self) -> dict[str, str | int | float]:
        report, draft = self.report, self.report.draft
        return {
            "schema": SCHEMA,
            "title": f"Position {report.position} of run {self.run.record.id}",
            "position": report.position,
            "round": self.round,
            "row": self.row,
            "seed": str(report.seed),
            "temperature": report.temperature,
            "exact": int(report.exact),
            "drafter": draft.drafter if draft is not None else "",
            "why": draft.why if draft is not None else report.why,
        }

    def summary(self) -> str:
        report, draft = self.report, self.report.draft
        said = f"Position {report.position}: the target says {report.piece!r}"
        if draft is None or draft.chosen < 0:
            return f"{said}; no draft"
        return f"{said}; {draft.drafter} drafted {draft.piece!r}, {'kept' if draft.kept else 'not kept'}"

    def picture(self) -> str:
        """Bars of both distributions."""
        found, wide = self.candidates, 260
        drawn, boxes_target, boxes_draft = [], [], []
        for at, one in enumerate(found):
            y = 30 + at * 26
            name = "".join(char if char.isprintable() else "·" for char in one.piece)[:18] or "∅"
            drawn.append(text(4, y + 12, name, "font-weight='700'" if one.chosen else ""))
            drawn.append(text(140 + wide + 6, y + 12, "" if one.raw is None else f"{one.raw:.3f}"))
            drawn.append(text(190 + 2 * wide + 6, y + 12, "" if one.draft is None else f"{one.draft:.3f}"))
            boxes_target.append((140, y, wide * (one.raw or 0), 16))
            boxes_draft.append((190 + wide, y, wide * (one.draft or 0), 16))
        head = text(140, 18, "target") + text(190 + wide, 18, "draft")
        shapes = path(bars(boxes_target), f"fill='{TOKENS['correction'].light}'") + path(
            bars(boxes_draft), f"fill='{TOKENS['accepted'].light}'"
        )
        return svg(240 + 2 * wide, 40 + 26 * len(found), head + shapes + "".join(drawn))

    def body(self) -> str:
        return self._head() + self._context() + self._verdict() + self._table() + self._notes()

    def asked(self, kind: str, content: dict[str, Any]) -> Work | None:
        """Another position: from where the click before this one leads to, whether or not that was reached."""
        if kind != "go":
            return None
        at = _step(self.run, self._aim, str(content.get("to")))
        if at is None:
            self.send({"kind": "body", "html": self.body()})
            return None
        self._aim = at
        return lambda token: self._go(at, token)

    def _go(self, at: tuple[int, int], token: CancelToken) -> None:
        try:
            report = self._asked_for(at, lambda: token.cancelled)
            with self.settled(token):
                self.report, self._at = report, at
                self.send({"kind": "body", "html": self.body()})
        except PowerLabError:
            with self._settling:
                if not token.superseded:
                    self._aim = self._at
            raise

    def _asked_for(self, at: tuple[int, int], cancelled: Callable[[], bool] | None = None) -> LensReport:
        start = self.run.record.rounds[at[0]].start
        return self._look(LensAsk.of(self.run.record, start + at[1], top=self._top), cancelled)

    def _kinds(self) -> tuple[str, str]:
        """Kind of what the target says here, and of the draft ("" where there was none)."""
        entry = self.run.record.rounds[self.round]
        own = kinds_of(entry)[self.row]
        draft = self.report.draft
        if draft is None or draft.chosen < 0:
            return own, ""
        return own, "accepted" if draft.kept else "rejected"

    def _head(self) -> str:
        report, (own, guess) = self.report, self._kinds()
        draft = report.draft
        parts = [
            stat(f"{report.position:,}", "position", f"output token {report.index}"),
            stat(f"{self.round:,}, row {self.row}", "round"),
            _token_stat(report.piece, own, "target says"),
        ]
        if draft is not None and guess:
            parts.append(_token_stat(draft.piece, guess, f"{draft.drafter} drafted"))
        parts.append(stat(f"{report.temperature:g}", "temperature"))
        if report.temperature:
            parts.append(stat(f"{report.seed}", "seed"))
        return f'<div class="pl-head">{"".join(parts)}</div>' + legend(
            TOKENS, dict.fromkeys(filter(None, (own, guess)), 1)
        )

    def _context(self) -> str:
        own, _ = self._kinds()
        before = visible(self.report.context[-_CONTEXT:], spaces=False, longest=_CONTEXT)
        more = "…" if len(self.report.context) > _CONTEXT else ""
        return f'<p class="pl-context">{more}{before}{marked(self.report.piece, own)}</p>'

    def _verdict(self) -> str:
        report = self.report
        why = report.draft.why if report.draft is not None else report.why
        return f"<p><b>{escape(why)}</b></p>" if why else ""

    def _table(self) -> str:
        own, guess = self._kinds()
        found = self.candidates
        noisy = any(one.noise is not None for one in found)
        drafted = any(one.draft is not None for one in found)
        head = [
            "token",
            "target’s p",
            "after sampling rules",
            *(["draft’s p"] if drafted else []),
            *(["noise"] if noisy else []),
        ]
        head += ["score" if noisy else "logit", "said by"]
        rows = []
        for one in found:
            kind = own if one.chosen else guess if one.drafted else "plain"
            score = "never" if one.score is None and one.raw is not None else _shown(one.score)
            cells = [
                marked(one.piece, kind or "plain"),
                _share(one.raw, "correction"),
                _share(one.probability, "correction"),
            ]
            cells += [_share(one.draft, "accepted")] if drafted else []
            cells += [_shown(one.noise, "+.2f")] if noisy else []
            said = [*(["target"] if one.chosen else []), *(["draft"] if one.drafted else [])]
            cells += [f'<b class="pl-wins">{score}</b>' if one.chosen else score, " and ".join(said)]
            rows.append(cells)
        left = (0, 1, 2, 3, len(head) - 1) if drafted else (0, 1, 2, len(head) - 1)
        grid = table(head, rows, left=left)
        return f'<div class="pl-scroll pl-wide" tabindex="0" role="group" aria-label="Candidates" style="overflow-x:auto">{grid}</div>'

    def _notes(self) -> str:
        report = self.report
        if report.said < 0:
            again = "The run ended before this position."
        elif report.exact:
            again = "Computed again from the tokens before it: the same token as in the run."
        else:
            again = f"Computed again it is not the token of the run ({report.said}): in fast mode the batch may decide."
        return f'<p class="pl-note">{escape(report.noise)} {escape(again)}</p>'


def _place(run: Run, number: int | None, row: int | None) -> tuple[int, int]:
    rounds = run.record.rounds
    if not rounds:
        raise ConfigError("run", "it has no rounds", "Look at a run that said something.")
    if number is None:
        refused = (at for at, entry in enumerate(rounds) if entry.rejected and len(entry.emitted) > entry.accepted)
        drafted = (at for at, entry in enumerate(rounds) if entry.drafted)
        number = next(refused, next(drafted, 0))
    if not 0 <= number < len(rounds):
        raise ConfigError("round", f"{number} of {count(len(rounds), 'round')}", f"Give one of 0 to {len(rounds) - 1}.")
    entry = rounds[number]
    if row is None:
        row = min(entry.accepted, len(entry.emitted) - 1) if entry.rejected else 0
    if not 0 <= row < len(entry.emitted):
        raise ConfigError(
            "row",
            f"round {number} emitted {count(len(entry.emitted), 'token')}, so it has no row {row}",
            "Drafts behind a refused one are never looked at: give the row of an emitted token.",
        )
    return number, row


def _step(run: Run, at: tuple[int, int], to: str) -> tuple[int, int] | None:
    """The place that a button leads to, None where there is none."""
    rounds = run.record.rounds
    number, row = at
    if to == "before":
        return (number, row - 1) if row else (number - 1, len(rounds[number - 1].emitted) - 1) if number else None
    if to == "after":
        if row + 1 < len(rounds[number].emitted):
            return number, row + 1
        return (number + 1, 0) if number + 1 < len(rounds) else None
    if to == "refused":
        for later in range(number + 1, len(rounds)):
            if rounds[later].rejected and len(rounds[later].emitted) > rounds[later].accepted:
                return later, rounds[later].accepted
    return None


def _token_stat(piece: str, kind: str, label: str) -> str:
    return f'<span class="pl-stat"><b>{marked(piece, kind)}</b> <small>{escape(label)}</small></span> '


def _share(value: float | None, kind: str) -> str:
    if value is None:
        return "–"
    return f'<span class="pl-share">{value:.3f}{meter(value, kind) if value >= 0.005 else ""}</span>'


def _shown(value: float | None, how: str = ".2f") -> str:
    return "–" if value is None else format(value, how)


def _number(value: float | None) -> float:
    return _NONE if value is None or not math.isfinite(value) else value
