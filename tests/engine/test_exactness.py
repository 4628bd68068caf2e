"""The promise: a request's tokens and logits do not depend on anything but itself (DESIGN section 1).

Every pair of values of the axes below occurs, on tiny random models of every family and storage type, with contexts that cross
the canonical KV split of 256 keys. Logits are compared by their bits at every position.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from power_lab.engine.engine import Engine
from power_lab.engine.plan import StepPlan
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters import Draft, DraftAsk
from power_lab.kernels.ops import Ops
from power_lab.kernels.quants import QuantType
from tests import drafters, tiny
from tests.pairs import all_pairs

KINDS = [kind for kind in tiny.KINDS if kind not in tiny.FILES]
AXES: dict[str, list[Any]] = {
    "model": [
        tiny.Shape(),
        tiny.Shape(stored="mixed", seed=1),
        tiny.Shape(layers=1, heads=2, kv_heads=2, head_dim=8, seed=2),
        # Each kind of model with another storage type: all of both occur.
        *(
            tiny.Shape.wide(stored.name, layers=2, kind=kind, seed=3)
            for kind, stored in zip(KINDS, cycle(QuantType), strict=False)
        ),
    ],
    "neighbours": [0, 1, 3, 7],
    "step_tokens": [16, 64, 100, 256],
    "cache": ["off", "cold", "warm", "follow-up"],
    "speculate": ["off", "lookup", "ngram", "oracle", *drafters.KINDS],
    "width": [1, 3, 8, 12],
    "controller": ["fixed", "cost", "adaptive", "governor"],
    "preempt": ["never", "forced", "small pool"],
    "sampling": ["greedy", "temperature", "chain"],
    "threads": [1, 2],
    "device": ["waited for", "behind"],
    "buckets": [(), (3, 16), (1, 2, 5, 7, 12)],
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 5},
    "chain": {
        "temperature": 1.1,
        "seed": 6,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "logit_bias": {3: 1.5, 9: -2.0},
    },
}
EMIT = 90


class Recorder:
    """Digests of every sampled row's logits, with the drafts that the row assumed."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, tuple[int, ...], bytes]] = []

    def __call__(self, plan: StepPlan, logits: np.ndarray) -> None:
        at = 0
        for span in plan.spans:
            for row in range(span.sampled):
                drafts = span.tokens[span.rows - span.drafts :][:row]
                position = span.start + span.rows - span.sampled + row
                self.rows.append((span.request_id, position, drafts, hashlib.sha256(logits[at].tobytes()).digest()))
                at += 1

    def of(self, request_id: int, tokens: list[int]) -> dict[int, bytes]:
        """Position -> digest, for the rows whose assumed drafts are what the request really said."""
        kept: dict[int, bytes] = {}
        for owner, position, drafts, digest in self.rows:
            if owner == request_id and tuple(tokens[position - len(drafts) + 1 : position + 1]) == drafts:
                assert kept.setdefault(position, digest) == digest, f"position {position} has two different logits"
        return kept


class Oracle:
    """A drafter that knows what the request under test will say and errs now and then, so that windows end everywhere."""

    name = "oracle"

    def __init__(self, known: list[int]) -> None:
        self._known = known
        self._rng = random.Random(4)

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None: ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [
            Draft(tuple(self._guess(token) for token in self._known[len(ask.tokens) :][: ask.width])) for ask in asks
        ]

    def commit(self, request_id: int, emitted: Sequence[int]) -> None: ...

    def end(self, request_id: int) -> None: ...

    def _guess(self, token: int) -> int:
        return token if self._rng.random() < 0.8 else self._rng.randrange(256)


