"""Rollback: whatever is kept of requests, drafts that are refused and faults wherever they come leave what plain decoding leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from power_lab.engine.engine import Engine
from power_lab.engine.plan import Span, StepPlan
from power_lab.engine.request import Finish, SamplingParams
from power_lab.engine.runner import Runner
from power_lab.engine.scheduler import Outcome
from power_lab.engine.speculation.metrics import Metrics
from power_lab.engine.speculation.rollback import Cursor, Replayed, Rollback
from power_lab.engine.speculation.snapshots import Ring, Snapshots
from power_lab.kernels.ops import Ops
from tests import drafters, tiny
from tests.engine.speculation.toy_states import WIDE, Checkpointed, Paged, Recurrent, Windowed, fold
from tests.engine.test_exactness import prompt_of

VOCAB = 3  # so few that wrong drafts are right at times


class Planted(Exception):
    pass


class Model:
    """A model of toy states, decoded as an engine does: steps are planned, launched, and committed or aborted.

    Args:
        kinds: its states beside paged rows. depth: of those that have one.
    """

    def __init__(self, kinds: Sequence[type[Recurrent]], depth: int) -> None:
        self.faults: set[int] = set()
        self._ticks = count()
        self.states = [kind(depth, self.tick) for kind in kinds]
        self.paged = Paged(self.tick)
        self.rollback = Rollback([Cursor("paged"), *self.states], lambda: 0.0)
        self.requests: dict[int, Any] = {}
        self._steps = count()

    def tick(self) -> None:
        if next(self._ticks) in self.faults:
            raise Planted

    def fail_at(self, ticks: set[int]) -> None:
        self._ticks, self.faults = count(), ticks

    def add(self, request_id: int, prompt: list[int]) -> None:
        self.requests[request_id] = SimpleNamespace(id=request_id, tokens=list(prompt), computed=0, prompt=len(prompt))

    def end(self, request_id: int) -> None:
        del self.requests[request_id]
        self.rollback.end(request_id)

    @staticmethod
    def next_token(values: Sequence[int]) -> int:
        return fold(values) % VOCAB

    def said(self, tokens: Sequence[int]) -> int:
        """What plain decoding says behind these tokens."""
        return self.next_token([kind.plain(tokens) for kind in (self.paged, *self.states)])

    def right(self, request_id: int, drafts: int) -> list[int]:
        """Drafts that will be accepted."""
        tokens = list(self.requests[request_id].tokens)
        for _ in range(drafts):
            tokens.append(self.said(tokens))
        return tokens[len(tokens) - drafts :]

    def span(self, request_id: int, chunk: int, drafts: Sequence[int], ahead: Sequence[int] = ()) -> Span:
        request = self.requests[request_id]
        start = request.computed + len(ahead)
        known = [*request.tokens, *ahead]
        end = min(len(known), start + chunk)
        drafts = drafts if end == len(known) and not ahead else ()
        sampled = 1 + len(drafts) if end == len(known) else 0
        return Span(request_id, start, (*known[start:end], *drafts), len(drafts), sampled, ())

    def launch(self, spans: Sequence[Span]) -> tuple[StepPlan, list[list[int]]]:
        """Returns also the target's draws of each span. Raises Planted, everything being aborted."""
        plan = StepPlan(next(self._steps), tuple(spans))
        try:
            self.rollback.begin(plan, self.requests)
            return plan, [self._draws(span) for span in spans]
        except Planted:
            self.rollback.abort(plan)
            raise

    def _draws(self, span: Span) -> list[int]:
        parts = [state.run(span.request_id, span.start, span.tokens) for state in (self.paged, *self.states)]
        return [self.next_token(values) for values in zip(*parts, strict=True)][span.rows - span.sampled :]

    def settle(self, plan: StepPlan, draws: Sequence[Sequence[int]]) -> None:
        """Verify and commit. Raises Planted, everything being aborted."""
        outcomes = [self._verify(span, own) for span, own in zip(plan.spans, draws, strict=True)]
        try:
            self.rollback.restore(plan, outcomes)
            self.tick()  # a commit that fails
        except Planted:
            self.rollback.abort(plan)
            raise
        for span, outcome in zip(plan.spans, outcomes, strict=True):
            request = self.requests[span.request_id]
            request.tokens.extend(outcome.emitted)
            request.computed = span.start + span.rows - span.drafts + outcome.accepted

    def _verify(self, span: Span, draws: Sequence[int]) -> Outcome:
        if not draws:
            return Outcome()
        drafts = span.tokens[span.rows - span.drafts :]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == draws[accepted]:
            accepted += 1
        return Outcome(tuple(draws[: accepted + 1]), accepted)

    def step(self, spans: Sequence[Span]) -> None:
        self.settle(*self.launch(spans))

    def replayed(self) -> int:
        return sum(len(state.replays) for state in self.states)

    def check(self) -> None:
        """Tokens are those of plain decoding, and states are at a committed length or before it, and are what they are there."""
        for request in self.requests.values():
            for at in range(request.prompt, len(request.tokens)):
                assert request.tokens[at] == self.said(request.tokens[:at])
            assert self.paged.value(request.id, request.computed) == self.paged.plain(
                request.tokens[: request.computed]
            )
            for state, at in zip(self.states, self.rollback._at.get(request.id, [0] * len(self.states)), strict=True):
                if at >= 0:  # else it is not trusted, and brought back before it is used
                    assert at <= len(request.tokens)  # a preempted one begins anew before that
                    assert not at or state.value(request.id, at) == state.plain(request.tokens[:at])


