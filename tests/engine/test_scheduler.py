"""The scheduler against a toy model: any mix of budgets, pools, drafts, preemption, cancels and failures gives the same tokens.

The toy's next token is a function of all tokens before it, read back through the block tables, so a wrong table, a stale block or a lost
length changes an output.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine import prefix
from power_lab.engine.blocks import BlockPool
from power_lab.engine.plan import UNKNOWN, Span, StepPlan
from power_lab.engine.request import Finish, Request, SamplingParams
from power_lab.engine.scheduler import Limits, Outcome, Scheduler
from power_lab.engine.speculation.transaction import match
from power_lab.errors import QueueFull

VOCAB = 7


def next_token(context: list[int]) -> int:
    return random.Random(repr(context)).randrange(VOCAB)


class Toy:
    """Pages hold token ids; the 'model' writes a row's token to its slot and reads its whole context back through the table."""

    def __init__(self, total: int) -> None:
        self.pages = [[-1] * 64 for _ in range(total)]

    def run(self, plan: StepPlan) -> list[list[int]]:
        draws = []
        for span in plan.spans:
            for offset, token in enumerate(span.tokens):
                at = span.start + offset
                self.pages[span.blocks[at // 64]][at % 64] = token
        for span in plan.spans:
            read = [self.pages[span.blocks[i // 64]][i % 64] for i in range(span.start + span.rows)]
            ends = range(span.start + span.rows - span.sampled, span.start + span.rows)
            draws.append([next_token(read[: end + 1]) for end in ends])
        return draws


def make(total: int, step_tokens: int, max_batch: int, reuse: bool = True, queue: int = 100) -> Scheduler:
    limits = Limits(step_tokens=step_tokens, sampled_rows=max(max_batch, 16), max_batch=max_batch, queue=queue)
    return Scheduler(BlockPool(total), limits, lambda name: prefix.root({"n": name}), reuse=reuse)


def request(number: int, prompt: list[int], emit: int, width: int = 4) -> Request:
    params = SamplingParams(max_tokens=emit, width=width, seed=0)
    return Request(number, len(prompt), params, list(prompt), len(prompt) + emit, frozenset())


def expected(prompt: list[int], emit: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(emit):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def outcomes(scheduler: Scheduler, plan: StepPlan, draws: list[list[int]]) -> list[Outcome]:
    by_id = {r.id: r for r in scheduler.running}
    result = []
    for span, targets in zip(plan.spans, draws, strict=True):
        if not span.sampled:
            result.append(Outcome())
            continue
        left = [by_id[span.request_id].limit - len(by_id[span.request_id].tokens)]

        def terminal(token: int, left: list[int] = left) -> Finish | None:
            left[0] -= 1
            return Finish.LENGTH if left[0] == 0 else None

        result.append(match(span.tokens[span.rows - span.drafts :], targets, terminal))
    return result


def guess(rng: random.Random, r: Request, room: int) -> tuple[int, ...]:
    """Drafts that are right for a while, then wrong."""
    context, drafts = list(r.tokens), []
    for _ in range(rng.randint(0, max(room, 0))):
        drafts.append(next_token(context) if rng.random() < 0.7 else rng.randrange(VOCAB))
        context.append(drafts[-1])
    return tuple(drafts)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    step_tokens=st.integers(1, 200),
    max_batch=st.integers(1, 5),
    reuse=st.booleans(),
    shape=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40), st.booleans()), min_size=1, max_size=6),
    spare=st.integers(0, 4),
)
def test_every_schedule_gives_the_same_tokens(
    seed: int, step_tokens: int, max_batch: int, reuse: bool, shape: list[tuple[int, int, bool]], spare: int
) -> None:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(200)]
    most = max(prefix_len + emit for prefix_len, emit, _ in shape)
    total = 1 + -(-most // 64) + spare  # the largest request just fits: the others get preempted
    scheduler, toy = make(total, step_tokens, max_batch, reuse), Toy(total)
    requests = []
    for number, (length, emit, common) in enumerate(shape):
        prompt = shared[:length] if common else [rng.randrange(VOCAB) for _ in range(length)]
        requests.append(request(number, prompt, emit, rng.randint(1, 12)))
    pending, cancelled = list(requests), set()
    for _ in range(20_000):
        if pending and rng.random() < 0.4:
            scheduler.add(pending.pop(0))
        if rng.random() < 0.02 and not scheduler.idle:
            rng.choice(list(scheduler)).cancelled = True
        cancelled |= {r.id for r in scheduler.expire(0.0)}
        for r in scheduler.running:
            r.drafts = guess(rng, r, scheduler.draft_room(r))
        plan = scheduler.plan()
        if plan is not None:
            assert plan.rows <= step_tokens
            assert sum(span.sampled for span in plan.spans) <= scheduler.limits.sampled_rows
            draws = toy.run(plan)
            if rng.random() < 0.1:
                scheduler.abort(plan)  # a step that raised: nothing moved, and what it wrote is never read
            else:
                scheduler.commit(plan, outcomes(scheduler, plan, draws))
        scheduler.check()
        if scheduler.idle and not pending:
            break
    else:
        raise AssertionError("the schedule never ends")
    assert scheduler.pool.used == 0
    for r, (_, emit, _) in zip(requests, shape, strict=True):
        want = expected(r.tokens[: r.prompt_len], emit)
        assert r.output == (want[: r.emitted] if r.id in cancelled else want)


class Behind:
    """A toy that runs steps in the order of their launch, as late as somebody waits for one; ids below 0 are draws of the step before.

    Spans that resume begin where those of the step before leave off, with drafts that are made here.

    Attributes:
        drafts: of each span of the last step.
    """

    def __init__(self, toy: Toy, rng: random.Random) -> None:
        self.toy, self._rng = toy, rng
        self.last: list[int] = []
        self.drafts: list[tuple[int, ...]] = []
        self._marks: list[tuple[int, int]] = []

    def run(self, plan: StepPlan) -> list[list[int]]:
        replace = msgspec.structs.replace
        spans = [self._known(span) for span in plan.spans]
        self.drafts = [span.tokens[span.rows - span.drafts :] for span in spans]
        draws = self.toy.run(replace(plan, spans=tuple(spans)))
        self.last = [token for targets in draws for token in targets]
        self._marks = []
        for span, drafts, targets in zip(spans, self.drafts, draws, strict=True):
            kept = next((at for at, (a, b) in enumerate(zip(drafts, targets, strict=False)) if a != b), len(drafts))
            self._marks.append((span.start + span.rows - span.drafts + kept, targets[kept]) if targets else (0, 0))
        return draws

    def _known(self, span: Span) -> Span:
        replace = msgspec.structs.replace
        if span.resumes < 0:
            return replace(span, tokens=tuple(t if t >= 0 else self.last[-t - 1] for t in span.tokens))
        start, token = self._marks[span.resumes]
        context = [self.toy.pages[span.blocks[i // 64]][i % 64] for i in range(start)] + [token]
        for _ in range(span.drafts):
            context.append(next_token(context) if self._rng.random() < 0.7 else self._rng.randrange(VOCAB))
        return replace(span, start=start, tokens=tuple(context[start:]))


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    step_tokens=st.integers(1, 200),
    max_batch=st.integers(1, 5),
    reuse=st.booleans(),
    shape=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 70), st.booleans()), min_size=1, max_size=6),
    spare=st.integers(0, 6),
    drafting=st.sampled_from([0.0, 0.0, 0.3]),
    resuming=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_steps_planned_ahead_give_the_same_tokens(
    seed: int,
    step_tokens: int,
    max_batch: int,
    reuse: bool,
    shape: list[tuple[int, int, bool]],
    spare: int,
    drafting: float,
    resuming: float,
) -> None:
    """Requests end at a token of their own while the next step is in flight, are cancelled, preempted, and steps are given up."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(200)]
    most = max(length + emit for length, emit, _ in shape)
    total = 1 + -(-most // 64) + spare
    scheduler, behind = make(total, step_tokens, max_batch, reuse), Behind(Toy(total), rng)
    scheduler.limits = Limits(step_tokens=step_tokens, sampled_rows=64, max_batch=max_batch, queue=100)
    requests, ends = [], {}
    for number, (length, emit, common) in enumerate(shape):
        prompt = shared[:length] if common else [rng.randrange(VOCAB) for _ in range(length)]
        r = request(number, prompt, emit, rng.choice([4, 40]))  # wide windows often end in another block
        if rng.random() < drafting:
            r.params = msgspec.structs.replace(r.params, speculate="ngram")
        requests.append(r)
        said = expected(prompt, emit)
        ends[number] = rng.randrange(1, emit + 1) if rng.random() < 0.5 else emit
        assert len(said) >= ends[number]
    pending, cancelled, flights = list(requests), set(), []
    for _ in range(20_000):
        if pending and rng.random() < 0.4:
            scheduler.add(pending.pop(0))
        if rng.random() < 0.02 and not scheduler.idle:
            rng.choice(list(scheduler)).cancelled = True
        cancelled |= {r.id for r in scheduler.expire(0.0)}
        if rng.random() < 0.05 and scheduler.running:
            scheduler.preempt(rng.choice(scheduler.running))
        if not flights:
            for r in scheduler.running:
                drafts = r.params.speculate != "off"
                r.drafts = guess(rng, r, scheduler.draft_room(r)) if drafts else ()
        resume = len(flights) == 1 and any(span.sampled for span in flights[0].spans) and rng.random() < resuming
        if resume:
            rooms = scheduler.resumed_rooms()
            for r in scheduler.running:
                r.drafts = (UNKNOWN,) * rng.choice([0, 0, rooms.get(r.id, 0)])
        plan = scheduler.plan(resume=resume)
        if plan is not None:
            flights.append(plan)
        if rng.random() < 0.05:
            while flights:
                scheduler.abort(flights.pop())
        elif flights and (len(flights) == 2 or plan is None or rng.random() < 0.3):
            done = flights.pop(0)
            draws = behind.run(done)
            done = scheduler.resolve(done, behind.drafts)
            scheduler.commit(done, ended_by(scheduler, done, draws, ends))
        scheduler.check()
        if scheduler.idle and not pending:
            break
    else:
        raise AssertionError("the schedule never ends")
    while flights:
        scheduler.abort(flights.pop())
    assert scheduler.pool.used == 0
    for r in requests:
        want = expected(r.tokens[: r.prompt_len], ends[r.id])
        assert r.output == (want[: r.emitted] if r.id in cancelled else want)


def ended_by(
    scheduler: Scheduler, plan: StepPlan, draws: list[list[int]], ends: dict[int, int]
) -> list[Outcome | None]:
    """Outcomes where each request stops after so many tokens, which nobody knew when the step behind was planned."""
    by_id = {r.id: r for r in scheduler}
    result: list[Outcome | None] = []
    for span, targets, awaited in zip(plan.spans, draws, scheduler.awaited(plan), strict=True):
        if not awaited:
            result.append(None)
        elif not span.sampled:
            result.append(Outcome())
        else:
            emitted = [by_id[span.request_id].emitted]

            def terminal(token: int, emitted: list[int] = emitted, last: int = ends[span.request_id]) -> Finish | None:
                emitted[0] += 1
                return Finish.STOP if emitted[0] == last else None

            result.append(match(span.tokens[span.rows - span.drafts :], targets, terminal))
    return result


def test_a_step_is_planned_ahead_unless_what_it_says_is_needed_for_it() -> None:
    for change, ahead in (({}, True), ({"speculate": "lookup"}, False), ({"presence_penalty": 0.5}, False)):
        scheduler = make(20, 512, 4)
        r = request(0, [1, 2, 3], 5)
        r.params = msgspec.structs.replace(r.params, **change)
        scheduler.add(r)
        assert scheduler.plan() is not None
        behind = scheduler.plan()
        assert (behind is not None) == ahead
        if behind is not None:
            assert (behind.spans[0].start, behind.spans[0].tokens) == (3, (-1,))
            assert scheduler.plan() is None, "no third step"


def test_a_last_token_is_not_waited_behind() -> None:
    scheduler = make(20, 512, 4)
    scheduler.add(request(0, [1, 2, 3], 1))
    assert scheduler.plan() is not None
    assert scheduler.plan() is None, "the request ends with the token in flight"


def test_second_request_hits_the_prefix_of_the_first() -> None:
    scheduler, toy = make(20, 512, 4), Toy(20)
    prompt = [i % VOCAB for i in range(150)]
    for number in range(2):
        scheduler.add(request(number, prompt, 3))
        while not scheduler.idle:
            plan = scheduler.plan()
            assert plan is not None
            if number == 1 and plan.spans[0].rows > 1:
                assert plan.spans[0].start == 128, "two full blocks were cached"
            scheduler.commit(plan, outcomes(scheduler, plan, toy.run(plan)))
            scheduler.check()


def test_namespaces_do_not_share() -> None:
    scheduler, toy = make(20, 512, 4), Toy(20)
    for number, name in enumerate(("a", "b")):
        r = request(number, [1] * 150, 2)
        r.namespace = name
        scheduler.add(r)
        while not scheduler.idle:
            plan = scheduler.plan()
            assert plan is not None
            scheduler.commit(plan, outcomes(scheduler, plan, toy.run(plan)))
        assert r.cached == 0


def test_prompt_chunks_end_on_block_boundaries() -> None:
    scheduler, toy = make(20, 100, 4), Toy(20)
    scheduler.add(request(0, [1] * 200, 1))
    ends = []
    while not scheduler.idle:
        plan = scheduler.plan()
        assert plan is not None
        ends.append(plan.spans[0].start + plan.spans[0].rows)
        scheduler.commit(plan, outcomes(scheduler, plan, toy.run(plan)))
    assert ends == [64, 128, 200]


def test_full_queue_is_refused_and_changes_nothing() -> None:
    scheduler = make(4, 10, 1, queue=1)
    scheduler.add(request(0, [1], 1))
    with pytest.raises(QueueFull, match="queue_limit"):
        scheduler.add(request(1, [1], 1))
    assert [r.id for r in scheduler] == [0]


def test_cancel_wins_over_deadline() -> None:
    scheduler = make(4, 10, 1)
    late, both, gone = (request(number, [1], 1) for number in range(3))
    late.deadline = both.deadline = gone.deadline = 5.0
    both.cancelled = gone.cancelled = True
    scheduler.add(late)
    scheduler.add(gone)
    assert scheduler.expire(4.9) == [gone]
    scheduler.add(both)
    assert scheduler.expire(5.0) == [late, both]
    assert (late.finish, both.finish, gone.finish) == (Finish.DEADLINE, Finish.CANCELLED, Finish.CANCELLED)


def decoding(scheduler: Scheduler, toy: Toy, prompts: list[list[int]], width: int) -> list[Request]:
    """Running requests with one uncomputed token each and as many drafts, all wrong, as they have room for."""
    requests = [request(number, prompt, 200, width) for number, prompt in enumerate(prompts)]
    for r in requests:
        scheduler.add(r)
    plan = scheduler.plan()
    assert plan is not None and len(plan.spans) == len(prompts)
    scheduler.commit(plan, outcomes(scheduler, plan, toy.run(plan)))
    for r in requests:
        r.drafts = (VOCAB,) * scheduler.draft_room(r)
    return requests


def test_admission_beside_drafts_keeps_the_bound_on_logit_rows() -> None:
    """The runner's workspace holds `sampled_rows` logit rows: one more would be written behind its end."""
    scheduler, toy = make(100, 512, 16), Toy(100)
    assert scheduler.limits.sampled_rows == 16
    decoding(scheduler, toy, [[number] * 3 for number in range(4)], 64)
    for number in range(4, 8):
        scheduler.add(request(number, [number] * 3, 5))
    plan = scheduler.plan()
    assert plan is not None
    assert sum(span.sampled for span in plan.spans) == 16
    assert len(scheduler.waiting) == 3, "one logit row is kept for the first that waits"


def test_drafts_do_not_keep_a_waiting_request_out() -> None:
    scheduler, toy = make(100, 8, 16), Toy(100)
    decoding(scheduler, toy, [[1] * 3], 64)
    scheduler.add(request(9, [2] * 3, 5))
    plan = scheduler.plan()
    assert plan is not None
    assert [(span.request_id, span.rows) for span in plan.spans] == [(0, 7), (9, 1)]


def test_drafts_do_not_take_the_blocks_that_a_neighbour_needs() -> None:
    scheduler, toy = make(1 + 4, 512, 4), Toy(1 + 4)
    scheduler.limits = Limits(step_tokens=512, sampled_rows=256, max_batch=4, queue=4)
    decoding(scheduler, toy, [[1] * 64, [2] * 64], 64)  # both need a second block; 64 drafts of the first want a third
    plan = scheduler.plan()
    assert plan is not None and plan.preempted == ()
    assert [(span.request_id, span.rows, len(span.blocks)) for span in plan.spans] == [(0, 64, 2), (1, 64, 2)]


def test_a_stale_plan_is_refused_whole() -> None:
    scheduler, toy = make(8, 100, 2), Toy(8)
    for number in range(2):
        scheduler.add(request(number, [number] * 3, 5))
    plan = scheduler.plan()
    assert plan is not None
    results = outcomes(scheduler, plan, toy.run(plan))
    scheduler.commit(plan, results)
    before = [(r.tokens[:], r.computed, r.blocks[:]) for r in scheduler]
    with pytest.raises(AssertionError, match="whole and in order"):
        scheduler.commit(plan, results)
    assert [(r.tokens, r.computed, r.blocks) for r in scheduler] == before


def test_blocks_for_drafts_that_were_not_kept_are_in_no_later_table() -> None:
    """A step that goes on from a verified window has blocks for all of it; the step behind that one must not count on them."""
    scheduler, toy = make(4, 64, 1), Toy(4)
    decoding(scheduler, toy, [[1] * 60], 40)
    behind = Behind(toy, random.Random(0))
    (r,) = scheduler.running
    r.drafts = tuple((next_token(r.tokens) + 1) % VOCAB for _ in range(4))  # wrong from the first on
    window = scheduler.plan()
    assert window is not None and len(window.spans[0].blocks) == 2
    r.drafts = ()
    resumed = scheduler.plan(resume=True)
    assert resumed is not None and resumed.spans[0].resumes == 0
    flights = [window, resumed]
    for _ in range(4):
        done = flights.pop(0)
        draws = behind.run(done)
        done = scheduler.resolve(done, behind.drafts)
        scheduler.commit(done, outcomes(scheduler, done, draws))
        scheduler.check()
        plan = scheduler.plan()
        assert plan is not None
        flights.append(plan)
    assert r.output == expected(r.tokens[: r.prompt_len], 40)[: r.emitted]
