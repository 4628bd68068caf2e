"""One position of a run under the lens: what the target and the draft made of it, and the noise that decided.

Nothing of this is kept while a run goes on, and nothing needs to be. Every draw is keyed by seed, position and token, and in exact mode a
row of logits depends on the tokens before it alone: the row that was drawn from comes back from a request of one token behind these. What
a drafter says behind them is asked by the recording that serves replays. Where something cannot be had, the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from power_lab.engine.inspection import LensAsk, LensDraft, LensReport, LensToken
from power_lab.engine.plan import StepPlan
from power_lab.engine.request import Finish, SamplingParams
from power_lab.engine.runner import Runner
from power_lab.engine.speculation.drafters import TRAINED
from power_lab.engine.speculation.drafters.neural.noise import gumbel, survivors
from power_lab.engine.ticket import Ticket
from power_lab.engine.tokenizer import Tokenizer
from power_lab.engine.trace import RunRecord
from power_lab.errors import ConfigError, DeadlineExceeded, RequestCancelled

DEADLINE_S = 60.0  # of each request that a look makes, two at most
ASK_S = 0.05  # between two questions whether somebody still wants the answer
CONTEXT = 200  # characters before the position that are shown
UNREACHED = "The request for it ended before it was computed"
GREEDY = "Temperature 0: the largest logit is taken, the lowest id of equals, and no noise is drawn."
NOISE = "Gumbel noise of each token, keyed by seed, position and token id: the largest sum of log-probability and noise is an exact draw."


Cancelled = Callable[[], bool]
"""Whether nobody wants the answer any more."""


class Submit(Protocol):
    """`Engine.submit`, as far as it is used here."""

    def __call__(self, prompt: list[int], params: SamplingParams, *, cache_key: str, deadline_s: float) -> Ticket: ...


class Catcher:
    """Logits of chosen rows, from a runner that others watch too.

    Args:
        runner: whose steps are listened to, as long as something is wanted.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner, self._others = runner, runner.observer
        self._wanted: dict[int, dict[int, np.ndarray]] = {}

    def want(self, request: int) -> dict[int, np.ndarray]:
        """Position -> logits f32 [V] of all its tokens to come. The engine's thread is kept out meanwhile."""
        self._runner.observer = self._see
        return self._wanted.setdefault(request, {})

    def done(self, request: int) -> None:
        """Between two steps."""
        self._wanted.pop(request, None)
        if not self._wanted:
            self._runner.observer = self._others

    def _see(self, plan: StepPlan, logits: np.ndarray) -> None:
        at = 0
        for span in plan.spans:
            found = self._wanted.get(span.request_id)
            for row in range(span.sampled):
                if found is not None:
                    found[span.start + span.rows - span.sampled + row + 1] = logits[at + row].copy()
            at += span.sampled
        if self._others is not None:
            self._others(plan, logits)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A row of logits as the sampler saw it.

    Attributes:
        raw, probabilities: f64 [V], before and behind the chain; scores: f64 [V], whose largest is said, -inf where the chain removed it.
        noise: f64 [V], None where greedy.
    """

    raw: np.ndarray
    probabilities: np.ndarray
    scores: np.ndarray
    noise: np.ndarray | None

    @classmethod
    def of(cls, logits: np.ndarray, ask: LensAsk) -> Drawn:
        """Penalties, biases, temperature, filters, noise, in f64: what `kernels.reference` says, over numpy arrays."""
        params, z = ask.params, logits.astype(np.float64)
        raw = _softmax(z)
        seen = np.unique(np.asarray(ask.tokens[: ask.position], np.int64))
        if params.repetition_penalty != 1:
            z[seen] = np.where(z[seen] > 0, z[seen] / params.repetition_penalty, z[seen] * params.repetition_penalty)
        if params.presence_penalty:
            z[np.unique(np.asarray(ask.tokens[ask.prompt : ask.position], np.int64))] -= params.presence_penalty
        for token, value in params.logit_bias.items():
            z[token] += value
        if not params.temperature:
            return cls(raw, _softmax(z), z, None)
        z = (z - z.max()) / params.temperature
        ids = np.arange(len(z))
        alive = np.zeros(len(z), bool)
        alive[survivors(z, ids, params)] = True
        probabilities = _softmax(np.where(alive, z, -np.inf))
        noise = gumbel(params.seed or 0, ask.position, ids)
        with np.errstate(divide="ignore"):
            return cls(raw, probabilities, np.log(probabilities) + noise, noise)

    @property
    def chosen(self) -> int:
        return int(self.scores.argmax())


class Lens:
    """Of one engine.

    Args:
        submit, lock: of the engine; the lock keeps its next step from being planned.
        runner: the target's. draft: the draft model's, where there is one. recorded: names of drafters that can be asked behind a run.
    """

    def __init__(
        self,
        submit: Submit,
        lock: AbstractContextManager[object],
        tokenizer: Tokenizer,
        runner: Runner,
        draft: Runner | None,
        recorded: Sequence[str],
        context: int,
    ) -> None:
        self._submit, self._lock, self._tokenizer, self._context = submit, lock, tokenizer, context
        self._target = Catcher(runner)
        self._draft = Catcher(draft) if draft is not None else None
        self._recorded = tuple(recorded)

    def look(self, ask: LensAsk, cancelled: Cancelled | None = None) -> LensReport:
        """Raises ConfigError for a position outside of the run, RequestCancelled, and what `Engine.submit` raises."""
        _check(ask, self._context)
        logits = self._logits(ask, cancelled)
        drawn = Drawn.of(logits, ask)
        draft, why = self._drafted(ask, drawn, cancelled)
        said = ask.tokens[ask.position] if ask.position < len(ask.tokens) else -1
        shown = self._shown(ask, drawn, [drawn.chosen, said, ask.drafted, draft.chosen if draft is not None else -1])
        return LensReport(
            position=ask.position,
            index=ask.position - ask.prompt,
            seed=ask.params.seed or 0,
            temperature=ask.params.temperature,
            candidates=tuple(self._candidate(token, drawn) for token in shown),
            chosen=drawn.chosen,
            piece=self._tokenizer.piece(drawn.chosen),
            said=said,
            exact=said in (-1, drawn.chosen),
            context=self._tokenizer.decode(ask.tokens[max(0, ask.position - CONTEXT) : ask.position], start=False)[
                -CONTEXT:
            ],
            draft=draft,
            why=why,
            noise=NOISE if ask.params.temperature else GREEDY,
        )

    def _logits(self, ask: LensAsk, cancelled: Cancelled | None) -> np.ndarray:
        params = _plain(ask.params, max_tokens=1)
        caught, record = self._run(list(ask.tokens[: ask.position]), params, ask.namespace, self._target, cancelled)
        if record.finish == Finish.DEADLINE:
            raise DeadlineExceeded(
                f"The {ask.position:,} tokens before the position are no longer in the prefix cache, and computing them again took more "
                f"than {DEADLINE_S:g} s.",
                "Look again: it goes on from the blocks that were computed by then.",
            )
        if ask.position not in caught:
            raise ConfigError("position", UNREACHED, "Ask again.")
        return caught[ask.position]

    def _run(
        self,
        tokens: list[int],
        params: SamplingParams,
        namespace: str,
        catcher: Catcher | None,
        cancelled: Cancelled | None,
    ) -> tuple[dict[int, np.ndarray], RunRecord]:
        """A request of the engine, and the logits that a runner had for it."""
        with self._lock:  # before it is planned
            ticket = self._submit(tokens, params, cache_key=namespace, deadline_s=DEADLINE_S)
            caught = catcher.want(ticket.id) if catcher is not None else {}
        try:
            record = _awaited(ticket, cancelled)
        except BaseException:
            ticket.cancel()
            raise
        finally:
            if catcher is not None:
                with self._lock:
                    catcher.done(ticket.id)
        return caught, record

    def _shown(self, ask: LensAsk, drawn: Drawn, always: Sequence[int]) -> list[int]:
        """The likeliest raw tokens, and those that somebody said."""
        top = np.argsort(-drawn.raw, kind="stable")[: ask.top].tolist()
        return [*top, *dict.fromkeys(token for token in always if token >= 0 and token not in top)]

    def _candidate(self, token: int, drawn: Drawn) -> LensToken:
        alive = math.isfinite(drawn.scores[token])
        return LensToken(
            token=token,
            piece=self._tokenizer.piece(token),
            raw=float(drawn.raw[token]),
            probability=float(drawn.probabilities[token]),
            noise=None if drawn.noise is None else float(drawn.noise[token]),
            score=float(drawn.scores[token]) if alive else None,
        )

    # --- the draft ------------------------------------------------------------------------------------------------------------------

    def _drafted(self, ask: LensAsk, drawn: Drawn, cancelled: Cancelled | None) -> tuple[LensDraft | None, str]:
        """What the run's drafter says here, or why there is nothing."""
        name = ask.params.speculate
        if name == "off":
            return None, "The run did not speculate."
        if name not in self._recorded:
            return self._told(ask, drawn, name)
        row = ask.position - (ask.known if ask.known > 0 else ask.position)
        known = ask.position - row
        if known + row + 2 > self._context:
            return None, "There is no room behind the position in the engine's context to ask the drafter."
        params = _plain(ask.params, max_tokens=row + 2, width=max(1, row + 1), record="replay")
        catcher = self._draft if name == "draft-model" else None
        caught, record = self._run(list(ask.tokens[:known]), params, ask.namespace, catcher, cancelled)
        table = record.drafts.get(name)
        at = known - table.first if table is not None else -1
        if table is None or not 0 <= at < len(table.drafts) or len(table.drafts[at]) <= row:
            note = table.notes[at] if table is not None and 0 <= at < len(table.notes) else ""
            return self._told(
                ask, drawn, name, f" Asked again it gives none: {note or (table and table.cut) or UNREACHED}."
            )
        token, sure = table.drafts[at][row], table.confidence[at]
        probability = sure[row] if row < len(sure) else None
        return self._asked(ask, drawn, name, token, probability, caught.get(ask.position)), ""

    def _told(self, ask: LensAsk, drawn: Drawn, name: str, more: str = "") -> tuple[LensDraft | None, str]:
        """By the run's own trace, of a drafter that is not asked again."""
        if ask.drafted < 0:
            return None, f"{name} drafted nothing at this position.{more}"
        if not more:
            more = " Its engine has none of that name now." if name in TRAINED or name == "draft-model" else ""
            more = more or f" {name} has no distribution: it copies what followed the same tokens before."
        why = f"{self._verdict(ask.drafted, ask, drawn)}{more}"
        return self._draft_report(name, (), ask.drafted, ask.accepted, why, None), ""

    def _asked(
        self, ask: LensAsk, drawn: Drawn, name: str, token: int, probability: float | None, logits: np.ndarray | None
    ) -> LensDraft:
        candidates: tuple[tuple[int, str, float], ...] = ()
        here: float | None = probability if token == drawn.chosen else None
        why = self._verdict(token, ask, drawn)
        if logits is None and probability is None:
            why += f" {name} copied it from where the same tokens stood before: a copy has no distribution."
        elif logits is None:
            why += f" Of {name} only its choice and how sure it was can be had, not its whole distribution."
        else:
            likely = _softmax(logits.astype(np.float64))
            top = np.argsort(-likely, kind="stable")[: ask.top].tolist()
            shown = [*top, *([token] if token not in top else [])]
            candidates = tuple((one, self._tokenizer.piece(one), float(likely[one])) for one in shown)
            here = float(likely[drawn.chosen])
        if ask.drafted >= 0 and token != ask.drafted:
            why += f" In the run it drafted {self._tokenizer.piece(ask.drafted)!r}: what it had read by then was not the same."
        if not candidates and probability is not None:
            candidates = ((token, self._tokenizer.piece(token), float(probability)),)
        return self._draft_report(name, candidates, token, token == drawn.chosen, why, here)

    def _draft_report(
        self,
        name: str,
        candidates: tuple[tuple[int, str, float], ...],
        token: int,
        kept: bool,
        why: str,
        probability: float | None,
    ) -> LensDraft:
        return LensDraft(
            drafter=name,
            candidates=candidates,
            chosen=token,
            piece=self._tokenizer.piece(token),
            kept=kept,
            why=why,
            probability=probability,
        )

    def _verdict(self, token: int, ask: LensAsk, drawn: Drawn) -> str:
        """Why a draft is kept or not."""
        piece, own = (repr(self._tokenizer.piece(one)) for one in (token, drawn.chosen))
        if token == drawn.chosen:
            return f"Kept: the target says {own} here by itself."
        if not math.isfinite(drawn.scores[token]):
            return f"Not kept: the target says {own}, and its sampler chain leaves {piece} out."
        by = drawn.scores[drawn.chosen] - drawn.scores[token]
        if drawn.noise is None:
            return f"Not kept: the target's largest logit is that of {own}, {by:.2f} above that of {piece}."
        likelier = drawn.probabilities[token] > drawn.probabilities[drawn.chosen]
        luck = ", though the draft is the likelier one: the noise decided" if likelier else ""
        return f"Not kept: log-probability and noise of {own} sum to {by:.2f} more than those of {piece}{luck}."