KINDS: list[tuple[type[Recurrent], ...]] = [
    (),
    (Recurrent,),
    (Windowed,),
    (Checkpointed,),
    (Recurrent, Windowed, Checkpointed),
    (Recurrent, Recurrent),  # as of a target and its drafter
]


# --- any decoding ----------------------------------------------------------------------------------------------------------------


class Decoding(RuleBasedStateMachine):
    """Requests come, go, are preempted and speculate together, steps overlap, and faults come anywhere."""

    @initialize(kinds=st.sampled_from(KINDS), depth=st.integers(0, 4))
    def begin(self, kinds: tuple[type[Recurrent], ...], depth: int) -> None:
        self.model = Model(kinds, depth)
        self.numbers = count()

    def requests(self) -> list[int]:
        return list(self.model.requests) if hasattr(self, "model") else []

    @precondition(lambda self: len(self.requests()) < 3)
    @rule(prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
    def arrive(self, prompt: list[int]) -> None:
        self.model.add(next(self.numbers), prompt)

    @precondition(lambda self: self.requests())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.model.end(data.draw(st.sampled_from(self.requests())))

    @precondition(lambda self: self.requests())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """It begins again where a cached prefix ends."""
        request = self.model.requests[data.draw(st.sampled_from(self.requests()))]
        request.computed = data.draw(st.integers(0, request.computed))

    @precondition(lambda self: self.requests())
    @rule(data=st.data())
    def speculate(self, data: st.DataObject) -> None:
        model = self.model
        spans = []
        for request_id in self.requests():
            if data.draw(st.booleans()):
                right = model.right(request_id, data.draw(st.integers(0, 4)))
                wrong = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
                spans.append(model.span(request_id, data.draw(st.integers(1, 12)), right + wrong))
        model.fail_at(data.draw(st.sets(st.integers(0, 60), max_size=2)))
        for request_id in self.requests():
            model.rollback.told(request_id)
        before = model.replayed()
        with suppress(Planted):
            model.step(spans)
        model.fail_at(set())
        told = [replayed.passes for i in self.requests() if (replayed := model.rollback.told(i)) is not None]
        assert sum(told) == model.replayed() - before

    @precondition(lambda self: self.requests())
    @rule(data=st.data())
    def overlap(self, data: st.DataObject) -> None:
        """A second step begins before the first one is committed, and is committed or aborted after it."""
        model = self.model
        ids = [i for i in self.requests() if model.requests[i].computed == len(model.requests[i].tokens) - 1]
        model.fail_at(data.draw(st.sets(st.integers(0, 40), max_size=2)))
        try:
            first, draws = model.launch([model.span(i, 1, ()) for i in ids])
        except Planted:
            model.fail_at(set())
            return
        second = None
        try:
            second, later = model.launch([model.span(i, 1, (), own) for i, own in zip(ids, draws, strict=True)])
            model.rollback.restore(first, [Outcome(tuple(own)) for own in draws])
            model.tick()
        except Planted:
            if second is not None:  # the first one is not committed
                model.rollback.abort(second)
                model.rollback.abort(first)
                model.fail_at(set())
                return
        for i, own in zip(ids, draws, strict=True):
            model.requests[i].tokens.extend(own)
            model.requests[i].computed += 1
        if second is not None and data.draw(st.booleans()):
            with suppress(Planted):
                model.settle(second, later)
        elif second is not None:
            model.rollback.abort(second)
        model.fail_at(set())

    @invariant()
    def as_plain_decoding(self) -> None:
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self) -> None:
        """All goes on."""
        for _ in range(3):
            for request_id in self.requests():
                self.model.step([self.model.span(request_id, 30, self.model.right(request_id, 2))])
                self.as_plain_decoding()


