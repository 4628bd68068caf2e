"""The step loop: plan, launch, collect, commit, tell. At most two steps are on their way, one to collect and one behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from power_lab.engine import views
from power_lab.engine.assembly import Parts
from power_lab.engine.config import EngineConfig
from power_lab.engine.flight import Flight
from power_lab.engine.interrupts import Interrupts
from power_lab.engine.live import Live, Verdict, verify
from power_lab.engine.monitor import Monitor
from power_lab.engine.plan import StepPlan
from power_lab.engine.request import Finish, Request
from power_lab.engine.runner import Sampled
from power_lab.engine.scheduler import Outcome
from power_lab.engine.shapes import ResumedShape
from power_lab.engine.speculation.recording import Recorder
from power_lab.engine.speculation.transaction import Proposal, Resumption
from power_lab.engine.trace import EngineFacts
from power_lab.errors import PowerLabError, StepFailed


class Stepper:
    """Moves the requests of one engine.

    Args:
        parts: of the engine. config, facts: its.
        clock: monotonic seconds.
        interrupts, critical: hold a Ctrl-C back; critical is also entered wherever state moves and callers' functions are called.

    Attributes:
        live: requests that are not over, by id.
        totals: counts of what was done; monitor: its last steps. recorder: of requests that are over but for their recording.
    """

    def __init__(
        self,
        parts: Parts,
        config: EngineConfig,
        facts: EngineFacts,
        clock: Callable[[], float],
        interrupts: Interrupts,
        critical: AbstractContextManager[None],
    ) -> None:
        self._runner, self._scheduler, self._rollback = parts.runner, parts.scheduler, parts.rollback
        self._proposer, self._costs, self._rounds = parts.proposer, parts.costs, parts.rounds
        self._facts, self._clock = facts, clock
        self._interrupts, self._critical = interrupts, critical
        self._overlap = config.overlap and parts.runner.ops.asynchronous
        self._flights: deque[Flight] = deque()
        self._committed = 0.0  # when the last step was
        self.live: dict[int, Live] = {}
        self.totals = views.Totals()
        self.monitor = Monitor(parts.scheduler.pool, asynchronous=parts.runner.ops.asynchronous)
        self.recorder = Recorder(
            parts.recorded, config.max_batch, clock, resumes=self._overlap and parts.runner.resumes
        )

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return not self._scheduler.idle or bool(self._flights) or bool(self.recorder.pending)

    def begin(self, live: Live) -> None:
        """Queue a request. Raises what `Scheduler.add` raises; then nothing has changed."""
        self._proposer.begin(live.request)
        try:
            self._scheduler.add(live.request)
        except PowerLabError:
            self._proposer.end(live.request)
            raise
        self.live[live.request.id] = live
        self.totals.requests += 1
        self.totals.prompt_tokens += live.request.prompt_len

    def end_all(self, error: PowerLabError) -> None:
        """End every request, for this reason."""
        self._abort_flights()
        for live in list(self.live.values()):
            if live.request.finish is None:
                self._scheduler.end(live.request, Finish.CANCELLED, error)
            self._settle(live, self._clock())

    def step(self) -> bool:
        """Collect the step in flight, or one launched now; where the device works by itself, the next one is launched before that."""
        committed: Flight | None = None
        try:
            if not self._flights and not self._launch():
                return False
            flight = self._flights[0]
            if self._overlap and len(self._flights) == 1 and not self.recorder.pending:
                self._launch_ahead()
            assert flight.launched is not None, "what could not be launched is not in flight"
            sampled = self._runner.collect(flight.launched, flight.requests)
            flight.plan = self._scheduler.resolve(flight.plan, sampled.drafts)
            verdicts = verify(flight.plan, flight.lives, sampled.tokens, self._scheduler.awaited(flight.plan))
            with self._interrupts.held():  # what is committed is published, whatever comes between
                with self._critical:
                    start = self._clock()
                    outcomes = [verdict and verdict[0] for verdict in verdicts]
                    self._rollback.restore(flight.plan, outcomes)
                    ended = self._scheduler.commit(flight.plan, outcomes)
                    committed = self._flights.popleft()
                    wall = self._took(flight)
                    self._tell_speculation(flight, verdicts, wall)
                    spent = self._clock() - start
                # What could not be foreseen begins before anybody is told.
                behind = self._overlap and not self._flights and not self.recorder.pending
                stopped = self._launch_behind() if behind else None
                with self._critical:
                    self._publish(flight, sampled, verdicts, (spent, wall), ended)
                    self._drop_idle_flight()
            if stopped is not None:
                raise stopped
        except BaseException as error:
            with self._critical:
                failed = committed or (self._flights[0] if self._flights else None)
                self._abort_flights()
                if isinstance(error, Exception):
                    self.fail(failed.plan if failed is not None else None, error)
            if not isinstance(error, Exception):
                raise
        return True

    def _launch(self, *, expire: bool = True) -> bool:
        """Plan a step, of which its flight tells from then on, and begin it. False where there is none.

        expire: whether requests whose time is over end before.
        """
        with self._critical:
            if expire:
                self._expire()
            ahead = bool(self._flights)
            resumption = self._resume() if ahead else None
            proposals = {} if ahead else self._propose()
            plan = self._scheduler.plan(resume=resumption is not None)
            if plan is None:
                return False
            lives = [self.live[span.request_id] for span in plan.spans]
            for live in lives:
                if live.request.params.record and live.corpus is None:  # it begins, and has not been drafted for yet
                    live.corpus = self._proposer.remembered(live.request.namespace)
            if resumption is not None:
                proposals = resumption.proposals
            elif ahead and not self._proposer.idle:
                proposals = self._proposer.rest([live.request for live in lives])
            flight = Flight(plan, lives, proposals, views.load_of(self._scheduler), self._clock())
            self._flights.append(flight)
        for live in lives:
            live.begin_step(flight.begun)
        flight.replay_s = self._rollback.begin(plan, flight.requests)
        drafter = None if resumption is None else resumption.drafter
        flight.launched = self._runner.launch(plan, flight.requests, drafter)
        return True

    def record(self) -> bool:
        """Between two steps: ask drafters behind one token of each request that is over and recorded. False where there is none, or a
        step is in flight."""
        if not self.recorder.pending or self._flights:
            return False
        with self._critical:
            for request in self.recorder.advance():
                self._settle(self.live[request.id], self._clock())
        return True

    def _launch_ahead(self) -> None:
        """Begin the step behind the one in flight. One that cannot be begun is given up: it is planned again by itself, and fails alone."""
        try:
            self._launch()
        except Exception:
            with self._critical:
                if len(self._flights) < 2:  # the fault is in planning
                    raise
                plan = self._flights.pop().plan
                self._rollback.abort(plan)
                self._scheduler.abort(plan)

    def _launch_behind(self) -> BaseException | None:
        """Begin a step before the one that is committed is published. An error that keeps it from beginning is told in its turn; what is
        no error, but an interrupt, is returned."""
        try:
            self._launch(expire=False)
        except BaseException as error:  # noqa: BLE001
            with self._critical:
                self._abort_flights()
            return None if isinstance(error, Exception) else error
        return None

    def _abort_flights(self) -> None:
        while self._flights:
            self._rollback.abort(self._flights.pop().plan)
        self._scheduler.abort_all()  # a fault may have come between a plan and its flight

    def _drop_idle_flight(self) -> None:
        """Forget a step in flight whose requests have all ended: nobody waits for its draws."""
        if self._flights and not any(self._scheduler.awaited(self._flights[0].plan)):
            self._abort_flights()

    def _expire(self) -> None:
        now = self._clock()
        for request in self._scheduler.expire(now):
            self._settle(self.live[request.id], now)

    def _propose(self) -> dict[int, Proposal]:
        running = self._scheduler.running
        rooms = {r.id: self._scheduler.draft_room(r) for r in running}
        return self._proposer.propose(rooms, running, ahead=self._resumable(running))

    def _resume(self) -> Resumption | None:
        """What the step behind the one in flight drafts, where it goes on from that on the device; None where it does not."""
        running, flight = self._scheduler.running, self._flights[-1]
        if flight.launched is None or not flight.launched.marked or not self._resumable(running):
            return None
        if all(request.foreseeable for request in running) and not any(span.drafts for span in flight.plan.spans):
            return None  # nothing but a token is unknown
        return self._proposer.resume(self._scheduler.resumed_rooms(), running)

    def _resumable(self, running: list[Request]) -> bool:
        if not (self._overlap and self._runner.resumes and all(request.resumable for request in running)):
            return False
        if self._rollback.states:  # only a cursor can be moved by the device alone
            return False
        return self._proposer.resumable(running)

    def _took(self, flight: Flight) -> float:
        """Seconds of a step that is committed now: one that ran behind another began with that one's end."""
        now = self._clock()
        seconds = now - max(flight.begun, self._committed)
        self._committed = now
        return seconds

    def _tell_speculation(self, flight: Flight, verdicts: list[tuple[Outcome, Verdict] | None], seconds: float) -> None:
        """After a commit: drafters learn what was said, controllers what it cost."""
        drafting = sum(proposal.seconds for proposal in flight.proposals.values())
        assert flight.launched is not None
        shape, drafts = flight.launched.shape, any(span.drafts for span in flight.plan.spans)
        resumed = isinstance(shape, ResumedShape)
        own = seconds - flight.replay_s
        if not (drafts and resumed):
            self._costs.add_step(shape, shape.rows, own)
        if resumed or not drafts:
            self._rounds.add_step(shape, shape.rows, own, drafts=drafts, light=flight.launched.light)
        if self._proposer.idle:
            return
        for span, live, decided in zip(flight.plan.spans, flight.lives, verdicts, strict=True):
            if decided is None:
                continue
            self._proposer.commit(live.request, decided[0].emitted)
            proposal = flight.proposals.get(span.request_id)
            if proposal is not None and proposal.width >= 0:
                flight.proposals[span.request_id] = self._proposer.settled(live.request, proposal)
                self._proposer.observe(live.request, span.drafts, decided[0].accepted, seconds + drafting)

    def _publish(
        self,
        flight: Flight,
        sampled: Sampled,
        verdicts: list[tuple[Outcome, Verdict] | None],
        seconds: tuple[float, float],
        ended: list[Request],
    ) -> None:
        """After a commit: traces, streams, records. seconds: of the commit, of the step."""
        now, (commit_s, wall) = self._clock(), seconds
        self.totals.count(flight.plan, [verdict[0] for verdict in verdicts if verdict is not None], now)
        times, step = (sampled.forward_s, sampled.sample_s, commit_s), None
        for live, (_, verdict), round_, step in flight.events(sampled, verdicts, times, wall, now, self._rollback.told):
            live.accept(verdict, round_, step, now)
            if live.request.params.speculate != "off":
                self.totals.count_speculation(live.request.params.speculate, step, round_)
        self.monitor.add(flight, sampled, step, self.totals, self._committed)
        for request in ended:
            if request in self._scheduler.kept:
                self._proposer.end(request)
                self.recorder.add(request)
            else:
                self._settle(self.live[request.id], now)

    def fail(self, plan: StepPlan | None, error: BaseException) -> None:
        """End the requests of a step that raised; without a plan the fault is in planning, and every request ends."""
        now = self._clock()
        for request_id in [span.request_id for span in plan.spans] if plan is not None else list(self.live):
            live = self.live.get(request_id)
            if live is None or (plan is not None and live.request in self.recorder):
                continue
            failure = StepFailed(
                f"A step failed: {type(error).__name__}: {error}", "The engine goes on with other requests."
            )
            failure.__cause__ = error
            if live.request.finish is None:
                self._scheduler.end(live.request, Finish.ERROR, failure)
            self._settle(live, now)

    def _settle(self, live: Live, now: float) -> None:
        """A request is over: forget it and tell its caller."""
        self._proposer.end(live.request)
        self._rollback.end(live.request.id)
        live.drafts = self.recorder.end(live.request)
        self._scheduler.release(live.request)
        del self.live[live.request.id]
        self.totals.cached_tokens += live.request.cached
        self.monitor.settle(live.request)
        live.finish(self._facts, now)