def _awaited(ticket: Ticket, cancelled: Cancelled | None) -> RunRecord:
    """The record of a request. Raises RequestCancelled where nobody wants it any more; then the request goes on."""
    if cancelled is None:
        return ticket.result()
    while not cancelled():
        with suppress(TimeoutError):
            return ticket.result(ASK_S)
    raise RequestCancelled("The position is not looked at any more.")


def _plain(params: SamplingParams, **changes: object) -> SamplingParams:
    """The same draws without anything that would end the request, speculate, or penalise by another prompt's length."""
    off = {"speculate": "off", "stop": (), "stop_tokens": (), "ignore_eos": True, "logprobs": None, "record": ""}
    return msgspec.structs.replace(params, **(off | changes))  # type: ignore[arg-type]


def _check(ask: LensAsk, context: int) -> None:
    if not 1 <= ask.position <= len(ask.tokens):
        raise ConfigError(
            "position", f"{ask.position} is outside 1..{len(ask.tokens)}", "Positions count from the prompt's start."
        )
    if ask.position >= context:
        raise ConfigError("position", f"{ask.position} is the end of the engine's context")
    if not 0 <= ask.prompt <= len(ask.tokens):
        raise ConfigError("prompt", f"{ask.prompt} of {len(ask.tokens)} tokens cannot be the prompt's")
    if not 1 <= ask.top <= 64:
        raise ConfigError("top", f"{ask.top} is outside 1..64")
    if not (ask.known == -1 or 1 <= ask.known <= ask.position) or (ask.position - ask.known > 64 and ask.known != -1):
        raise ConfigError("known", f"{ask.known} is no beginning of a round with position {ask.position}")


def _softmax(z: np.ndarray) -> np.ndarray:
    shifted = np.exp(z - z.max())
    return shifted / shifted.sum()