TestDecoding = Decoding.TestCase
TestDecoding.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("kinds", KINDS[1:])
def test_a_fault_at_every_point_of_a_round_leaves_the_last_commit(kinds: tuple[type[Recurrent], ...]) -> None:
    """Two requests, both of which are refused drafts, one of which owes a replay from the round before."""
    for at in count():
        model = Model(kinds, depth=2)
        for request_id, prompt in enumerate(([1, 0, 2, 2, 1, 0, 0, 1, 1], [2, 1, 0, 1])):
            model.add(request_id, prompt)
            model.step([model.span(request_id, 30, ())])
        wrong = [(model.right(0, 1)[0] + 1) % VOCAB] * 4
        model.step([model.span(0, 1, wrong)])
        before = {i: list(model.requests[i].tokens) for i in (0, 1)}
        spans = [model.span(i, 1, [*model.right(i, 1 + i), *wrong]) for i in (0, 1)]
        model.fail_at({at})
        try:
            model.step(spans)
        except Planted:
            assert {i: model.requests[i].tokens for i in (0, 1)} == before
            model.check()
            model.fail_at(set())
            model.step([model.span(i, 1, model.right(i, 2)) for i in (0, 1)])
            model.check()
            assert [len(model.requests[i].tokens) - len(before[i]) for i in (0, 1)] == [3, 3]
        else:
            assert at > 20, "no fault"
            return


# --- which means -----------------------------------------------------------------------------------------------------------------


def spoken(kind: type[Recurrent], depth: int, refused: int, right: int = 1) -> tuple[Model, Replayed | None]:
    """A round of `right` drafts that are accepted and others, and what was replayed before the round behind it."""
    model = Model((kind,), depth)
    model.add(0, [1, 0, 2, 2, 1, 0, 2])
    model.step([model.span(0, 30, ())])
    told = model.right(0, right + 1)
    model.step([model.span(0, 1, [*told[:right], *[(told[right] + 1) % VOCAB] * refused])])
    assert len(model.requests[0].tokens) == 7 + 1 + right + 1
    model.step([model.span(0, 1, ())])
    return model, model.rollback.told(0)


@pytest.mark.parametrize("kind", [Recurrent, Windowed])
@pytest.mark.parametrize("refused", [0, 1, 3])
def test_a_snapshot_brings_back_as_many_drafts_as_are_verified_at_once(kind: type[Recurrent], refused: int) -> None:
    model, replays = spoken(kind, 4, refused)
    assert replays is None and not model.replayed()
    model.check()


