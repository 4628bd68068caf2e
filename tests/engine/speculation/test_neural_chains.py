"""MTP and EAGLE-style drafters in the engine: drafts are the plain references', whatever the engine does around them, and the target stays
as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters import DraftAsk
from power_lab.engine.trace import RunRecord
from power_lab.kernels.ops import Ops
from tests import drafters, tiny
from tests.engine.speculation.plain import check
from tests.engine.speculation.plain_chains import PlainChain
from tests.engine.test_exactness import Recorder, prompt_of
from tests.lagged import Fetched, Lagged

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET = tiny.Shape()
GEMMA = {"post_norms": True, "activation": "gelu_tanh", "scale": 1.0, "normed_hidden": True, "qk_norm": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp": ("mtp", {}),
    "mtp, normed": ("mtp", {"normed_hidden": True, "normed_chain": True, "qk_norm": True}),
    "mtp, few tokens": ("mtp", {"said": 90, "normed_hidden": True}),
    "mtp, two heads": ("mtp", {"layers": 2}),
    "mtp, three heads, normed": ("mtp", {"layers": 3, "normed_chain": True, "normed_hidden": True, "said": 120}),
    "eagle": ("eagle", {}),
    "eagle, as Gemma's": ("eagle", {**GEMMA, "target_layers": [1, 0, 1], "windows": [9, 0, 70]}),
    "eagle, few tokens": ("eagle", {"said": 90}),
    "eagle, the target's head": ("eagle", {"width": 64, "said": 90, "heads": 2, "target_layers": [1]}),
}
FEW = ["mtp", "mtp, two heads", "eagle", "eagle, as Gemma's"]


class Case:
    """A tiny model with a drafter, and the drafter's reference."""

    def __init__(self, name: str, ops: Ops, target: tiny.Shape = TARGET) -> None:
        self.name, changes = CASES[name][0], dict(CASES[name][1])
        said = changes.pop("said", 0)
        if self.name == "mtp":
            config = drafters.MTP | {"taps": [target.layers]} | changes
            self.loaded = drafters.mtp_drafter(target, ops, said=said, **changes)
            tensors = drafters.mtp(target, config, said=said)
        else:
            config = drafters.EAGLE | {"target_layers": list(range(target.layers))} | changes
            self.loaded = drafters.eagle_drafter(target, ops, said=said, **changes)
            tensors = drafters.eagle(target, config, said=said)
        self.plain = PlainChain(target, self.name, config, tensors)

    def params(self, **options: Any) -> SamplingParams:
        given = {"max_tokens": 18, "width": 5, "controller": "fixed", "ignore_eos": True, "seed": 3, **options}
        return SamplingParams(speculate=self.name, **given)  # type: ignore[arg-type]


def said_plainly(ops: Ops, record: RunRecord, target: tiny.Shape = TARGET, **sampling: Any) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=len(record.tokens), ignore_eos=True, seed=3, **sampling)
    return tiny.engine(target, ops).submit(list(record.prompt_tokens), params).result().tokens


# --- what they draft --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_drafts_are_the_references_across_a_pages_border(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], name: str, late: bool
) -> None:
    case = Case(name, behind(numba_ops(2)) if late else numba_ops(2))
    lab = drafters.engine(case.loaded)
    record = lab.submit(prompt_of(1, 52), params := case.params()).result()
    assert check(record, case.plain, params) >= 12
    assert record.tokens == said_plainly(numba_ops(2), record)
    lab.check()


