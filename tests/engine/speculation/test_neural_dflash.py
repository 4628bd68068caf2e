"""DFlash and DSpark in the engine: drafts are the plain modules', whatever the engine does around them, and the target stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters import DraftAsk
from power_lab.engine.trace import RunRecord
from power_lab.kernels.ops import Ops
from tests import drafters, tiny
from tests.engine.speculation.plain import Plain, check
from tests.engine.test_exactness import Recorder, prompt_of

TARGET = tiny.Shape()
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 20, "qk_norm": True},
    "few tokens": {"said": 90, "taps": [2]},
    "markov": {"markov_rank": 8},
    "markov, few tokens": {"markov_rank": 8, "said": 90, "qk_norm": True},
    "markov, bidirectional": {"markov_rank": 8, "causal": False, "block_size": 5},
    "from anchor": {"from_anchor": True},
    "from anchor, bidirectional": {"from_anchor": True, "causal": False, "block_size": 6},
    "from anchor, markov": {"from_anchor": True, "markov_rank": 8, "said": 90, "block_size": 7},
    "from anchor, filtered": {"from_anchor": True, **drafters.FILTERS},
    "filtered": drafters.FILTERS,
    "filtered, few tokens": {**drafters.FILTERS, "said": 90, "qk_norm": True, "conv_taps": 3},
    "filtered, bidirectional": {**drafters.FILTERS, "causal": False, "selector_top_k": 16},
}

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.1, "top_k": 30, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 3, "min_p": 0.05},
]


class Case:
    """A tiny model with a drafter, and the drafter's plain module."""

    def __init__(self, name: str, ops: Ops, target: tiny.Shape = TARGET) -> None:
        changes = dict(CASES[name])
        said = changes.pop("said", 0)
        self.config = drafters.BLOCK | changes
        self.loaded = drafters.block_drafter(target, ops, said=said, **changes)
        filtered, markov = "conv_taps" in self.config, self.config.get("markov_rank")
        self.name = "dflash2" if filtered else "dspark" if markov else "dflash"
        tensors = drafters.dflash(target, self.config, said=said)
        self.plain = Plain(target, self.config, tensors, self.name)

    def params(self, **options: Any) -> SamplingParams:
        given = {"max_tokens": 24, "width": 7, "controller": "fixed", "ignore_eos": True, "seed": 3, **options}
        return SamplingParams(speculate=self.name, **given)  # type: ignore[arg-type]


def said_plainly(ops: Ops, record: RunRecord, **sampling: Any) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=len(record.tokens), ignore_eos=True, seed=3, **sampling)
    return tiny.engine(TARGET, ops).submit(list(record.prompt_tokens), params).result().tokens


# --- what it drafts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_drafts_are_the_plain_modules_across_a_pages_border(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], name: str, late: bool
) -> None:
    case = Case(name, behind(numba_ops(2)) if late else numba_ops(2))
    lab = drafters.engine(case.loaded)
    record = lab.submit(prompt_of(1, 52), params := case.params()).result()
    assert check(record, case.plain, params) >= 15
    assert record.tokens == said_plainly(numba_ops(2), record)
    lab.check()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["causal", "markov, few tokens", "from anchor", "filtered"])
@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_a_sampled_request_is_drafted_for_with_the_targets_noise(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], name: str, sampling: dict[str, Any], late: bool
) -> None:
    case = Case(name, behind(numba_ops(2)) if late else numba_ops(2))
    record = drafters.engine(case.loaded).submit(prompt_of(2, 40), params := case.params(**sampling)).result()
    assert check(record, case.plain, params) >= 12
    assert record.tokens == said_plainly(numba_ops(2), record, **sampling)


@pytest.mark.parametrize("name", ["causal", "bidirectional", "markov", "from anchor"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129])
def test_every_place_in_a_page(numba_ops: Callable[[int], Ops], name: str, length: int) -> None:
    case = Case(name, numba_ops(2))
    record = drafters.engine(case.loaded).submit(prompt_of(3, length), params := case.params(max_tokens=5)).result()
    assert check(record, case.plain, params) >= 1