def test_what_no_snapshot_reaches_is_run_again_from_where_the_round_began() -> None:
    for refused in range(7):
        model, replays = spoken(Recurrent, 4, refused)
        # The last 5 lengths are kept. Refused drafts behind them: the row of the last token and the accepted draft are run again.
        assert model.states[0].replays == ([(7, 2)] if refused > 4 else [])
        assert replays == (Replayed(1, 0.0) if refused > 4 else None)


def test_a_checkpoint_is_run_on_from() -> None:
    model, replays = spoken(Checkpointed, 0, 2, right=2)
    assert model.states[0].replays == [] and replays is None, "the checkpoint is where the round is cut"
    model, replays = spoken(Checkpointed, 0, 2, right=1)
    assert model.states[0].replays == [(5, 4)] and replays == Replayed(1, 0.0)


def test_replays_are_counted_with_their_seconds() -> None:
    clock = iter(range(100))
    model = Model((Checkpointed, Checkpointed), 0)
    model.rollback._clock = lambda: float(next(clock))
    model.add(0, [1, 0, 2])
    model.step([model.span(0, 30, ())])
    wrong = (model.right(0, 1)[0] + 1) % VOCAB
    model.step([model.span(0, 1, [wrong])])
    assert model.rollback.told(0) is None
    model.step([model.span(0, 1, ())])
    assert model.rollback.told(0) == Replayed(2, 2.0)


def test_nothing_is_run_again_for_a_request_that_has_ended() -> None:
    model = Model((Recurrent, Checkpointed), 0)
    model.add(0, [1, 0, 2])
    model.step([model.span(0, 30, ())])
    plan, draws = model.launch([model.span(0, 1, [(model.right(0, 1)[0] + 1) % VOCAB] * 2)])
    model.rollback.restore(plan, [Outcome((draws[0][0],), 0, Finish.STOP)])
    model.end(0)
    assert not model.replayed() and not model.rollback._at and not model.states[0].snapshots._held


def test_a_span_that_nobody_awaits_is_brought_back_whole() -> None:
    model = Model((Recurrent, Windowed), 4)
    model.add(0, [1, 0, 2])
    model.step([model.span(0, 30, ())])
    plan, _ = model.launch([model.span(0, 1, model.right(0, 2))])
    model.rollback.restore(plan, [None])
    assert model.rollback._at[0] == [3, 3]
    model.check()


def test_cursors_cost_nothing() -> None:
    """Not even a look at the step's spans."""
    rollback = Rollback([Cursor("the target's KV"), Cursor("the drafter's")], lambda: 0.0)
    plan: Any = SimpleNamespace(spans=None)
    assert rollback.states == () and rollback.depth is None and rollback.begin(plan, {}) == 0
    rollback.restore(plan, None)  # type: ignore[arg-type]
    rollback.abort(plan)
    rollback.end(0)
    assert (told := rollback.decision()).value == "cursor" and "the drafter's" in told.reason


def test_the_shallowest_state_says_how_many_drafts_may_be_refused() -> None:
    model = Model((Recurrent, Windowed), 3)
    assert model.rollback.depth == 3
    assert Rollback([*model.states, Checkpointed()], lambda: 0.0).depth == 0
    assert "up to 3 refused drafts" in model.rollback.decision().reason


# --- bounds ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 7])
def test_slots_are_bounded(depth: int) -> None:
    snapshots = Snapshots(depth)
    length = 0
    for rows, drafts, kept in [(300, 0, 300), (1, 0, 1), (depth + 1, depth, 1), (20, 19, 2), (depth + 1, depth, 1)]:
        snapshots.begin(1, length, rows, drafts)
        assert all(slot < snapshots.slots for slot in snapshots.slots_of(1, length, rows))
        assert len(set(snapshots._held[1].values())) == len(snapshots._held[1]) <= max(depth + 2, 3)
        if kept <= rows - drafts or drafts <= depth:
            assert snapshots.held(1, length + kept) == length + kept
        length = snapshots.held(1, length + kept)
        snapshots.restore(1, length)