def prompt_of(seed: int, length: int) -> list[int]:
    """Random tokens with a repeated passage, so that lookups find something."""
    rng = random.Random(seed)
    passage = [rng.randrange(256) for _ in range(20)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += passage if rng.random() < 0.5 else [rng.randrange(256) for _ in range(7)]
    return tokens[:length]


def run(
    engine: Engine, recorder: Recorder, case: dict[str, Any], prompt: list[int], emit: int = EMIT
) -> tuple[list[int], dict[int, bytes]]:
    """The request under test among its neighbours; returns its output and the logits behind it."""
    rng = random.Random(repr(case))
    drafter = "ngram" if case["speculate"] == "oracle" else case["speculate"]
    spec = {"speculate": drafter, "width": case["width"], "controller": case["controller"], "ignore_eos": True}
    params = SamplingParams(max_tokens=emit, **SAMPLING[case["sampling"]], **spec)
    before = [engine.submit(*neighbour(engine, rng, i, prompt, spec)) for i in range(case["neighbours"] // 2)]
    for _ in range(rng.randrange(6)):
        engine.step()
    ticket = engine.submit(prompt, params)
    before += [
        engine.submit(*neighbour(engine, rng, 50 + i, prompt, spec)) for i in range((case["neighbours"] + 1) // 2)
    ]
    done: Callable[[], bool] = lambda: ticket._live.done.is_set()  # noqa: E731
    often = 0.1 * min(1, case["step_tokens"] / 16)  # a prompt in small chunks would begin anew for ever
    while not done():
        if case["preempt"] == "forced" and rng.random() < often and engine._scheduler.running:
            engine._scheduler.preempt(rng.choice(engine._scheduler.running))
        engine.step()
        engine.check()
    record = ticket.result()
    for said in (record, *(other.result() for other in before)):
        assert said.finish != "error", said.finish_detail
    tokens = [*record.prompt_tokens, *record.tokens]
    return list(record.tokens), recorder.of(record.id, tokens)


def neighbour(
    engine: Engine, rng: random.Random, seed: int, prompt: list[int], spec: dict[str, Any]
) -> tuple[list[int], SamplingParams]:
    """Strangers and requests that share the prompt's beginning, of any length."""
    own = prompt[: rng.randrange(1, len(prompt))] if rng.random() < 0.5 else []
    tokens = own + prompt_of(seed, rng.randrange(1, 120))
    room = engine.context - len(tokens)
    return tokens, SamplingParams(
        max_tokens=min(rng.randrange(1, 80), room), temperature=rng.choice([0.0, 1.0]), seed=seed, **spec
    )


def small_pool(prompt: list[int]) -> int:
    """Just enough KV for the largest request: any neighbour that decodes beside it causes preemptions."""
    return -(-(len(prompt) + 200) // 64) * 64


def same_bits(case: dict[str, Any], reference: Ops, ops: Ops, **settings: Any) -> None:
    """Assert that a request says in this case, on `ops`, what it says on `reference` alone, from one prefill. `settings` of its engine."""
    shape, prompt = case["model"], prompt_of(3, 230)
    plain = case | {"neighbours": 0, "speculate": "off", "preempt": "never"}
    recorder = Recorder()
    alone = tiny.engine(shape, reference, step_tokens=512, prefix_cache=False, observer=recorder)
    want_tokens, want_logits = run(alone, recorder, plain, prompt)
    follow = [*prompt, *want_tokens, *prompt_of(9, 30)]

    recorder = Recorder()
    pool = small_pool(follow) if case["preempt"] == "small pool" else 4096
    equipped = drafters.KINDS.get(case["speculate"], tiny.loaded)(shape, ops)
    engine = drafters.engine(
        equipped,
        step_tokens=case["step_tokens"],
        prefix_cache=case["cache"] != "off",
        kv_tokens=pool,
        context=min(pool, tiny.CONTEXT),
        observer=recorder,
        buckets=case.get("buckets", ()),
        **settings,
    )
    if case["speculate"] == "oracle":
        engine._proposer._make = lambda _: Oracle(follow)
    if case["cache"] == "warm":
        run(engine, recorder, case, prompt)
        assert engine.status().cached_blocks > 0
    got_tokens, got_logits = run(engine, recorder, case, prompt)
    assert got_tokens == want_tokens
    assert got_logits.keys() >= want_logits.keys()
    assert {at: got_logits[at] for at in want_logits} == want_logits
    if case["cache"] == "follow-up":
        # The next turn continues the model's own answer: its KV was written by decode and verify steps.
        alone_again = Recorder()
        cold = tiny.engine(shape, reference, step_tokens=512, prefix_cache=False, observer=alone_again)
        want = run(cold, alone_again, plain, follow, 40)
        got = run(engine, recorder, case, follow, 40)
        assert got[0] == want[0]
        assert {at: got[1][at] for at in want[1]} == want[1]
        if case["preempt"] == "never":
            assert engine.status().cached_tokens >= len(follow) // 64 * 64 - 64
    engine.check()
    assert engine.status().used_blocks == 0


def name_of(case: dict[str, Any]) -> str:
    return "-".join(f"{v.kind} {v.stored}" if isinstance(v, tiny.Shape) else str(v) for v in case.values())


def test_every_kind_and_storage_type_is_among_the_models() -> None:
    assert {shape.stored for shape in AXES["model"]} >= {type.name for type in QuantType}
    assert {shape.kind for shape in AXES["model"]} >= set(KINDS)


@pytest.mark.parametrize("case", all_pairs(AXES), ids=name_of)
def test_outputs_and_logits_are_the_same_bits(
    case: dict[str, Any], numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops]
) -> None:
    ops = numba_ops(case["threads"])
    same_bits(case, numba_ops(2), ops if case["device"] == "waited for" else behind(ops))


def test_speculation_in_this_suite_does_accept_and_reject(numba_ops: Callable[[int], Ops]) -> None:
    """The cases above would pass by luck if no draft were ever right or wrong."""
    engine = tiny.engine(tiny.Shape(), numba_ops(2))
    params = SamplingParams(max_tokens=EMIT, speculate="ngram", width=8, controller="fixed", ignore_eos=True)
    record = engine.submit(prompt_of(3, 230), params).result()
    drafted = sum(len(r.drafted) for r in record.rounds)
    accepted = sum(r.accepted for r in record.rounds)
    assert 0 < accepted < drafted
