"""A step between its plan and its commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from power_lab.engine import views
from power_lab.engine.live import Live, Verdict
from power_lab.engine.plan import StepPlan
from power_lab.engine.runner import Launched, Sampled
from power_lab.engine.scheduler import Outcome
from power_lab.engine.speculation.rollback import Replayed
from power_lab.engine.speculation.transaction import Proposal
from power_lab.engine.trace import Round, Step

Decided = tuple[Outcome, Verdict]


class Flight:
    """A step that was planned and is not committed yet.

    Args:
        plan: the step. lives: the requests of its spans. proposals: how their drafts came about.
        load: requests and blocks after its planning. begun: when that was, monotonic seconds.

    Attributes:
        launched: the step on the device, once it is there. replay_s: seconds of what was run again before it.
    """

    def __init__(
        self, plan: StepPlan, lives: list[Live], proposals: dict[int, Proposal], load: views.Load, begun: float
    ) -> None:
        self.plan = plan
        self.lives = lives
        self.requests = {live.request.id: live.request for live in lives}
        self.proposals = proposals
        self.load = load
        self.begun = begun
        self.launched: Launched | None = None
        self.replay_s = 0.0

    def events(
        self,
        sampled: Sampled,
        verdicts: Sequence[Decided | None],
        times: tuple[float, float, float],
        wall_s: float,
        now: float,
        told: Callable[[int], Replayed | None],
    ) -> Iterator[tuple[Live, Decided, Round | None, Step]]:
        """What the step came to for each request that awaits it, with its trace events.

        times: forward, sample and commit seconds. wall_s: seconds that the step took of its engine's time.
        told: what was run again for a request since its last round.
        """
        facts, at, logprobs = views.StepFacts.of(self.plan, self.load, times, wall_s), 0, sampled.logprobs
        for span, live, decided in zip(self.plan.spans, self.lives, verdicts, strict=True):
            first, at = at, at + span.sampled
            if decided is None:
                continue
            outcome, since, logs = decided[0], live.since(now), ()
            if logprobs and live.request.params.logprobs is not None:  # a neighbour may have asked alone
                logs = logprobs[first : first + len(outcome.emitted)]
            proposal, replayed = self.proposals.get(span.request_id), told(span.request_id) if outcome.emitted else None
            round_ = facts.round_of(span, outcome, proposal, since, logs, replayed)
            yield live, decided, round_, facts.step_of(span, since)