def test_a_ring_sets_no_more_aside_than_a_verify_can_overwrite() -> None:
    moved: list[int] = []
    ring = Ring(WIDE, 3, lambda _, source, target: moved.append(len(source)))
    ring.begin(1, 0, WIDE, 0)
    assert not moved and ring.held(1, 2) == 2, "the first round overwrites nothing"
    ring.begin(1, WIDE, 4, 3)
    assert moved == [4] and ring.held(1, WIDE + 1) == WIDE + 1
    ring.restore(1, WIDE + 1)
    assert moved == [4, 3]
    ring.begin(1, WIDE + 1, 100, 0)
    assert moved == [4, 3] and ring.held(1, WIDE + 100) == 0, "a chunk that goes around cannot be taken back"
    ring.begin(1, WIDE + 101, 7, 0)
    assert moved == [4, 3, 4] and ring.held(1, WIDE + 104) == WIDE + 104 and ring.held(1, WIDE + 103) == 0
    with pytest.raises(AssertionError, match="at once"):
        Ring(WIDE, WIDE, lambda *_: None)


# --- in an engine ----------------------------------------------------------------------------------------------------------------


class Beside:
    """Toy states beside an engine's own, written by its passes.

    Attributes:
        looked: how often they were what plain decoding makes them when a pass went on from them.
    """

    def __init__(self, engine: Engine, states: Sequence[Recurrent], patch: pytest.MonkeyPatch) -> None:
        self.looked = 0
        self._engine = engine
        self.rollback = engine._stepper._rollback = Rollback(states, engine._clock)
        self._states = states
        self._passes: dict[int, list[tuple[Span, list[Callable[[list[int]], Any]]]]] = {}
        launch, collect = Runner.launch, Runner.collect

        def launching(runner: Runner, plan: StepPlan, *args: Any, **options: Any) -> Any:
            launched = launch(runner, plan, *args, **options)
            self._passes[id(launched)] = [(span, self._prepared(span)) for span in plan.spans]
            return launched

        def collecting(runner: Runner, launched: Any, requests: Any) -> Any:
            for span, writes in self._passes.pop(id(launched)):  # of one planned ahead the tokens are known by now
                known = requests[span.request_id].tokens[: span.start + span.rows - span.drafts]
                if len(known) == span.start + span.rows - span.drafts:  # it has not ended meanwhile
                    for write in writes:
                        write([*known, *span.tokens[span.rows - span.drafts :]])
            return collect(runner, launched, requests)

        patch.setattr(Runner, "launch", launching)
        patch.setattr(Runner, "collect", collecting)

    def check(self) -> None:
        """States stand where what is committed or in flight ends; one without snapshots may be before that."""
        flights = self._engine._stepper._flights
        for request in self._engine._scheduler.running:
            ends = [
                span.start + span.rows
                for flight in flights
                for span in flight.plan.spans
                if span.request_id == request.id
            ]
            stands = max([request.computed, *ends])
            for state, at in zip(self._states, self.rollback._at.get(request.id, ()), strict=False):
                assert at == stands if state.depth else 0 <= at <= stands
                assert flights or not at or state.value(request.id, at) == state.plain(request.tokens[:at])

    def _prepared(self, span: Span) -> list[Callable[[list[int]], Any]]:
        return [
            partial(self._write, state, span, state.prepare(span.request_id, span.start, span.rows))
            for state in self._states
        ]

    def _write(self, state: Recurrent, span: Span, write: Callable[[Sequence[int]], Any], tokens: list[int]) -> None:
        assert state.value(span.request_id, span.start) == state.plain(tokens[: span.start])
        self.looked += 1
        write(tokens[span.start :])