@pytest.mark.parametrize("name", ["causal", "bidirectional"])
def test_a_block_may_reach_past_the_context(numba_ops: Callable[[int], Ops], name: str) -> None:
    case = Case(name, numba_ops(2))
    lab = drafters.engine(case.loaded, context=128, kv_tokens=128)
    record = lab.submit(prompt_of(4, 118), params := case.params(max_tokens=10)).result()
    assert check(record, case.plain, params) >= 5 and len(record.tokens) == 10


@pytest.mark.parametrize("name", CASES)
def test_a_cached_prefix_and_chunks_of_a_prompt_serve_it_as_they_serve_the_target(
    numba_ops: Callable[[int], Ops], name: str
) -> None:
    case = Case(name, numba_ops(2))
    lab = drafters.engine(case.loaded, step_tokens=40)
    shared = prompt_of(5, 140)
    params = case.params(max_tokens=8)
    first = lab.submit(shared, params).result()
    second = lab.submit([*shared, 7, 9], params).result()
    assert second.cached == 128
    third = lab.submit([*second.prompt_tokens, *second.tokens, 3], params).result()
    assert third.cached >= 128
    for record in (first, second, third):
        assert check(record, case.plain, params) >= 4


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_requests_of_different_widths_in_one_batch(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], name: str, late: bool
) -> None:
    case = Case(name, behind(numba_ops(2)) if late else numba_ops(2))
    lab = drafters.engine(case.loaded, step_tokens=96)
    asked = [
        (prompt_of(10 + i, 20 + 25 * i), case.params(max_tokens=12 + i, width=width, temperature=temperature, seed=i))
        for i, (width, temperature) in enumerate([(2, 0.0), (7, 0.7), (1, 0.0), (4, 0.0)])
    ]
    tickets = [lab.submit(prompt, params) for prompt, params in asked]
    for ticket, (_, params) in zip(tickets, asked, strict=True):
        assert check(ticket.result(), case.plain, params) >= 6
    lab.check()


@pytest.mark.parametrize("name", ["causal", "markov"])
def test_preempted_requests_are_drafted_for_as_before(numba_ops: Callable[[int], Ops], name: str) -> None:
    case = Case(name, numba_ops(2))
    lab = drafters.engine(case.loaded, context=256, kv_tokens=256, step_tokens=64, prefix_cache=False)
    params = case.params(max_tokens=80)
    tickets = [lab.submit(prompt_of(20 + i, 50 + i), params) for i in range(3)]
    records = [ticket.result() for ticket in tickets]
    assert sum(record.preemptions for record in records), "nobody was preempted"
    for record in records:
        assert check(record, case.plain, params, every=4) >= 10
    lab.check()