@pytest.mark.parametrize("kind", ["gemma2", "olmo2", "qwen3", "llama yarn", "smollm3"])
@pytest.mark.parametrize("name", FEW)
def test_targets_of_other_families(numba_ops: Callable[[int], Ops], kind: str, name: str) -> None:
    """With norms behind parts, scaled embeddings, capped logits, heads of their own; rotations as the target's, or none."""
    target = tiny.Shape(kind=kind)
    case = Case(name, numba_ops(2), target)
    record = drafters.engine(case.loaded).submit(prompt_of(2, 40), params := case.params(max_tokens=10)).result()
    assert check(record, case.plain, params) >= 6
    assert record.tokens == said_plainly(numba_ops(2), record, target)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["mtp", "eagle"])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.8}, {"temperature": 1.1, "top_k": 30, "top_p": 0.9}, {"logit_bias": {5: 9.0, 7: 9.5}}],
    ids=str,
)
def test_a_request_is_drafted_for_with_the_targets_noise_and_biases(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], name: str, sampling: dict[str, Any], late: bool
) -> None:
    case = Case(name, behind(numba_ops(2)) if late else numba_ops(2))
    record = drafters.engine(case.loaded).submit(prompt_of(2, 40), params := case.params(**sampling)).result()
    assert check(record, case.plain, params) >= 3
    assert record.tokens == said_plainly(numba_ops(2), record, **sampling)


@pytest.mark.parametrize("name", ["mtp, two heads", "eagle"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128])
def test_every_place_in_a_page(numba_ops: Callable[[int], Ops], name: str, length: int) -> None:
    case = Case(name, numba_ops(2))
    record = drafters.engine(case.loaded).submit(prompt_of(3, length), params := case.params(max_tokens=5)).result()
    assert check(record, case.plain, params) >= 1


@pytest.mark.parametrize("name", FEW)
def test_a_chain_may_reach_past_the_context(numba_ops: Callable[[int], Ops], name: str) -> None:
    case = Case(name, numba_ops(2))
    lab = drafters.engine(case.loaded, context=128, kv_tokens=128)
    record = lab.submit(prompt_of(4, 112), params := case.params(max_tokens=16, width=15)).result()
    assert check(record, case.plain, params) >= 5 and len(record.tokens) == 16


@pytest.mark.parametrize("name", CASES)
def test_a_cached_prefix_and_chunks_of_a_prompt_serve_them_as_they_serve_the_target(
    numba_ops: Callable[[int], Ops], name: str
) -> None:
    case = Case(name, numba_ops(2))
    lab = drafters.engine(case.loaded, step_tokens=40)
    shared = prompt_of(5, 140)
    params = case.params(max_tokens=6)
    first = lab.submit(shared, params).result()
    second = lab.submit([*shared, 7, 9], params).result()
    third = lab.submit([*second.prompt_tokens, *second.tokens, 3], params).result()
    assert (second.cached, third.cached) == (128, 128)
    for record in (first, second, third):
        assert check(record, case.plain, params) >= 3


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", FEW)
def test_requests_of_different_widths_in_one_batch(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], name: str, late: bool
) -> None:
    case = Case(name, behind(numba_ops(2)) if late else numba_ops(2))
    lab = drafters.engine(case.loaded, step_tokens=96)
    asked = [
        (prompt_of(10 + i, 20 + 25 * i), case.params(max_tokens=9 + i, width=width, temperature=temperature, seed=i))
        for i, (width, temperature) in enumerate([(2, 0.0), (7, 0.7), (1, 0.0), (4, 0.0)])
    ]
    tickets = [lab.submit(prompt, params) for prompt, params in asked]
    for ticket, (_, params) in zip(tickets, asked, strict=True):
        assert check(ticket.result(), case.plain, params) >= 4
    lab.check()


@pytest.mark.parametrize("name", FEW)
def test_preempted_requests_are_drafted_for_as_before(numba_ops: Callable[[int], Ops], name: str) -> None:
    case = Case(name, numba_ops(2))
    lab = drafters.engine(case.loaded, context=256, kv_tokens=256, step_tokens=64, prefix_cache=False)
    params = case.params(max_tokens=80, width=3)
    tickets = [lab.submit(prompt_of(20 + i, 50 + i), params) for i in range(3)]
    records = [ticket.result() for ticket in tickets]
    assert sum(record.preemptions for record in records), "nobody was preempted"
    for record in records:
        assert check(record, case.plain, params, every=4) >= 8
    lab.check()


