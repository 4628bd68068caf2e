"""The engine: requests in, tokens out, one step at a time on one thread."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import psutil

from power_lab.engine import hostprofile, intake, prefix, views
from power_lab.engine.assembly import assemble
from power_lab.engine.chat import NextPrompt, Turn, next_prompt
from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.device import stream_priority
from power_lab.engine.hostprofile import Change, HostProfile
from power_lab.engine.inspection import LensAsk, LensReport, LookupReport, PrefixTree, ShapesReport, StepRecord
from power_lab.engine.interrupts import Critical, Interrupts
from power_lab.engine.lens import Lens
from power_lab.engine.live import Live
from power_lab.engine.loader import Loaded, load
from power_lab.engine.looking import Looking
from power_lab.engine.messages import Options, Tool
from power_lab.engine.planner import BucketPlan, plan_buckets
from power_lab.engine.report import Decision, EngineStatus, MemoryPlan
from power_lab.engine.request import Prompt, Request, SamplingParams
from power_lab.engine.runner import Observer
from power_lab.engine.shapes import ShapeStats
from power_lab.engine.stepping import Stepper
from power_lab.engine.subscription import Subscription
from power_lab.engine.ticket import Ticket
from power_lab.engine.trace import BlockState, EngineFacts, OnDelta, OnDone, RunRecord
from power_lab.engine.vitals import EngineVitals, Vitals
from power_lab.errors import EngineClosed, PowerLabError
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
        self._critical = Critical(self._lock, self._interrupts)
        self._next_id = 0
        parts = assemble(self.config, self._loaded, clock, observer)
        self._runner, self._draft, self._pool = parts.runner, parts.draft, parts.pool
        self._companion, self._resolve = parts.companion, parts.resolve
        self._scheduler, self._costs, self._proposer = parts.scheduler, parts.costs, parts.proposer
        self._rollback = parts.rollback
        self._stepper = Stepper(parts, self.config, self.facts, clock, self._interrupts, self._critical)
        self.context = self._pool.context
        self._host: tuple[Change, ...] = ()
        self._memory: MemoryPlan | None = None
        self._looking = Looking(
            self.config, self._loaded, parts, self._stepper, clock, lock=self._lock, memory=self.memory
        )
        self._lens = Lens(
            self.submit,
            self._lock,
            self._loaded.tokenizer,
            parts.runner,
            self._draft.runner if self._draft is not None else None,
            recorded=tuple(parts.recorded),
            context=self.context,
        )
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
                recorded=params.record == "replay" and self._stepper.recorder.able,
            )
            live = Live(request, self._loaded.tokenizer, now, on_delta, on_done)
            self._stepper.begin(live)
            self._next_id += 1
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
            live = self._stepper.live.get(request_id)
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
            speculated = [metrics.decision(name) for name, metrics in sorted(self._stepper.totals.speculated.items())]
        settings = views.explain(self.config, self._loaded, self._pool, self._companion)
        return (*settings, self._rollback.decision(), costs, *speculated, *(change.decision() for change in self._host))

    def memory(self) -> MemoryPlan:
        """Bytes on the device; of a closed engine, as they were."""
        resident = psutil.Process().memory_info().rss
        draft = self._draft.runner if self._draft is not None else None
        return self._memory or views.memory(
            self._loaded, self._runner, draft, self._pool, resident, companion=self._companion
        )

    def vitals(self) -> EngineVitals:
        """The engine as it is now, for panels. Asking costs the engine nothing."""
        return self._looking.vitals()

    def steps(self) -> tuple[StepRecord, ...]:
        """The last 4,096 steps, oldest first."""
        return self._looking.steps()

    def shapes(self) -> ShapesReport:
        """What became of each shape that steps ran in, and the row buckets that would serve these steps better."""
        return self._looking.shapes()

    def prefixes(self) -> PrefixTree:
        """Every block of the prefix cache: what it holds, what it has saved, when it is evicted."""
        return self._looking.prefixes()

    def lookup(self, prompt: Prompt, *, chat: bool | None = None, cache_key: str = "") -> LookupReport:
        """Where a prompt, taken as `submit` takes it, would hit the prefix cache now, and where and why it stops there.

        Raises ConfigError for bad input, CapacityError for more tokens than the engine's context.
        """
        tokens = intake.encode(self._loaded.tokenizer, prompt, chat)
        one = SamplingParams(max_tokens=1)
        intake.check(tokens, one, None, vocab=self.facts.vocab, context=self.context + 1)
        return self._looking.lookup(tokens, prefix.check_namespace(cache_key))

    def lens(self, ask: LensAsk, cancelled: Callable[[], bool] | None = None) -> LensReport:
        """What target and drafter make of one position of a run, by requests of their own: `LensAsk.of(record, position)`.

        cancelled: whether nobody wants it any more; then it ends at the next step boundary with RequestCancelled.
        """
        return self._lens.look(ask, cancelled)

    def subscribe(self, on_vitals: Callable[[Vitals], None], hz: float = 2.0) -> Subscription:
        """Call `on_vitals` so often a second (0.2..20), on a thread of its own, until the handle's `close` or the engine's end."""
        return Subscription(self.vitals, lambda: self._closing, on_vitals, hz)

    def shape_stats(self) -> tuple[ShapeStats, ...]:
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
            return self._stepper.totals.status(self._scheduler, self._clock())

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
        with self._interrupts.watching():
            return self._step()

    def _step(self) -> bool:
        with self._loaded.turn:
            worked = self._stepper.step()
            worked = (not self._closing and self._stepper.record()) or worked
        if self._closing:
            self._end_all()
        return worked

    def drive(self, done: threading.Event, timeout: float | None = None) -> bool:
        """Wait until `done` is set, stepping when the engine has no thread of its own. False when `timeout` seconds passed before."""
        if not done.is_set():
            self._refuse_inside()
        if self._thread is not None:
            return done.wait(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        with self._interrupts.watching():
            while not done.is_set() and (end is None or time.monotonic() < end):
                self._step()
        return done.is_set()

    def close(self) -> None:
        """End all requests with EngineClosed, free the KV pool and, where the engine loaded it, the model and its threads. Idempotent.

        In a callback it takes effect at the end of the step.
        """
        with self._lock:
            self._closing = True
            self._wake.notify()
            if self._critical.inside:
                return
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._end_all()

    def _end_all(self) -> None:
        with self._loaded.turn, self._critical:
            self._stepper.end_all(EngineClosed("The engine was closed."))
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
        profile = HostProfile.of(self.config.host_profile)
        stream = stream_priority(self._runner.ops) if profile.stream_priority else None
        self._host = hostprofile.apply(profile, stream=stream)
        while True:
            with self._lock:
                self._wake.wait_for(lambda: self._closing or self._stepper.busy)
                if self._closing:
                    return
            try:
                self.step()
            except BaseException as error:  # noqa: BLE001  # an observer's SystemExit: were the thread to die, all would wait for ever
                with self._critical:
                    self._stepper.fail(None, error)

    def _refuse_inside(self) -> None:
        """A callback that steps would mix two steps, one that waits for a result would wait for itself."""
        if self._critical.inside:
            raise PowerLabError(
                "A callback cannot step its engine or wait for its requests.", "Wait on another thread."
            )