@pytest.mark.parametrize(
    ("kinds", "late"), [((Recurrent, Windowed), False), ((Checkpointed,), False), ((Recurrent,), True)]
)
def test_an_engine_brings_back_whatever_it_keeps_and_counts_its_replays(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], kinds: tuple[type[Recurrent], ...], late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Several requests, chunked prompts, a pool that preempts; of a late device, drafts that could be made on it."""
    settings = {"kv_tokens": 320, "step_tokens": 64, "max_batch": 3, "context": 192}
    speculate = "mtp" if late else "ngram"
    params = SamplingParams(max_tokens=60, speculate=speculate, width=7, controller="fixed", seed=4, ignore_eos=True)
    prompts = [prompt_of(at, 70 + 20 * at) for at in range(3)]
    alone = drafters.engine(drafters.mtp_drafter(tiny.Shape(layers=1), numba_ops(2)), **settings)
    want = [ticket.result() for ticket in [alone.submit(prompt, params) for prompt in prompts]]
    told = {decision.key: decision for decision in alone.explain()}["rollback"]
    assert not Metrics.of(want).replays and told.value == "cursor" and "in the same pages (hybrid, mtp)" in told.reason

    ops = behind(numba_ops(2)) if late else numba_ops(2)
    engine = drafters.engine(drafters.mtp_drafter(tiny.Shape(layers=1), ops), **settings)
    states = [kind(WIDE - 1) for kind in kinds]
    beside = Beside(engine, states, monkeypatch)
    tickets = [engine.submit(prompt, params) for prompt in prompts]
    while not all(ticket._live.done.is_set() for ticket in tickets):
        engine.step()
        engine.check()
        beside.check()
    records = [ticket.result() for ticket in tickets]
    assert [record.tokens for record in records] == [record.tokens for record in want]
    assert sum(record.preemptions for record in records) and beside.looked > 50 and not beside.rollback._at
    rounds = [round_ for record in records for round_ in record.rounds]
    refused = sum(len(round_.rejected) > 0 for round_ in rounds)
    came = Metrics.of(records)
    assert refused > 5 and (late or came.accepted > 5) and came.replays == sum(round_.replays for round_ in rounds)
    assert all((round_.replay_s > 0) == (round_.replays > 0) for round_ in rounds)
    ran = sum(len(state.replays) for state in states)
    assert came.replays == ran, "each is told once, those behind which nothing was said with the next round"
    if kinds == (Checkpointed,):
        assert ran > 5
    else:  # but for those that were preempted and found their prompt cached, snapshots were enough
        assert ran <= 2 * len(kinds) * sum(record.preemptions for record in records)


def test_a_step_ahead_that_cannot_be_begun_leaves_states_where_the_one_before_it_ends(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests go on: it is planned again by itself."""
    params = SamplingParams(max_tokens=30, seed=4, ignore_eos=True)
    want = tiny.engine(tiny.Shape(layers=1), numba_ops(2)).submit(prompt_of(1, 20), params).result()
    engine = tiny.engine(tiny.Shape(layers=1), behind(numba_ops(2)))
    beside = Beside(engine, [Recurrent(3)], monkeypatch)
    launch, calls = Runner.launch, count()
    abort, aborted = Rollback.abort, []
    monkeypatch.setattr(Rollback, "abort", lambda self, plan: (aborted.append(plan.step), abort(self, plan)))

    def faulty(*args: Any, **options: Any) -> Any:
        if next(calls) in (5, 9, 16):
            raise Planted
        return launch(*args, **options)

    monkeypatch.setattr(Runner, "launch", faulty)
    ticket = engine.submit(prompt_of(1, 20), params)
    while not ticket._live.done.is_set():
        engine.step()
        beside.check()
    record = ticket.result()
    assert record.tokens == want.tokens and beside.looked == 30 and next(calls) > 30 and len(aborted) >= 3
    assert not Metrics.of([record]).replays
