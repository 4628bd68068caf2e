"""The engine: requests in, tokens out, one step at a time on one thread."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import psutil

from power_lab.engine import hostprofile, intake, prefix, views
from power_lab.engine.assembly import assemble
from power_lab.engine.chat import NextPrompt, Turn, next_prompt
from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.flight import Flight
from power_lab.engine.hostprofile import Change, HostProfile
from power_lab.engine.interrupts import Interrupts
from power_lab.engine.live import Live, Verdict, verify
from power_lab.engine.loader import Loaded, load
from power_lab.engine.messages import Options, Tool
from power_lab.engine.plan import StepPlan
from power_lab.engine.planner import BucketPlan, plan_buckets
from power_lab.engine.report import Decision, EngineStatus, MemoryPlan
from power_lab.engine.request import Finish, Prompt, Request, SamplingParams
from power_lab.engine.runner import Observer, Sampled
from power_lab.engine.scheduler import Outcome
from power_lab.engine.shapes import ShapeStats
from power_lab.engine.speculation.recording import Recorder
from power_lab.engine.speculation.transaction import Proposal
from power_lab.engine.ticket import Ticket
from power_lab.engine.trace import BlockState, EngineFacts, OnDelta, OnDone, RunRecord
from power_lab.errors import EngineClosed, PowerLabError, StepFailed
from power_lab.models import Report


class Engine:
    """Continuous batching over one model.

    Args:
        config: settings.
        paths: this user's directories.
        progress: called as (stage, done, total) while loading.
        threaded: own a thread that steps (the default); otherwise the caller steps, and `Ticket.result` does it for him.
        loaded: a model that is already in memory; `config.model` is then only a label.
        observer: called with each plan and its logits.

    Attributes:
        facts: what it is; context: longest request in tokens.

    Raises:
        ConfigError, ModelFileError, TokenizerError, DownloadError while loading.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        paths: Paths | None = None,
        progress: Report | None = None,
        threaded: bool = True,
        loaded: Loaded | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or EngineConfig()
        self._owns_device = loaded is None
        self._loaded = loaded or load(self.config, paths or Paths.default(), progress or (lambda *_: None))
        self.facts: EngineFacts = self._loaded.facts
        self._clock = clock
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._interrupts = Interrupts()
        self._closing = False
        self._inside: int | None = None  # the thread that moves state and calls callers' functions
        self._live: dict[int, Live] = {}
        self._next_id = 0
        parts = assemble(self.config, self._loaded, clock, observer)
        self._runner, self._draft, self._pool = parts.runner, parts.draft, parts.pool
        self._companion, self._resolve = parts.companion, parts.resolve
        self._scheduler, self._costs, self._proposer = parts.scheduler, parts.costs, parts.proposer
        self._recorder = Recorder(parts.recorded, self.config.max_batch, clock)
        self.context = self._pool.context
        self._overlap = self.config.overlap and self._runner.ops.asynchronous
        self._flights: deque[Flight] = deque()  # at most two: one to collect, one behind it
        self._committed = 0.0  # when the last step was
        self._host: tuple[Change, ...] = ()
        self._memory: MemoryPlan | None = None
        self._totals = views.Totals()
        self._thread = threading.Thread(target=self._run, name="power-lab-engine", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    # --- asking -----------------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool | None = None,
        tools: Sequence[Tool] | None = None,
        template_options: Options | None = None,
        cache_key: str = "",
        deadline_s: float | None = None,
        on_delta: OnDelta | None = None,
        on_done: OnDone | None = None,
    ) -> Ticket:
        """Queue a request.

        Args:
            prompt: text, token ids, or chat messages ({"role", "content"}).
            params: how to draw and when to end; `seed=None` draws one and records it.
            chat: whether text is wrapped as a user's message; None does so where the model has a chat template.
            tools: JSON schemas of functions that the model may call; they need messages and a template that has tools.
            template_options: further variables of the chat template, such as `enable_thinking`.
            cache_key: namespace; prefixes are shared only between equal keys.
            deadline_s: seconds from now to the last token.
            on_delta, on_done: called on the engine thread, which other callers wait for meanwhile. They may submit, cancel and close.

        Raises:
            ConfigError for bad input, CapacityError with the numbers when it cannot fit, QueueFull, EngineClosed.
        """
        params = params or SamplingParams()
        seed = secrets.randbits(63) if params.seed is None else params.seed
        # The caller may change his dictionary meanwhile; neither the draws nor the record follow.
        params = msgspec.structs.replace(
            params, seed=seed, logit_bias=dict(params.logit_bias), speculate=self._resolve(params.speculate)
        )
        tokens = intake.encode(self._loaded.tokenizer, prompt, chat, tools or (), template_options)
        intake.check(tokens, params, deadline_s, vocab=self.facts.vocab, context=self.context)
        namespace = prefix.check_namespace(cache_key)
        now = self._clock()
        ends = frozenset(params.stop_tokens) | (frozenset() if params.ignore_eos else self._loaded.tokenizer.end_ids)
        with self._lock:
            if self._closing:
                raise EngineClosed("The engine is closed.", "Load the model again.")
            request = Request(
                id=self._next_id,
                prompt_len=len(tokens),
                params=params,
                tokens=tokens,
                limit=len(tokens) + params.max_tokens,
                end_tokens=ends,
                namespace=namespace,
                deadline=None if deadline_s is None else now + deadline_s,
                recorded=params.record == "replay" and self._recorder.able,
            )
            live = Live(request, self._loaded.tokenizer, now, on_delta, on_done)
            self._proposer.begin(request)
            try:
                self._scheduler.add(request)
            except PowerLabError:
                self._proposer.end(request)
                raise
            self._next_id += 1
            self._live[request.id] = live
            self._totals.requests += 1
            self._totals.prompt_tokens += len(tokens)
            self._wake.notify()
        return Ticket(self, live)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: object) -> RunRecord:
        """Submit and wait. Options as for `submit`. A Ctrl-C cancels the request at the next step boundary."""
        ticket = self.submit(prompt, params, **options)  # type: ignore[arg-type]
        try:
            return ticket.result()
        except BaseException:
            ticket.cancel()
            raise

    def cancel(self, request_id: int) -> None:
        """End a request at the next step boundary; unknown or finished ids are ignored."""
        with self._lock:
            live = self._live.get(request_id)
            if live is not None:
                live.request.cancelled = True
                self._wake.notify()

    def tokenize(self, text: str) -> list[int]:
        return self._loaded.tokenizer.encode(text, special=False, bos=False)

    def continuation(self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], message: str) -> list[int]:
        """Token ids of a chat's next prompt: all tokens so far unchanged, then the user's new message."""
        return [*prompt_tokens, *output_tokens, *self._loaded.tokenizer.continuation(output_tokens, message)]

    def next_prompt(self, turn: Turn) -> NextPrompt:
        """The same with the chat's messages known: `turn.history` chooses between the exact tokens and a chat rendered anew."""
        return next_prompt(self._loaded.tokenizer, turn)

    # --- looking ----------------------------------------------------------------------------------------------------------------

    def explain(self) -> tuple[Decision, ...]:
        """Every setting and mechanism in force, who owns it and why it is as it is."""
        with self._lock:
            costs = self._costs.decision()
            speculated = [metrics.decision(name) for name, metrics in sorted(self._totals.speculated.items())]
        settings = views.explain(self.config, self._loaded, self._pool)
        return (*settings, costs, *speculated, *(change.decision() for change in self._host))

    def memory(self) -> MemoryPlan:
        """Bytes on the device; of a closed engine, as they were."""
        resident = psutil.Process().memory_info().rss
        draft = self._draft.runner if self._draft is not None else None
        return self._memory or views.memory(
            self._loaded, self._runner, draft, self._pool, resident, companion=self._companion
        )

    def shapes(self) -> tuple[ShapeStats, ...]:
        """What became of each shape that steps ran in: captures, replays, eager runs and why, padding, bytes."""
        return self._runner.graphs.registry.snapshot()

    def plan_shapes(self, most: int) -> BucketPlan:
        """The set of at most so many row buckets that would have cost the steps so far the least padding, beside the present one."""
        graphs = self._runner.graphs
        return plan_buckets(graphs.registry.demanded_rows(), most, graphs.coverage)

    def blocks(self) -> tuple[BlockState, ...]:
        """A snapshot of every KV block."""
        with self._lock:
            return views.blocks(self._scheduler.pool, [*self._scheduler, *self._scheduler.kept])

    def status(self) -> EngineStatus:
        with self._lock:
            return self._totals.status(self._scheduler, self._clock())

    def drop_prefixes(self) -> int:
        """Forget all cached blocks, and what speculation has kept of requests that are over, for cold measurements. Returns how many blocks
        there were."""
        with self._lock:
            self._proposer.forget()
            return self._scheduler.pool.drop_cached()

    def check(self) -> None:
        """Assert the block invariants (tests; between steps)."""
        with self._lock:
            self._scheduler.check()

    # --- running ----------------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step in the calling thread; False when there was nothing to do.

        A raised Exception ends the requests of that step with StepFailed and the engine goes on; an interrupt changes nothing, so the
        step can simply be run again.
        """
        self._refuse_inside()
        with self._loaded.turn, self._interrupts.watching():
            worked = self._step()
            worked = self._record() or worked
        if self._closing:
            self._end_all()
        return worked

    def _step(self) -> bool:
        """Collect the step in flight, or one launched now; where the device works by itself, the next one is launched before that."""
        committed: Flight | None = None
        try:
            if not self._flights and not self._launch():
                return False
            flight = self._flights[0]
            if self._overlap and len(self._flights) == 1 and not self._recorder.pending:
                self._launch_ahead()
            assert flight.launched is not None, "what could not be launched is not in flight"
            sampled = self._runner.collect(flight.launched, flight.requests)
            verdicts = verify(flight.plan, flight.lives, sampled.tokens, self._scheduler.awaited(flight.plan))
            with self._interrupts.held():  # what is committed is published, whatever comes between
                with self._critical():
                    start = self._clock()
                    ended = self._scheduler.commit(flight.plan, [verdict and verdict[0] for verdict in verdicts])
                    committed = self._flights.popleft()
                    wall = self._took(flight)
                    self._tell_speculation(flight, verdicts, wall)
                    spent = self._clock() - start
                # What could not be foreseen begins before anybody is told.
                behind = self._overlap and not self._flights and not self._recorder.pending
                stopped = self._launch_behind() if behind else None
                with self._critical():
                    self._publish(flight, sampled, verdicts, (spent, wall), ended)
                    self._drop_idle_flight()
            if stopped is not None:
                raise stopped
        except BaseException as error:
            with self._critical():
                failed = committed or (self._flights[0] if self._flights else None)
                self._abort_flights()
                if isinstance(error, Exception):
                    self._fail(failed.plan if failed is not None else None, error)
            if not isinstance(error, Exception):
                raise
        return True

    def _launch(self, *, expire: bool = True) -> bool:
        """Plan a step, of which its flight tells from then on, and begin it. False where there is none.

        expire: whether requests whose time is over end before.
        """
        with self._critical():
            if expire:
                self._expire()
            ahead = bool(self._flights)
            proposals = {} if ahead else self._propose()
            plan = self._scheduler.plan()
            if plan is None:
                return False
            lives = [self._live[span.request_id] for span in plan.spans]
            if ahead:
                proposals = self._proposer.rest([live.request for live in lives])
            flight = Flight(plan, lives, proposals, views.load_of(self._scheduler), self._clock())
            self._flights.append(flight)
        for live in lives:
            live.begin_step(flight.begun)
        flight.launched = self._runner.launch(plan, flight.requests)
        return True

    def _record(self) -> bool:
        """Between two steps: ask drafters behind one token of each request that is over and recorded. False where there is none, or a
        step is in flight."""
        if not self._recorder.pending or self._flights or self._closing:
            return False
        with self._critical():
            for request in self._recorder.advance():
                self._settle(self._live[request.id], self._clock())
        return True

    def _launch_ahead(self) -> None:
        """Begin the step behind the one in flight. One that cannot be begun is given up: it is planned again by itself, and fails alone."""
        try:
            self._launch()
        except Exception:
            with self._critical():
                if len(self._flights) < 2:  # the fault is in planning
                    raise
                self._scheduler.abort(self._flights.pop().plan)

    def _launch_behind(self) -> BaseException | None:
        """Begin a step before the one that is committed is published. An error that keeps it from beginning is told in its turn; what is
        no error, but an interrupt, is returned."""
        try:
            self._launch(expire=False)
        except BaseException as error:  # noqa: BLE001
            with self._critical():
                self._abort_flights()
            return None if isinstance(error, Exception) else error
        return None

    def _abort_flights(self) -> None:
        self._flights.clear()
        self._scheduler.abort_all()  # a fault may have come between a plan and its flight

    def _drop_idle_flight(self) -> None:
        """Forget a step in flight whose requests have all ended: nobody waits for its draws."""
        if self._flights and not any(self._scheduler.awaited(self._flights[0].plan)):
            self._abort_flights()

    def drive(self, done: threading.Event, timeout: float | None = None) -> bool:
        """Wait until `done` is set, stepping when the engine has no thread of its own. False when `timeout` seconds passed before."""
        if not done.is_set():
            self._refuse_inside()
        if self._thread is not None:
            return done.wait(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while not done.is_set() and (end is None or time.monotonic() < end):
            self.step()
        return done.is_set()

    def close(self) -> None:
        """End all requests with EngineClosed, free the KV pool and, where the engine loaded it, the model and its threads. Idempotent.

        In a callback it takes effect at the end of the step.
        """
        with self._lock:
            self._closing = True
            self._wake.notify()
            if self._inside == threading.get_ident():
                return
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._end_all()

    def _end_all(self) -> None:
        with self._loaded.turn, self._critical():
            self._abort_flights()
            for live in list(self._live.values()):
                if live.request.finish is None:
                    self._scheduler.end(live.request, Finish.CANCELLED, EngineClosed("The engine was closed."))
                self._settle(live, self._clock())
            self._memory = self._memory or self.memory()
            self._runner.ops.wait()  # a step that was given up may still be writing
            self._runner.release(weights=self._owns_device)
            if self._draft is not None:
                self._draft.runner.release(weights=self._owns_device)
            if self._loaded.trained is not None and self._owns_device:
                self._loaded.trained.release()
            if self._owns_device:
                self._runner.ops.close()  # in turn: another engine may be stepping on the same threads

    def _run(self) -> None:
        self._host = hostprofile.apply(HostProfile.of(self.config.host_profile))
        while True:
            with self._lock:
                self._wake.wait_for(
                    lambda: self._closing or not self._scheduler.idle or self._flights or self._recorder.pending
                )
                if self._closing:
                    return
            try:
                self.step()
            except BaseException as error:  # noqa: BLE001  # an observer's SystemExit: were the thread to die, all would wait for ever
                with self._critical():
                    self._fail(None, error)

    @contextmanager
    def _critical(self) -> Iterator[None]:
        """Where state moves and callers' functions are called: the lock is held, a Ctrl-C waits."""
        with self._lock, self._interrupts.held():
            self._inside = threading.get_ident()
            try:
                yield
            finally:
                self._inside = None

    def _refuse_inside(self) -> None:
        """A callback that steps would mix two steps, one that waits for a result would wait for itself."""
        if self._inside == threading.get_ident():
            raise PowerLabError(
                "A callback cannot step its engine or wait for its requests.", "Wait on another thread."
            )

    def _expire(self) -> None:
        now = self._clock()
        for request in self._scheduler.expire(now):
            self._settle(self._live[request.id], now)

    def _propose(self) -> dict[int, Proposal]:
        running = self._scheduler.running
        return self._proposer.propose({r.id: self._scheduler.draft_room(r) for r in running}, running)

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
        self._costs.add_step(flight.launched.shape, flight.launched.shape.rows, seconds)
        for span, live, decided in zip(flight.plan.spans, flight.lives, verdicts, strict=True):
            if decided is None:
                continue
            self._proposer.commit(live.request, decided[0].emitted)
            proposal = flight.proposals.get(span.request_id)
            if proposal is not None and proposal.width >= 0:
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
        self._totals.count(flight.plan, [verdict[0] for verdict in verdicts if verdict is not None], now)
        times = (sampled.forward_s, sampled.sample_s, commit_s)
        for live, (_, verdict), round_, step in flight.events(sampled, verdicts, times, wall, now):
            live.accept(verdict, round_, step, now)
            self._totals.count_speculation(live.request.params.speculate, step, round_)
        for request in ended:
            if request in self._scheduler.kept:
                self._proposer.end(request)
                self._recorder.add(request)
            else:
                self._settle(self._live[request.id], now)

    def _fail(self, plan: StepPlan | None, error: BaseException) -> None:
        """End the requests of a step that raised; without a plan the fault is in planning, and every request ends."""
        now = self._clock()
        for request_id in [span.request_id for span in plan.spans] if plan is not None else list(self._live):
            live = self._live.get(request_id)
            if live is None or (plan is not None and live.request in self._recorder):
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
        live.drafts = self._recorder.end(live.request)
        self._scheduler.release(live.request)
        del self._live[live.request.id]
        self._totals.cached_tokens += live.request.cached
        live.finish(self.facts, now)