def test_more_requests_than_one_launch_takes(numba_ops: Callable[[int], Ops], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("power_lab.engine.speculation.drafters.neural.steps.PLACES", 2)
    case = Case("markov", numba_ops(2))
    lab = drafters.engine(case.loaded)
    params = [case.params(max_tokens=10, width=1 + i) for i in range(5)]
    tickets = [lab.submit(prompt_of(30 + i, 30), one) for i, one in enumerate(params)]
    for ticket, one in zip(tickets, params, strict=True):
        assert check(ticket.result(), case.plain, one) >= 5


def test_quantised_weights_draft_as_their_values_do(numba_ops: Callable[[int], Ops]) -> None:
    target = tiny.Shape.wide("Q4_1", layers=2)
    sizes = {"head_dim": 64, "kv_heads": 4, "ffn": 256, "markov_rank": 32}
    config = drafters.BLOCK | sizes
    tensors = drafters.dflash(target, config, said=100)
    types = {name: "Q8_0" for name, value in tensors.items() if value.ndim == 2}
    loaded = drafters.block_drafter(target, numba_ops(2), said=100, types=types, **sizes)
    rounded = {name: drafters.rounded(value, types.get(name, "")) for name, value in tensors.items()}
    plain = Plain(target, config, rounded, "dspark")
    params = SamplingParams(max_tokens=16, width=5, controller="fixed", ignore_eos=True, speculate="dspark", seed=0)
    assert check(drafters.engine(loaded).submit(prompt_of(6, 70), params).result(), plain, params) >= 8


def as_sure(case: Case, length: int) -> None:
    """A prompt's first draft and how sure it is of it are those of `case.plain`."""
    lab = drafters.engine(case.loaded)
    ticket = lab.submit(prompt_of(7, length), params := case.params(max_tokens=8))
    lab.step()
    (request,) = lab._scheduler.running
    assert lab._companion is not None
    ask = DraftAsk(request.id, request.tokens, 5, params, request.blocks, request.computed)
    (draft,) = lab._companion.drafter(case.name).propose([ask])
    want = case.plain.draft(request.tokens, 5, params)
    assert draft.tokens == tuple(want.tokens)
    assert draft.confidence == pytest.approx(want.confidence, abs=2e-3)
    ticket.cancel()


def test_confidence_is_the_modules(numba_ops: Callable[[int], Ops]) -> None:
    for name in ("few tokens", "markov", "filtered"):
        as_sure(Case(name, numba_ops(2)), 30)


def test_one_artifact_serves_both_names(numba_ops: Callable[[int], Ops]) -> None:
    case = Case("markov", numba_ops(2))
    lab = drafters.engine(case.loaded)
    tensors = drafters.dflash(TARGET, case.config)
    trunk = Plain(TARGET, {k: v for k, v in case.config.items() if k != "markov_rank"}, tensors, "dflash")
    plain = SamplingParams(max_tokens=12, width=6, controller="fixed", ignore_eos=True, speculate="dflash", seed=0)
    tickets = [lab.submit(prompt_of(8, 33), plain), lab.submit(prompt_of(9, 44), params := case.params(max_tokens=12))]
    assert check(tickets[0].result(), trunk, plain) >= 6
    assert check(tickets[1].result(), case.plain, params) >= 6


# --- what it leaves as it is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma2", "olmo2"])
@pytest.mark.parametrize("step_tokens", [16, 256])
def test_the_targets_logits_have_the_same_bits_with_and_without(
    numba_ops: Callable[[int], Ops], kind: str, step_tokens: int
) -> None:
    """Cold, and again with the prompt's pages cached; behind the last layer some families still have a norm to add."""
    target = tiny.Shape(kind=kind)
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=0)
    prompt = prompt_of(11, 150)
    alone = Recorder()
    want = tiny.engine(target, numba_ops(2), observer=alone).submit(prompt, params).result().tokens
    for speculate in ("off", "dspark", "dflash"):
        beside = Recorder()
        loaded = drafters.block_drafter(target, numba_ops(2), markov_rank=8)
        lab = drafters.engine(loaded, step_tokens=step_tokens, observer=beside)
        asked = SamplingParams(
            max_tokens=20,
            ignore_eos=True,
            seed=0,
            speculate=speculate,
            width=6,
            controller="fixed",  # type: ignore[arg-type]
        )
        for request in range(2):
            assert lab.submit(prompt, asked).result().tokens == want
            known = [*prompt, *want]
            bits, reference = beside.of(request, known), alone.of(0, known)
            assert bits and bits == {at: reference[at] for at in bits} and len(bits) == 20


def test_a_request_that_is_not_computed_is_refused_a_draft(numba_ops: Callable[[int], Ops]) -> None:
    lab = drafters.engine(drafters.block_drafter(TARGET, numba_ops(2)))
    assert lab._companion is not None
    (draft,) = lab._companion.drafter("dflash").propose([DraftAsk(1, [1, 2, 3], 4)])
    assert (draft.tokens, draft.note) == ((), "the request's last tokens are not computed yet")
