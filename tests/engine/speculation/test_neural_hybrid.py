"""A drafter that copies where the text repeats itself and asks a network elsewhere, on the device and on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters import COPY, Draft, DraftAsk
from power_lab.engine.speculation.drafters.copied import FADE, FAST, LEAST, NETWORK, SEEN, Copied
from power_lab.engine.speculation.drafters.neural.hybrid import HybridDrafter
from power_lab.engine.speculation.metrics import Metrics
from power_lab.kernels import reference
from power_lab.kernels.ops import Ops
from tests import drafters, tiny
from tests.lagged import Lagged

LOOP = [5, 6, 7, 8] * 8


class Network:
    """Says 1, 2, 3 ... behind everything."""

    name, most, places = "network", 15, 4

    def __init__(self) -> None:
        self.asked: list[int] = []

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None: ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        self.asked += [ask.request_id for ask in asks]
        return [Draft(tuple(range(1, ask.width + 1)), (0.5,) * ask.width) for ask in asks]

    def resume(self, blocks: Any, marks: Any) -> Any: ...

    def light(self, request_id: int) -> bool:
        return False

    def commit(self, request_id: int, emitted: Sequence[int]) -> None: ...

    def end(self, request_id: int) -> None: ...


def test_copies_where_there_are_some_and_asks_the_network_elsewhere() -> None:
    network = Network()
    asks = [DraftAsk(0, LOOP, 10), DraftAsk(1, [9, 8, 7, 6], 10), DraftAsk(2, [4, 1, 2, 4, 1], 3)]
    first, second, third = HybridDrafter(network, None).propose(asks)
    assert first.tokens == (5, 6, 7, 8, 5, 6, 7, 8, 5, 6) and not first.confidence
    assert second.tokens == tuple(range(1, NETWORK + 1)) and len(second.confidence) == NETWORK
    assert third.tokens == (2, 4, 1) and network.asked == [1]
    assert [draft.drafter for draft in (first, second, third)] == [COPY, "network", COPY]


def test_each_round_says_which_part_drafted_it(numba_ops: Callable[[int], Ops]) -> None:
    """Of drafts that the host makes; where the device chooses, only rounds without the network are known to be copies."""
    options: dict[str, Any] = {"speculate": "hybrid", "controller": "fixed", "width": 7, "ignore_eos": True, "seed": 1}
    prompt = [65 + t % 4 for t in range(50)]
    kinds = {}
    for where, ops in (("host", numba_ops(1)), ("device", Lagged(numba_ops(1)))):
        engine = drafters.engine(drafters.KINDS["mtp"](tiny.Shape(scale=1.2), ops), max_batch=4)
        record = engine.generate(prompt, SamplingParams(max_tokens=150, **options))
        known = list(record.prompt_tokens)
        for entry in record.rounds:
            _, length = reference.recall(known, 7)
            part = "" if not entry.drafted else COPY if length >= LEAST else "mtp"
            # Without the network the search drafts even where it finds nothing.
            assert entry.drafter == part or (where == "device" and part and entry.drafter in (COPY, "hybrid"))
            known += entry.emitted
        kinds[where] = {entry.drafter for entry in record.rounds if entry.drafted}
    assert kinds["host"] == {COPY, "mtp"} and {COPY, "hybrid"} <= kinds["device"]


@pytest.mark.parametrize("name", ["mtp", "lookup", "off"])
def test_a_drafter_of_one_part_drafts_under_its_name(name: str, numba_ops: Callable[[int], Ops]) -> None:
    for ops in (numba_ops(1), Lagged(numba_ops(1))):
        engine = drafters.engine(drafters.KINDS["mtp"](tiny.Shape(scale=1.2), ops), max_batch=4)
        options: dict[str, Any] = {"controller": "fixed", "width": 3, "ignore_eos": True, "logit_bias": {65: 60.0}}
        params = SamplingParams(max_tokens=40, speculate=name, seed=1, **options)
        rounds = engine.generate([65 + t % 4 for t in range(50)], params).rounds
        assert all(entry.drafter == (name if entry.drafted else "") for entry in rounds)
        assert any(entry.drafted for entry in rounds) == (name != "off")


def test_what_copying_brings_is_learnt_from_every_round() -> None:
    fast, slow = Copied(LOOP), Copied(LOOP)
    for _ in range(4):
        fast.commit([5, 6, 7, 8] * 2)
        slow.commit([9])
    assert fast.mean >= FAST > slow.mean
    fast.commit([1, 2, 3])
    assert list(fast.tokens) == LOOP + [5, 6, 7, 8] * 8 + [1, 2, 3]
    for _ in range(8):
        fast.commit([3])
    assert fast.mean < FAST


def _copies(known: list[int], emitted: list[int]) -> int:
    """How many of the emitted tokens but the last follow what followed the last two before, token by token."""
    places = [at for at in range(len(known) - 2) if known[at : at + 2] == known[-2:]]
    said, at, count = known + emitted, places[-1] + 2 if places else 0, 0
    while places and count < len(emitted) - 1 and said[at + count] == emitted[count]:
        count += 1
    return count


@given(
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=40),
)
def test_copies_are_counted_behind_the_last_pair(prompt: list[int], rounds: list[list[int]]) -> None:
    copied, known, mean = Copied(prompt), prompt, 0.0
    for emitted in rounds:
        mean = FADE * mean + (1 - FADE) * min(_copies(known, emitted) + 1, SEEN)
        copied.commit(emitted)
        known = known + emitted
        assert copied.mean == pytest.approx(mean) and copied.tokens.tolist() == known


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
@pytest.mark.parametrize("width", [3, 7, 15, 31])
def test_drafts_of_the_device_are_what_the_tokens_say(kind: str, width: int, numba_ops: Callable[[int], Ops]) -> None:
    """Of every round behind one that is known: the copy, wherever there is one, and behind the network's drafts, too."""
    engine = drafters.engine(drafters.KINDS[kind](tiny.Shape(scale=1.2), Lagged(numba_ops(1))), max_batch=4)
    options: dict[str, Any] = {"speculate": "hybrid", "controller": "fixed", "width": width, "ignore_eos": True}
    tickets = [
        engine.submit([65 + t % (3 + i) for t in range(50)], SamplingParams(max_tokens=150, seed=i, **options))
        for i in range(3)
    ]
    copied = guessed = 0
    for record in (ticket.result() for ticket in tickets):
        known = list(record.prompt_tokens)
        for entry in record.rounds:
            want, length = reference.recall(known, width) if entry.drafted else ([], 0)
            skip = 0 if length >= LEAST or not entry.drafted else min(NETWORK, len(entry.drafted))
            assert list(entry.drafted[skip:]) == want[skip : len(entry.drafted)], (len(known), length)
            copied, guessed = copied + bool(length >= LEAST), guessed + bool(skip)
            known += entry.emitted
    assert copied > 20 and guessed > 5


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("controller", ["fixed", "cost"])
def test_coverage_is_that_of_the_rounds_in_which_the_network_drafted(
    late: bool, controller: Any, numba_ops: Callable[[int], Ops]
) -> None:
    """Not where drafts were copied, on the host or on the device, nor where nobody was asked for any."""
    ops = Lagged(numba_ops(1)) if late else numba_ops(1)
    engine = drafters.engine(drafters.mtp_drafter(tiny.Shape(scale=1.2), ops, said=120), max_batch=4)  # type: ignore[arg-type]
    subset = engine._companion.drafter("mtp").subset  # type: ignore[union-attr]
    options: dict[str, Any] = {"speculate": "hybrid", "controller": controller, "width": 7, "ignore_eos": True}
    prompts = [[65 + t % (3 + i) for t in range(50)] for i in range(3)]
    tickets = [engine.submit(p, SamplingParams(max_tokens=150, seed=i, **options)) for i, p in enumerate(prompts)]
    records = [ticket.result() for ticket in tickets]
    guessed = copied = 0
    for record in records:
        known, own = list(record.prompt_tokens), Copied(record.prompt_tokens)
        means = [0.0, 0.0]  # as rounds on the device see them: before the round ahead is known
        for entry in record.rounds:
            length = reference.recall(known, 1)[1]
            inside = sum(token in subset for token in entry.emitted)
            light = late and min(means) >= FAST
            if length >= LEAST or light:
                assert entry.reachable == -1
            elif not entry.drafted:  # the network may have been asked for drafts that were not worth it
                assert entry.reachable in (-1, inside)
            elif max(means) < FAST:
                assert entry.reachable == inside
                guessed += 1
            copied += bool(entry.drafted) and length >= LEAST
            own.commit(entry.emitted)
            means = [means[1], own.mean]
            known += entry.emitted
    assert guessed > 5 and copied > 5
    metrics = Metrics.of(records)
    counted = [entry for record in records for entry in record.rounds if entry.reachable >= 0]
    assert metrics.coverage == sum(e.reachable for e in counted) / sum(len(e.emitted) for e in counted)
    assert 0 < metrics.coverage < 1


def test_more_requests_than_a_launch_takes_decode_plainly(numba_ops: Callable[[int], Ops]) -> None:
    engine = drafters.engine(
        drafters.KINDS["mtp"](tiny.Shape(), Lagged(numba_ops(1))), max_batch=40, kv_tokens=8192, step_tokens=512
    )
    options: dict[str, Any] = {"speculate": "hybrid", "controller": "fixed", "width": 3, "ignore_eos": True}
    prompts = [[65 + (t * (i + 1)) % 7 for t in range(9)] for i in range(40)]
    tickets = [engine.submit(p, SamplingParams(max_tokens=20, seed=0, **options)) for p in prompts]
    records = [ticket.result() for ticket in tickets]
    plain = [engine.submit(p, SamplingParams(max_tokens=20, seed=0, ignore_eos=True)).result() for p in prompts]
    assert [r.tokens for r in records] == [r.tokens for r in plain]
    notes = {entry.note for record in records for entry in record.rounds}
    assert any("in one launch at most" in note for note in notes), notes