@pytest.mark.parametrize("name", ["mtp", "eagle"])
def test_more_requests_than_one_launch_takes(
    numba_ops: Callable[[int], Ops], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("power_lab.engine.speculation.drafters.neural.chain.PLACES", 2)
    case = Case(name, numba_ops(2))
    lab = drafters.engine(case.loaded)
    params = [case.params(max_tokens=8, width=1 + i) for i in range(5)]
    tickets = [lab.submit(prompt_of(30 + i, 30), one) for i, one in enumerate(params)]
    for ticket, one in zip(tickets, params, strict=True):
        assert check(ticket.result(), case.plain, one) >= 4


@pytest.mark.parametrize("kind", ["mtp", "eagle"])
def test_quantised_weights_draft_as_their_values_do(numba_ops: Callable[[int], Ops], kind: str) -> None:
    target = tiny.Shape.wide("Q4_1", layers=2)
    if kind == "mtp":
        sizes = {"head_dim": 64, "kv_heads": 4, "ffn": 256}
        config, make, equip = drafters.MTP | sizes, drafters.mtp, drafters.mtp_drafter
    else:
        sizes = {"width": 128, "ffn": 256}
        config, make, equip = drafters.EAGLE | sizes, drafters.eagle, drafters.eagle_drafter
    tensors = make(target, config, said=100)
    types = {name: "Q8_0" for name, value in tensors.items() if value.ndim == 2}
    loaded = equip(target, numba_ops(2), said=100, types=types, **sizes)
    rounded = {name: drafters.rounded(value, types.get(name, "")) for name, value in tensors.items()}
    plain = PlainChain(target, kind, config, rounded)
    params = SamplingParams(max_tokens=12, width=5, controller="fixed", ignore_eos=True, speculate=kind, seed=0)  # type: ignore[arg-type]
    assert check(drafters.engine(loaded).submit(prompt_of(6, 70), params).result(), plain, params) >= 6


@pytest.mark.parametrize("name", ["mtp", "eagle, few tokens"])
def test_confidence_is_the_references_probability(numba_ops: Callable[[int], Ops], name: str) -> None:
    case = Case(name, numba_ops(2))
    drafter, seen = _listened(case)
    drafter_engine = drafter[0]
    drafter_engine.submit(prompt_of(7, 30), params := case.params(max_tokens=8)).result()
    assert len(seen) >= 4
    for (ask,), (draft,) in seen[:2]:
        want = case.plain.draft(list(ask.tokens)[: ask.computed + 1], ask.width, params)
        sure = want.logits.softmax(-1)[range(ask.width), list(want.tokens)].tolist()
        assert draft.tokens == want.tokens and draft.confidence == pytest.approx(sure, abs=2e-3)


def _listened(case: Case) -> tuple[tuple[Any, Any], list[Any]]:
    """An engine and its drafter, and what it is asked and answers."""
    lab = drafters.engine(case.loaded)
    drafter, seen = lab._companion.drafter(case.name), []  # type: ignore[union-attr]
    propose = drafter.propose
    drafter.propose = lambda asks: seen.append((asks, propose(asks))) or seen[-1][1]  # type: ignore[method-assign]
    return (lab, drafter), seen


# --- how they run -----------------------------------------------------------------------------------------------------------------


class Waited(Lagged):
    """Counts how often the host waits for the device."""

    waits = 0

    def fetch(self, *arrays: Any) -> Fetched:
        fetched = super().fetch(*arrays)

        class Counted(Fetched):
            def get(this) -> tuple[Any, ...]:
                self.waits += 1
                return super().get()

        return Counted(fetched.ops, fetched.hosts)


@pytest.mark.parametrize("name", FEW)
def test_a_chain_waits_for_the_device_once(numba_ops: Callable[[int], Ops], name: str) -> None:
    """Where draws are recorded, tokens and hidden states pass from step to step on the device, in one graph."""
    ops = Waited(numba_ops(2))
    case = Case(name, ops)
    lab = drafters.engine(case.loaded, overlap=False)
    counted: list[int] = []
    drafter = lab._companion.drafter(case.name)  # type: ignore[union-attr]
    propose = drafter.propose

    def waiting(asks: Any) -> Any:
        before = ops.waits
        answer = propose(asks)
        counted.append(ops.waits - before)
        return answer

    drafter.propose = waiting  # type: ignore[method-assign]
    record = lab.submit(prompt_of(8, 50), params := case.params(width=7, max_tokens=16)).result()
    assert len(counted) >= 5 and set(counted) == {1}
    assert check(record, case.plain, params) >= 5
    stats = lab._companion.inner.steps.graphs.registry.snapshot()  # type: ignore[union-attr]
    assert sum(one.recordings for one in stats) and sum(one.replays for one in stats)
    assert not any(one.shape.sampling == "apart" for one in stats)


@pytest.mark.parametrize("name", ["mtp", "eagle"])
@pytest.mark.parametrize("late", [False, True])
def test_graphs_may_be_off(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], name: str, late: bool
) -> None:
    case = Case(name, behind(numba_ops(2)) if late else numba_ops(2))
    lab = drafters.engine(case.loaded, graph_mb=0)
    record = lab.submit(prompt_of(9, 60), params := case.params(max_tokens=10)).result()
    assert check(record, case.plain, params) >= 5


