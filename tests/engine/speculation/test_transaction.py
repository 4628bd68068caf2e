"""Sample-and-match: what is emitted is always the target's own run, cut at the first end."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.request import Finish, Request, SamplingParams
from power_lab.engine.speculation.drafters import Draft, DraftAsk
from power_lab.engine.speculation.transaction import Proposer, match

TOKENS = st.integers(0, 3)


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
    request = Request(7, 1, SamplingParams(speculate="ngram"), [1], 10, frozenset())
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

    request = Request(7, 1, SamplingParams(speculate="ngram"), [1], 10, frozenset())
    proposer = Proposer(lambda _: Wild(), lambda: 0.0, 100)
    proposer.begin(request)
    assert "outside the vocabulary of 100" in proposer.propose({7: 4}, [request])[7].note
    assert request.drafts == ()
