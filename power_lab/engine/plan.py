"""The step plan: where scheduling and execution meet, at one immutable value.

The scheduler makes a `StepPlan`; the batch builder turns it into flat arrays; the runner executes it; `commit` applies it.
Nothing here is ever changed after it was made, so a plan that failed can be aborted by looking at it again. There is one span a request
and step, so they are structs that cost little to make.
"""

from __future__ import annotations

import msgspec

UNKNOWN = -1
"""In place of a token that only the device knows yet."""


class Span(msgspec.Struct, frozen=True, gc=False):
    """One request's rows in one step.

    Attributes:
        request_id: the engine-wide number of the request.
        start: absolute position of the first row (equals the number of tokens whose KV is committed). Where the span goes on from one of
            the step before, whose drafts are not verified yet: the last position that it can be.
        tokens: input token ids of the rows, committed tokens first, then the drafts. In a plan that was made while another was running,
            the last one may be -q - 1: what row q of that step's draws will be. All are `UNKNOWN` where the span goes on.
        drafts: how many of the last tokens are unverified drafts (0..len(tokens)-1).
        sampled: how many of the last rows are sampled: 0 inside a prompt, else drafts + 1.
        blocks: block table that covers positions 0..start+len(tokens)-1.
        resumes: which span of the step before it goes on from, without the host knowing how many tokens that one will keep; -1: from none.
    """

    request_id: int
    start: int
    tokens: tuple[int, ...]
    drafts: int
    sampled: int
    blocks: tuple[int, ...]
    resumes: int = -1

    @property
    def origin(self) -> int:
        """What positions are counted from on the host: 0, or the place where the span before leaves off, which the device adds."""
        return 0 if self.resumes >= 0 else self.start

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def phase(self) -> str:
        """`prefill` (several known tokens), `verify` (drafts present) or `decode` (one row)."""
        if self.drafts:
            return "verify"
        return "decode" if self.rows == 1 and self.sampled else "prefill"


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """Everything that one engine step does.

    Attributes:
        step: the step's number, counting from 0.
        spans: one per scheduled request, in schedule order.
        preempted: ids of requests whose blocks were taken back to make room.
    """

    step: int
    spans: tuple[Span, ...]
    preempted: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return sum([len(span.tokens) for span in self.spans])