# --- what they leave as it is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma2", "olmo2"])
@pytest.mark.parametrize("name", ["mtp, normed", "mtp, two heads", "eagle, as Gemma's"])
@pytest.mark.parametrize("step_tokens", [16, 256])
def test_the_targets_logits_have_the_same_bits_with_and_without(
    numba_ops: Callable[[int], Ops], kind: str, name: str, step_tokens: int
) -> None:
    """Cold, and again with the prompt's pages cached."""
    target = tiny.Shape(kind=kind)
    prompt, plainly = prompt_of(11, 150), SamplingParams(max_tokens=16, ignore_eos=True, seed=3)
    alone, beside = Recorder(), Recorder()
    want = tiny.engine(target, numba_ops(2), observer=alone).submit(prompt, plainly).result().tokens
    case = Case(name, numba_ops(2), target)
    lab = drafters.engine(case.loaded, step_tokens=step_tokens, observer=beside)
    known = [*prompt, *want]
    reference = alone.of(0, known)
    for request, params in enumerate((plainly, case.params(max_tokens=16), case.params(max_tokens=16))):
        assert lab.submit(prompt, params).result().tokens == want
        bits = beside.of(request, known)
        assert len(bits) >= 15 and bits == {at: reference[at] for at in bits}


@pytest.mark.parametrize("name", ["mtp", "eagle"])
def test_a_request_that_is_not_computed_is_refused_a_draft(numba_ops: Callable[[int], Ops], name: str) -> None:
    lab = drafters.engine(Case(name, numba_ops(2)).loaded)
    (draft,) = lab._companion.drafter(name).propose([DraftAsk(1, [1, 2, 3], 4)])  # type: ignore[union-attr]
    assert (draft.tokens, draft.note) == ((), "the request's last tokens are not computed yet")


@pytest.mark.parametrize("name", FEW)
def test_pages_that_steps_behind_others_wrote_serve_a_draft(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], name: str
) -> None:
    """Without speculation steps are launched before their tokens are known on the host; the companion reads these on the device, too."""
    case = Case(name, behind(numba_ops(2)))
    lab = drafters.engine(case.loaded)
    plainly = SamplingParams(max_tokens=80, ignore_eos=True, seed=3)
    before = lab.submit(prompt_of(12, 50), plainly).result()
    known = [*before.prompt_tokens, *before.tokens]
    record = lab.submit([*known, 5], params := case.params(max_tokens=6)).result()
    assert record.cached == 128
    assert check(record, case.plain, params) >= 2
