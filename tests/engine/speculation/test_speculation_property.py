"""Whatever speculates beside whatever else: every request says what it says alone, without speculation; blocks are sound after each step.

Hypothesis draws a tiny random target, requests that each have their own drafter, width, controller, sampling and ends, and a script in
which they come, are cancelled and are preempted. Masks are those of requests (`logit_bias`): a few tokens are left, the end token among
them, so that stop strings and ends fall inside windows, as under a grammar. The engine has no masks that change from step to step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import json, structs

from power_lab.engine.engine import Engine
from power_lab.engine.request import SamplingParams
from power_lab.engine.shapes import ResumedShape
from power_lab.engine.ticket import Ticket
from power_lab.engine.trace import RunRecord
from power_lab.kernels.ops import Ops
from tests import drafting, tiny
from tests.engine.test_exactness import prompt_of

CONTEXT = 256
LETTERS = tuple(b"abcd")
KINDS = ("llama", "mistral", "qwen3", "gemma3")
EXAMPLES, PLAIN_EXAMPLES = 60, 25  # of each drafter
RESUMING = ("mtp", "eagle", "dflash", "dspark", "hybrid")  # whose drafts may stay on the device


@dataclass(frozen=True)
class Asked:
    """A request of the script. allowed: the only tokens that it may say, beside the end token with this bias; () is all. arrives: at which
    step. cancelled: how many steps later, or never."""

    prompt: tuple[int, ...]
    unmasked: SamplingParams
    allowed: tuple[int, ...]
    ending: float
    namespace: str
    arrives: int
    cancelled: int | None

    @property
    def params(self) -> SamplingParams:
        if not self.allowed:
            return self.unmasked
        bias = {token: -100.0 for token in range(tiny.tokenizer().vocab_size) if token not in self.allowed}
        return structs.replace(self.unmasked, logit_bias=bias | {tiny.END: self.ending})


@dataclass(frozen=True)
class Script:
    """shape: the target. asked: the requests. settings: of the engine. preempts: chance of a preemption in a step. late: on a device that
    runs behind its host."""

    shape: tiny.Shape
    asked: tuple[Asked, ...]
    settings: dict[str, Any]
    preempts: float
    late: bool
    seed: int


@st.composite
def requests(draw: st.DrawFn, drafter: str, plain: bool) -> Asked:
    """plain: neither masks nor penalties, so that rounds may stay on a device that runs behind."""
    masked = not plain and draw(st.integers(0, 3)) > 0
    allowed = draw(st.lists(st.sampled_from(LETTERS), min_size=2, max_size=4, unique=True)) if masked else []
    length = draw(st.sampled_from([30, 1, 63, 64, 65, 130, CONTEXT - 20]))
    prompt = prompt_of(draw(st.integers(0, 3)), length)
    if masked:  # so that lookups find something
        prompt = [LETTERS[token % len(LETTERS)] for token in prompt]
    most = draw(st.sampled_from([60, CONTEXT, 17, 2, 1]))  # the last one ends at the context
    chance = draw(st.sampled_from([0.0, 0.9]))
    params = SamplingParams(
        max_tokens=min(most, CONTEXT - length),
        temperature=chance,
        seed=draw(st.integers(0, 9)),
        repetition_penalty=1.0 if plain else draw(st.sampled_from([1.0, 1.2])),
        presence_penalty=0.0 if plain else draw(st.sampled_from([0.0, 0.5])),
        stop=tuple(
            draw(
                st.lists(
                    st.sampled_from(["aab", "bba", "abab", "cac", "dcba", "bcb", "dad", "ccc"]), max_size=8, unique=True
                )
            )
        ),
        stop_tokens=draw(st.sampled_from([(), (LETTERS[3],), (200,)])),
        ignore_eos=draw(st.integers(0, 7)) == 0,
        speculate=draw(st.sampled_from([drafter, drafter, drafter, "off", *([] if plain else ["ngram"])])),
        width=draw(st.sampled_from([1, 2, 3, 7, 15])),
        controller=draw(st.sampled_from([*drafting.CONTROLLERS, "fixed", "fixed"])),
        gate=0.0 if plain else draw(st.sampled_from([*[0.0] * 7, 0.3])),  # more often, and few drafts are left to verify
    )
    return Asked(
        prompt=tuple(prompt),
        unmasked=params,
        allowed=tuple(allowed),
        ending=draw(st.sampled_from([0.0, -1.0, -2.0, -100.0])),
        namespace=draw(st.sampled_from(["", "a"])),
        arrives=draw(st.integers(0, 15)),
        cancelled=draw(st.sampled_from([None] * 8 + [0, 5, 12])),
    )


@st.composite
def scripts(draw: st.DrawFn, drafter: str, plain: bool) -> Script:
    return Script(
        shape=tiny.Shape(
            seed=draw(st.integers(0, 4)),
            scale=draw(st.sampled_from([0.9, 1.4])),
            kind=draw(st.sampled_from(KINDS)),
        ),
        asked=tuple(draw(st.lists(requests(drafter, plain), min_size=2, max_size=6))),
        settings={
            "step_tokens": draw(st.sampled_from([20, 64, 256])),
            "kv_tokens": draw(st.sampled_from([CONTEXT, CONTEXT + 128, 2048])),
            "prefix_cache": draw(st.booleans()),
            "max_batch": draw(st.sampled_from([2, 8])),
        },
        preempts=draw(st.sampled_from([0.0, 0.1])),
        late=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


class Alone:
    """Each request by itself, in one prefill, without speculation. The scripts of all drafters ask for much the same: it is run once."""

    def __init__(self) -> None:
        self._said: dict[tuple[Any, ...], RunRecord] = {}

    def __call__(self, script: Script, ops: Ops) -> list[RunRecord]:
        plain = [
            structs.replace(one.params, speculate="off", width=1, controller="fixed", gate=0.0) for one in script.asked
        ]
        keys = [
            (script.shape, one.prompt, json.encode(params)) for one, params in zip(script.asked, plain, strict=True)
        ]
        if not self._said.keys() >= set(keys):
            engine = tiny.engine(script.shape, ops, step_tokens=512, prefix_cache=False, context=CONTEXT)
            for key, one, params in zip(keys, script.asked, plain, strict=True):
                self._said[key] = engine.submit(list(one.prompt), params).result()
        return [self._said[key] for key in keys]


@pytest.fixture(scope="module")
def alone() -> Alone:
    return Alone()


def together(script: Script, engine: Engine) -> list[RunRecord]:
    """The script played, with a look at the blocks after each step."""
    rng = random.Random(script.seed)
    tickets: dict[int, Ticket] = {}
    step = 0
    while len(tickets) < len(script.asked) or not all(ticket._live.done.is_set() for ticket in tickets.values()):
        for index, one in enumerate(script.asked):
            if index not in tickets and one.arrives <= step:
                tickets[index] = engine.submit(list(one.prompt), one.params, cache_key=one.namespace)
            if one.cancelled is not None and one.arrives + one.cancelled == step:
                tickets[index].cancel()
        # A prompt in small chunks would begin anew for ever.
        if step < 60 and rng.random() < script.preempts and engine._scheduler.running:
            engine._scheduler.preempt(rng.choice(engine._scheduler.running))
        engine.step()
        engine.check()
        if engine._draft is not None:
            engine._draft.check()
        step += 1
        assert step < 3000, "somebody waits for ever"
    return [tickets[index].result() for index in range(len(script.asked))]


def compare(script: Script, got: list[RunRecord], want: list[RunRecord]) -> None:
    for one, said, expected in zip(script.asked, got, want, strict=True):
        if said.finish == "cancelled":
            assert one.cancelled is not None
            assert said.tokens == expected.tokens[: len(said.tokens)]
        else:
            assert (said.finish, said.finish_detail) == (expected.finish, expected.finish_detail)
            assert (said.tokens, said.text) == (expected.tokens, expected.text)


def happened(got: list[RunRecord]) -> Counter[str]:
    """What these runs had in them."""
    seen: Counter[str] = Counter()
    for record in got:
        rounds = record.rounds
        seen["accepted"] += sum(entry.accepted for entry in rounds)
        seen["refused"] += sum(len(entry.rejected) for entry in rounds)
        seen["preempted"] += record.preemptions
        seen["cancelled"] += record.finish == "cancelled"
        last = rounds[-1] if rounds else None
        inside = last is not None and len(last.emitted) <= len(last.drafted)
        seen["stop string in a window"] += inside and record.finish_detail.startswith("string")
        seen["end token in a window"] += inside and record.finish_detail.startswith("token")
        seen["end of context"] += len(record.prompt_tokens) + len(record.tokens) == CONTEXT
        seen["shared steps"] += any(entry.requests > 1 for entry in rounds)
    return seen


def test_every_drafter_can_be_had() -> None:
    missing = set(drafting.NAMES) - drafting.EQUIPMENT.keys()
    assert not missing, f"tests/drafting.py: EQUIPMENT has no tiny engine for {sorted(missing)}"


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("drafter", drafting.DRAFTERS)
def test_any_mixture_says_what_each_says_alone(
    drafter: str, plain: bool, alone: Alone, numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops]
) -> None:
    seen: Counter[str] = Counter()
    resumed: Counter[bool] = Counter()

    @settings(
        max_examples=PLAIN_EXAMPLES if plain else EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(scripts(drafter, plain))
    def same(script: Script) -> None:
        want = alone(script, numba_ops(2))
        ops = behind(numba_ops(2)) if script.late else numba_ops(2)
        engine = drafting.engine(drafter, script.shape, ops, context=CONTEXT, **script.settings)
        got = together(script, engine)
        compare(script, got, want)
        assert engine.status().used_blocks == 0
        seen.update(happened(got))
        shapes = (stats.shape for stats in engine._runner.graphs.registry.snapshot())
        resumed.update(isinstance(shape, ResumedShape) and shape.drafting is not None for shape in shapes)

    same()
    if plain:
        assert resumed[True] > 5 or drafter not in RESUMING, f"steps seldom go on from one another: {resumed}"
    else:
        assert len(seen) == 8 and min(seen.values()) > 0, f"these scripts prove too little: {seen}"
