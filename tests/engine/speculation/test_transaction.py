"""Sample-and-match: what is emitted is always the target's own run, cut at the first end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.request import Finish, Request, SamplingParams
from power_lab.engine.speculation.drafters import Draft, DraftAsk
from power_lab.engine.speculation.transaction import Proposal, Proposer, match
from power_lab.engine.speculation.width import Choice, Costs, WidthAsk, make
from power_lab.engine.speculation.width.costs import RoundCosts

TOKENS = st.integers(0, 3)
FIXED = SamplingParams(speculate="ngram", controller="fixed")


@given(st.lists(TOKENS, max_size=8), st.data())
def test_emitted_is_a_prefix_of_the_target(drafts: list[int], data: st.DataObject) -> None:
    targets = data.draw(st.lists(TOKENS, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    stop = data.draw(st.sets(TOKENS, max_size=2))
    seen: list[int] = []

    def terminal(token: int) -> Finish | None:
        seen.append(token)
        return Finish.STOP if token in stop else None

    outcome = match(drafts, targets, terminal)
    assert list(outcome.emitted) == targets[: len(outcome.emitted)] == seen
    common = next((i for i, (d, t) in enumerate(zip(drafts, targets, strict=False)) if d != t), len(drafts))
    first_stop = next((i for i, t in enumerate(targets) if t in stop), len(targets))
    assert len(outcome.emitted) == min(common + 1, first_stop + 1)
    assert outcome.accepted == min(common, len(outcome.emitted))
    assert (outcome.finish is None) == (first_stop > common)


class Broken:
    name = "broken"

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None: ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        raise RuntimeError("boom")

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        raise RuntimeError("commit boom")

    def end(self, request_id: int) -> None: ...


def test_a_drafter_that_raises_costs_drafts_and_says_so() -> None:
    request = Request(7, 1, FIXED, [1], 10, frozenset())
    proposer = Proposer(lambda _: Broken(), lambda: 0.0, 100)
    proposer.begin(request)
    assert proposer.propose({7: 4}, [request])[7].note == "broken failed: RuntimeError: boom"
    assert request.drafts == ()
    proposer.commit(request, [1])
    assert proposer.propose({7: 4}, [request])[7].note == "broken failed: RuntimeError: commit boom"


def test_drafts_outside_the_vocabulary_are_dropped_and_said() -> None:
    class Wild(Broken):
        def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
            return [Draft((1, 100))]

        def commit(self, request_id: int, emitted: Sequence[int]) -> None: ...

    request = Request(7, 1, FIXED, [1], 10, frozenset())
    proposer = Proposer(lambda _: Wild(), lambda: 0.0, 100)
    proposer.begin(request)
    assert "outside the vocabulary of 100" in proposer.propose({7: 4}, [request])[7].note
    assert request.drafts == ()


class Scripted(Broken):
    """Proposes 5, 6, 7, ... with falling confidence."""

    name = "scripted"

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [Draft((5, 6, 7, 8)[: ask.width], (0.9, 0.8, 0.7, 0.6)[: ask.width]) for ask in asks]

    def commit(self, request_id: int, emitted: Sequence[int]) -> None: ...


class Cutting:
    """Asks for 3 drafts and keeps 2; writes down what it was told."""

    name = "cutting"

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def begin(self, request_id: int, drafter: str) -> None:
        self.told.append(("begin", request_id, drafter))

    def ask(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        self.told.append(("ask", list(asks), other_rows))
        return [Choice(3, "three") for _ in asks]

    def keep(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
        self.told.append(("keep", list(asks), other_rows))
        return [Choice(2, "two") for _ in asks]

    def observe(self, request_id: int, drafted: int, accepted: int, seconds: float) -> None:
        self.told.append(("observe", request_id, drafted, accepted, seconds))

    def end(self, request_id: int) -> None:
        self.told.append(("end", request_id))


def request_of(request_id: int, params: SamplingParams, known: int = 1) -> Request:
    return Request(request_id, known, params, list(range(known)), 40, frozenset())


def test_a_controller_bounds_what_is_asked_for_and_what_is_kept() -> None:
    controller, calls = Cutting(), []
    proposer = Proposer(
        lambda _: Scripted(),
        lambda: 0.0,
        100,
        step_rows=20,
        on_draft=lambda *call: calls.append(call),
        make_controller=lambda _: controller,
    )
    first, second, long = request_of(1, FIXED), request_of(2, FIXED), request_of(3, SamplingParams(), known=50)
    for request in (first, second, long):
        proposer.begin(request)
    proposals = proposer.propose({1: 8, 2: 4, 3: 0}, [first, second, long])
    assert proposals == {
        1: Proposal("", 0.0, 2, "two", drafter="scripted"),
        2: Proposal("", 0.0, 2, "two", drafter="scripted"),
    }
    assert (first.drafts, second.drafts, long.drafts) == ((5, 6), (5, 6), ())
    assert calls == [("scripted", 2, 3, 0.0)]
    proposer.observe(first, 2, 1, 0.5)
    proposer.end(first)
    sure = (0.9, 0.8, 0.7)
    assert controller.told == [
        ("begin", 1, "ngram"),
        ("begin", 2, "ngram"),
        ("ask", [WidthAsk(1, 8), WidthAsk(2, 4)], 18),  # the prompt of 50 fills what is left of the step
        ("keep", [WidthAsk(1, 3, sure), WidthAsk(2, 3, sure)], 18),
        ("observe", 1, 2, 1, 0.5),
        ("end", 1),
    ]


def test_each_request_of_a_batch_has_its_own_controller() -> None:
    """The later one counts the drafts of the one before it as rows of others."""
    seen: dict[str, Cutting] = {}

    def make_controller(name: str) -> Cutting:
        seen[name] = Cutting()
        return seen[name]

    proposer = Proposer(lambda _: Scripted(), lambda: 0.0, 100, make_controller=make_controller)
    params = [SamplingParams(speculate="ngram", controller=name) for name in ("fixed", "adaptive", "fixed")]
    requests = [request_of(at, each) for at, each in enumerate(params)]
    for request in requests:
        proposer.begin(request)
    proposer.propose({0: 8, 1: 8, 2: 8}, requests)
    assert [told[0] for told in seen["fixed"].told] == ["begin", "begin", "ask", "keep"]
    assert seen["adaptive"].told[1:] == [("ask", [WidthAsk(1, 8)], 6), ("keep", [WidthAsk(1, 3, (0.9, 0.8, 0.7))], 6)]


@pytest.mark.parametrize("method", ["begin", "ask", "keep", "observe", "end"])
def test_a_controller_that_raises_costs_drafts_and_says_so(method: str) -> None:
    controller = Cutting()

    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    setattr(controller, method, fail)
    proposer = Proposer(lambda _: Scripted(), lambda: 0.0, 100, make_controller=lambda _: controller)
    request = request_of(1, FIXED)
    proposer.begin(request)
    proposal = proposer.propose({1: 8}, [request])[1]
    proposer.observe(request, 2, 1, 0.5)
    after = proposer.propose({1: 8}, [request])[1]
    proposer.end(request)
    broken = {"begin": (True, True), "ask": (True, True), "keep": (True, True), "observe": (False, True)}
    want = broken.get(method, (False, False))
    assert ("failed: RuntimeError: boom" in proposal.note, "failed: RuntimeError: boom" in after.note) == want
    assert request.drafts == (() if want[1] else (5, 6))


@pytest.mark.parametrize("drafts", [-1, 9])
def test_a_choice_out_of_bounds_is_no_choice(drafts: int) -> None:
    controller = Cutting()
    controller.ask = lambda asks, *_: [Choice(drafts, "") for _ in asks]
    proposer = Proposer(lambda _: Scripted(), lambda: 0.0, 100, make_controller=lambda _: controller)
    request = request_of(1, FIXED)
    proposer.begin(request)
    assert f"{drafts} drafts of at most 8" in proposer.propose({1: 8}, [request])[1].note


@pytest.mark.parametrize("confidence", [(0.5,), (0.5, float("nan")), (0.5, 1.5)])
def test_confidence_that_is_none_costs_the_drafts(confidence: tuple[float, ...]) -> None:
    class Sure(Scripted):
        def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
            return [Draft((1, 2), confidence)]

    request = request_of(1, FIXED)
    proposer = Proposer(lambda _: Sure(), lambda: 0.0, 100)
    proposer.begin(request)
    assert "scripted failed: ValueError" in proposer.propose({1: 8}, [request])[1].note


def test_every_controller_is_made_by_its_name() -> None:
    assert [make(name).name for name in ("cost", "adaptive", "governor", "fixed")] == [
        "cost",
        "adaptive",
        "governor",
        "fixed",
    ]


class OnDevice(Scripted):
    """Whose drafts are made on the device; without a network for even requests."""

    most, places = 15, 4

    def resume(self, blocks: object, marks: object) -> object: ...

    def light(self, request_id: int) -> bool:
        return request_id % 2 == 0


@pytest.mark.parametrize(("ids", "light"), [((2,), True), ((1,), False), ((2, 4), True), ((2, 3), False)])
def test_a_round_is_weighed_by_what_such_rounds_cost(ids: tuple[int, ...], light: bool) -> None:
    seen: list[Costs] = []

    class Watched:
        name = "cost"

        def begin(self, request_id: int, drafter: str) -> None: ...

        def ask_ahead(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
            seen.append(costs)
            return [Choice(ask.most, "") for ask in asks]

    rounds = RoundCosts()
    proposer = Proposer(
        lambda _: OnDevice(),  # type: ignore[arg-type,return-value]
        lambda: 0.0,
        100,
        rounds=rounds,
        make_controller=lambda _: Watched(),  # type: ignore[arg-type,return-value]
    )
    requests = [Request(n, 1, SamplingParams(speculate="hybrid", width=15), [1], 40, frozenset()) for n in ids]
    for request in requests:
        proposer.begin(request)
    made = proposer.resume(dict.fromkeys(ids, 20), requests)
    assert made is not None and all(len(request.drafts) == 15 for request in requests)
    assert seen == [rounds.light if light else rounds.heavy]


# --- gates ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "kept", "why"),
    [
        (0.0, 3, "two"),
        (0.7, 3, "two"),
        (0.75, 2, "two; gate 0.75: draft 3 of 3 has confidence 0.70"),
        (0.85, 1, "one; gate 0.85: draft 2 of 3 has confidence 0.80"),
        (1.0, 0, "three; gate 1: draft 1 of 3 has confidence 0.90"),
    ],
)
def test_a_gate_ends_a_draft_before_the_controller_sees_it(gate: float, kept: int, why: str) -> None:
    class Counting(Cutting):
        def keep(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
            super().keep(asks, other_rows, costs)
            return [Choice(2, "two") if ask.most > 1 else Choice(1, "one") for ask in asks]

    controller = Counting()
    proposer = Proposer(lambda _: Scripted(), lambda: 0.0, 100, make_controller=lambda _: controller)
    one = request_of(1, SamplingParams(speculate="ngram", gate=gate))
    proposer.begin(one)
    proposal = proposer.propose({1: 8}, [one])[1]
    assert one.drafts == (5, 6, 7)[: min(kept, 2)] and proposal.why == why
    assert proposal.told(one.drafts) == ("" if kept else "gate 1: draft 1 of 3 has confidence 0.90")
    seen = [told[1] for told in controller.told if told[0] == "keep"]
    assert seen == ([[WidthAsk(1, kept, (0.9, 0.8, 0.7)[:kept])]] if kept else [])


def test_a_gate_is_each_request_s_own_and_passes_what_has_no_confidence() -> None:
    class Mixed(Scripted):
        """Knows how sure it is of even requests alone."""

        def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
            return [Draft((5, 6), (0.9, 0.2) if ask.request_id % 2 == 0 else ()) for ask in asks]

    proposer = Proposer(lambda _: Mixed(), lambda: 0.0, 100)
    gates = {1: 0.5, 2: 0.5, 4: 0.0}
    requests = [
        request_of(n, SamplingParams(speculate="ngram", controller="fixed", gate=gate)) for n, gate in gates.items()
    ]
    for request in requests:
        proposer.begin(request)
    proposals = proposer.propose(dict.fromkeys(gates, 8), requests)
    assert [request.drafts for request in requests] == [(5, 6), (5,), (5, 6)]
    assert [proposals[n].why for n in gates] == [
        "2: fixed",
        "1: fixed; gate 0.5: draft 2 of 2 has confidence 0.20",
        "2: fixed",
    ]


def test_drafts_behind_a_gate_are_made_on_the_host() -> None:
    """How sure a drafter is, a device that goes on by itself does not look at."""
    asked = {("hybrid", 0.0): True, ("hybrid", 0.1): False, ("off", 0.1): True}
    for (drafter, gate), resumable in asked.items():
        params = SamplingParams(speculate=drafter, gate=gate)  # type: ignore[arg-type]
        assert request_of(1, params).resumable == resumable
