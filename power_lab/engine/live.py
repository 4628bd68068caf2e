"""A request as its caller sees it: ticket, streamed text, trace. The scheduler knows nothing of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from power_lab.engine.detokenizer import StreamDecoder
from power_lab.engine.plan import Span, StepPlan
from power_lab.engine.request import Finish, Request
from power_lab.engine.scheduler import Outcome
from power_lab.engine.speculation.transaction import match
from power_lab.engine.tokenizer import Tokenizer
from power_lab.engine.trace import CorpusTexts, Delta, DraftTable, EngineFacts, OnDelta, OnDone, Round, RunRecord, Step

_NO_TOKEN = "The model's logits hold NaN or have no finite maximum, so no token can be drawn."
_NOTHING = Outcome()


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The text side of an outcome, kept until its step is committed."""

    decoder: StreamDecoder
    text: str
    detail: str


class Live:
    """One request in flight: the scheduler's request, the text so far, the trace, and who wants to know.

    Args:
        request: the scheduler's side.
        tokenizer: for text.
        now: when it was submitted, monotonic seconds.
        on_delta, on_done: called on the engine thread; one that raises cancels the request.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, now: float, on_delta: OnDelta | None, on_done: OnDone | None
    ) -> None:
        self.request = request
        self.record: RunRecord | None = None
        self.done = threading.Event()
        self.rounds: list[Round] = []
        self.steps: list[Step] = []
        self.detail = ""
        self.drafts: dict[str, DraftTable] = {}
        self.corpus: CorpusTexts | None = None
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer, request.params.stop)
        self._text: list[str] = []
        self._drafted = self._accepted = 0
        # Now, so that what cannot be recorded is refused at once.
        self._params = msgspec.to_builtins(request.params, str_keys=True)
        self._on_delta = on_delta
        self._on_done = on_done
        self._submitted = now
        self._started: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None

    def since(self, now: float) -> float:
        return now - self._submitted

    def begin_step(self, now: float) -> None:
        if self._started is None:
            self._started = now

    def verify(self, span: Span, targets: Sequence[int]) -> tuple[Outcome, Verdict]:
        """What a span's draws come to. Nothing of the request or its text moves until `accept`."""
        if not span.sampled:
            return _NOTHING, Verdict(self._decoder, "", "")
        if not span.drafts:
            return self._decide(targets[0])
        request, decoder, text, detail = self.request, self._decoder, "", ""
        known = len(request.tokens)

        def terminal(token: int) -> Finish | None:
            nonlocal known, decoder, text, detail
            known += 1
            finish, decoder, more, detail = self._end(token, known, decoder)
            text += more
            return finish

        outcome = match(span.tokens[len(span.tokens) - span.drafts :], targets, terminal)
        return outcome, Verdict(decoder, text, _NO_TOKEN if outcome.finish is Finish.ERROR else detail)

    def _decide(self, token: int) -> tuple[Outcome, Verdict]:
        """The same of one draw and no draft: as `match` has it, in a third of the time, for this is what most rounds are."""
        if token < 0:
            return Outcome((), 0, Finish.ERROR), Verdict(self._decoder, "", _NO_TOKEN)
        finish, decoder, text, detail = self._end(token, len(self.request.tokens) + 1, self._decoder)
        return Outcome((token,), 0, finish), Verdict(decoder, text, detail)

    def _end(self, token: int, known: int, decoder: StreamDecoder) -> tuple[Finish | None, StreamDecoder, str, str]:
        """What an emitted token, with which so many are known, comes to: why the request ends there, the decoder behind it, its text, and
        more about the end."""
        request = self.request
        if token in request.end_tokens:
            return Finish.STOP, decoder, "", f"token {token}"
        decoder, text = decoder.after(token)
        if decoder.stopped is not None:
            return Finish.STOP, decoder, text, f"string {decoder.stopped!r}"
        if known >= request.limit:
            return Finish.LENGTH, decoder, text, f"{request.limit - request.prompt_len} tokens"
        return None, decoder, text, ""

    def accept(self, verdict: Verdict, round_: Round | None, step: Step, now: float) -> None:
        """Take over what was committed."""
        self.steps.append(step)
        self._decoder, self.detail = verdict.decoder, verdict.detail
        if round_ is None:
            return
        self.rounds.append(round_)
        if round_.drafted:  # counted as they come: a sum over all rounds would grow with every token
            self._drafted += len(round_.drafted)
            self._accepted += round_.accepted
        if self._first_token is None:
            self._first_token = now
        self._last_token = now
        self._say(verdict.text, now)

    def finish(self, facts: EngineFacts, now: float) -> None:
        """Flush the text, make the record, tell the caller."""
        if self._decoder.stopped is None:
            self._say(self._decoder.flush(), now)
        self.record = self._make_record(facts, now)
        if self._on_done is not None:
            with suppress(BaseException):  # a caller's fault, SystemExit too, must not stop the engine thread
                self._on_done(self.record)
        self.done.set()

    def _say(self, text: str, now: float) -> None:
        if text:
            self._text.append(text)
        if self._on_delta is None:
            return
        try:
            self._on_delta(
                Delta(
                    id=self.request.id,
                    text=text,
                    tokens=self.request.emitted,
                    drafted=self._drafted,
                    accepted=self._accepted,
                    cached=self.request.cached,
                    at=self.since(now),
                )
            )
        except BaseException:  # noqa: BLE001  # the listener is gone (SystemExit too); its request must not hold the batch
            self._on_delta = None
            self.request.cancelled = True

    def _make_record(self, facts: EngineFacts, now: float) -> RunRecord:
        request = self.request
        # Of the request's own tokens, a step that failed behind its commit has told nothing.
        output = [token for r in self.rounds for token in r.emitted]
        started = self._started if self._started is not None else now
        first = self._first_token if self._first_token is not None else now
        return RunRecord(
            id=request.id,
            prompt_tokens=tuple(request.tokens[: request.prompt_len]),
            tokens=tuple(output),
            text="".join(self._text),
            pieces=tuple(self._tokenizer.piece(token) for token in output),
            finish=str(request.finish),
            finish_detail=str(request.error) if request.error is not None else self.detail,
            params=self._params,
            namespace=request.namespace,
            cached=request.cached,
            preemptions=request.preemptions,
            queue_s=started - self._submitted,
            prefill_s=first - started,
            decode_s=(self._last_token or first) - first,
            rounds=tuple(self.rounds),
            steps=tuple(self.steps),
            engine=facts,
            draft_pieces={token: self._tokenizer.piece(token) for r in self.rounds for token in r.rejected},
            drafts=self.drafts,
            corpus=self.corpus,
        )


def verify(
    plan: StepPlan, lives: Sequence[Live], targets: Sequence[int], awaited: Sequence[bool]
) -> list[tuple[Outcome, Verdict] | None]:
    """What each span of a step comes to; `targets` are the draws of all sampled rows, in plan order. None for a span that nobody awaits."""
    verdicts: list[tuple[Outcome, Verdict] | None] = []
    at = 0
    for span, live, wanted in zip(plan.spans, lives, awaited, strict=True):
        verdicts.append(live.verify(span, targets[at : at + span.sampled]) if wanted else None)
        at += span.sampled
    return verdicts
