"""Counterfactual replay: what a recorded run is said to have done under another setting is what a real run with it does."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.config import EngineConfig
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters import Draft, DraftAsk
from power_lab.engine.speculation.recorded import RecordedCosts
from power_lab.engine.speculation.replay import replay
from power_lab.engine.trace import CorpusTexts, RunRecord
from power_lab.errors import ReplayRefused
from power_lab.what_if import what_if
from tests import tiny
from tests.factories import engine_facts, run_record
from tests.pairs import all_pairs

SHAPE = tiny.Shape(layers=1, heads=2, kv_heads=2, head_dim=8, seed=2)
LIMIT = 90
FEW = {65 + i: 9.0 for i in range(12)}  # favoured tokens: so few that outputs quote prompts and themselves
AXES: dict[str, list[Any]] = {
    "recorded": ["off", "lookup", "ngram", "oracle"],
    "speculate": ["off", "lookup", "ngram", "oracle"],
    "width": [1, 3, 7, 15],
    "controller": ["fixed", "adaptive"],
    "gates": [(0.0, 0.0), (0.0, 0.45), (0.6, 0.0), (0.45, 0.7)],
    "sampling": [{}, {"temperature": 0.8}, {"temperature": 1.0, "repetition_penalty": 1.1}],
    "end": ["max_tokens", "token", "string", "context", "one"],
    "step_tokens": [16, 64, 256],
    "prompt": [1, 2, 17, 65, 129, 150],
    "prefix": ["cold", "warm"],
}
NOTHING = RecordedCosts({}, {})
Ops = Callable[[int], Any]


class Oracle:
    """A drafter that knows the output and errs at every seventh position, or beyond the output: windows end everywhere."""

    name = "oracle"

    def __init__(self, known: Sequence[int]) -> None:
        self._known = [token if at % 7 else 255 - token for at, token in enumerate([*known, *[65] * 64])]

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None: ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [Draft(tuple(self._known[len(ask.tokens) :][: ask.width])) for ask in asks]

    def commit(self, request_id: int, emitted: Sequence[int]) -> None: ...

    def end(self, request_id: int) -> None: ...


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice([*FEW]) for _ in range(length)]


class Bench:
    """Fresh engines of one setting, whose records say that setting as loaded models' do. `known`: what the oracle drafts."""

    def __init__(self, ops: Any, **options: Any) -> None:
        self.ops, self.options = ops, options
        self.known: Sequence[int] = ()

    def run(self, prompt: list[int], params: SamplingParams, *, warm: bool = False) -> RunRecord:
        engine = tiny.engine(SHAPE, self.ops, **self.options)
        if self.known:
            engine._proposer._make = lambda _: Oracle(self.known)
        if warm:
            engine.generate(prompt, SamplingParams(max_tokens=1))
        record = engine.generate(prompt, params)
        config = EngineConfig(**self.options).told()
        return msgspec.structs.replace(record, engine=msgspec.structs.replace(record.engine, config=config))


def figures(rounds: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [(r.start, r.drafted, r.accepted, r.emitted, r.rows, r.note, r.width, r.why) for r in rounds]


def same(recorded: RunRecord, real: RunRecord, params: SamplingParams) -> None:
    """What was recorded, replayed with `params`, is what really ran with them."""
    assert figures(replay(recorded, params, RecordedCosts.of([recorded]))) == figures(real.rounds)


def ending(said: Sequence[int], end: str, prompt: int) -> dict[str, Any]:
    """Parameters with which the run ends so. A token or string ends it at its last new one."""
    token = max(said, key=said.index)
    plain = [i for i in range(len(said) - 2) if all(t in FEW for t in said[i : i + 3])]
    at = max(first(said, i) for i in plain)
    return {
        "max_tokens": {"max_tokens": LIMIT, "ignore_eos": True},
        "one": {"max_tokens": 1},
        "context": {"max_tokens": 256 - prompt, "ignore_eos": True},
        "token": {"max_tokens": LIMIT, "stop_tokens": (token,)},
        "string": {"max_tokens": LIMIT, "stop": (bytes(said[at : at + 3]).decode("ascii"),), "ignore_eos": True},
    }[end]


def first(said: Sequence[int], at: int) -> int:
    """Where the three tokens at a place come first."""
    return next(i for i in range(at + 1) if said[i : i + 3] == said[at : at + 3])


@pytest.mark.parametrize("case", all_pairs(AXES), ids=lambda case: "-".join(map(str, case.values())))
def test_a_replay_is_what_a_real_run_does(
    case: dict[str, Any], numba_ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, real = both(case, numba_ops(1), monkeypatch)
    assert recorded.tokens == real.tokens
    assert recorded.finish == ("stop" if case["end"] in ("token", "string") else "length")


def both(case: dict[str, Any], ops: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[RunRecord, RunRecord]:
    """A run with one setting and a run with another, the second being what the replay of the first says."""
    bench = Bench(ops, step_tokens=case["step_tokens"], context=256, max_batch=4)
    prompt = prompt_of(case["prompt"], case["prompt"])
    common = {"seed": 5, "logit_bias": FEW, **case["sampling"]}
    said = bench.run(prompt, SamplingParams(max_tokens=LIMIT, ignore_eos=True, **common)).tokens
    common |= ending(said, case["end"], len(prompt))
    oracle = Oracle([*prompt, *said])

    def run(drafter: str, width: int, controller: str, gate: float) -> tuple[RunRecord, SamplingParams]:
        bench.known = [*prompt, *said] if drafter == "oracle" else ()
        asked: dict[str, Any] = {"speculate": "lookup" if drafter == "oracle" else drafter, "controller": controller}
        asked["gate"] = gate
        params = SamplingParams(**asked, width=width, **common)
        return bench.run(prompt, params, warm=case["prefix"] == "warm"), params

    before, after = case.get("gates", (0.0, 0.0))
    recorded, _ = run(case["recorded"], 6, "cost", before)
    real, params = run(case["speculate"], case["width"], case["controller"], after)
    if case["speculate"] == "oracle":
        monkeypatch.setattr("power_lab.engine.speculation.replay.make", lambda _: oracle)
    same(recorded, real, params)
    return recorded, real


WINDOWS: dict[str, list[Any]] = {
    "recorded": ["off", "oracle"],
    "speculate": ["oracle"],
    "width": [3, 15],
    "controller": ["fixed"],
    "sampling": [{"temperature": 0.8}],
    "end": ["token", "string", "max_tokens"],
    "step_tokens": [64],
    "prompt": [65, 40],
    "prefix": ["cold", "warm"],
}


def test_the_rounds_compared_hold_every_kind_of_end(numba_ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases above would pass by luck if no window ended early and no prompt ended on a single token."""
    rounds = []
    for case in all_pairs(WINDOWS):
        rounds += both(case, numba_ops(1), monkeypatch)[1].rounds
    assert any(r.start == 65 and r.drafted for r in rounds), "drafts behind the last token of a prompt in chunks"
    assert any(r.drafted and r.accepted == len(r.emitted) < len(r.drafted) for r in rounds), "an end inside a window"
    assert any(r.drafted and r.accepted == len(r.emitted) - 1 == len(r.drafted) for r in rounds), "a bonus"
    assert any(r.accepted == 0 < len(r.drafted) for r in rounds), "nothing accepted"


DRAFTERS = st.sampled_from(["off", "lookup", "ngram"])
GATES = st.sampled_from([0.0, 0.0, 0.3, 0.5, 0.9, 1.0])


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.sampled_from([65, 66, 67, 68]), min_size=1, max_size=150),
    params=st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 60),
            "temperature": st.sampled_from([0.0, 0.7]),
            "seed": st.integers(0, 99),
            "stop_tokens": st.sampled_from([(), (67,), (68,)]),
        }
    ),
    before=st.tuples(DRAFTERS, st.integers(1, 20), st.sampled_from(["fixed", "cost"]), GATES),
    after=st.tuples(DRAFTERS, st.integers(1, 20), st.sampled_from(["fixed", "adaptive"]), GATES),
    step_tokens=st.sampled_from([16, 100]),
    warm=st.booleans(),
)
def test_any_run_replays_as_any_other(
    numba_ops: Ops,
    prompt: list[int],
    params: dict[str, Any],
    before: tuple[str, int, str, float],
    after: tuple[str, int, str, float],
    step_tokens: int,
    warm: bool,
) -> None:
    bench = Bench(numba_ops(1), step_tokens=step_tokens, context=256, max_batch=2)
    common = {**params, "logit_bias": dict.fromkeys([65, 66, 67, 68], 15.0)}
    keys = "speculate", "width", "controller", "gate"
    first, second = (SamplingParams(**dict(zip(keys, one, strict=True)), **common) for one in (before, after))
    same(bench.run(prompt, first, warm=warm), bench.run(prompt, second, warm=warm), second)


def test_what_a_record_does_not_hold_is_refused() -> None:
    record = run_record(20)
    for finish in ("cancelled", "deadline", "error"):
        with pytest.raises(ReplayRefused, match=f"ended from outside \\({finish}\\)"):
            replay(msgspec.structs.replace(record, finish=finish), SamplingParams(speculate="ngram"), NOTHING)
    with pytest.raises(ReplayRefused, match=r"'draft-model' drafts from more than the request's tokens.*lookup, ngram"):
        replay(record, SamplingParams(speculate="draft-model"), NOTHING)
    with pytest.raises(ReplayRefused, match="20 after a prompt of 80, with max_tokens 19"):
        replay(record, SamplingParams(max_tokens=19), NOTHING)


def test_costs_are_medians_of_steps_without_prompts() -> None:
    runs = [run_record(60, seed=seed) for seed in range(3)]
    costs = RecordedCosts.of(runs)
    fives = [r.forward_s + r.sample_s + r.commit_s for run in runs for r in run.rounds[1:] if r.rows == 5]
    assert costs.step(5) == statistics.median(fives)
    assert costs.step(80) is None, "a prompt's pass draws one row only"
    assert costs.step(999) is None
    asked = [r.draft_s for run in runs for r in run.rounds if r.drafted]
    assert costs.draft("lookup", 1) == statistics.median(asked)
    assert costs.draft("ngram", 1) is None


def test_costs_of_two_engines_are_not_mixed() -> None:
    other = run_record(20, engine=engine_facts(device="cuda"))
    with pytest.raises(
        ReplayRefused, match=r"costs_from\[1\]: its engine's device is 'cuda' and the first one's 'cpu'"
    ):
        RecordedCosts.of([run_record(20), other])


def test_ngram_drafts_from_other_requests_are_refused_by_round(numba_ops: Ops) -> None:
    prompt = prompt_of(4, 40)
    engine = tiny.engine(SHAPE, numba_ops(1))
    params = SamplingParams(
        max_tokens=40, ignore_eos=True, logit_bias=FEW, temperature=0.8, seed=5, speculate="ngram", controller="fixed"
    )
    alone, after = engine.generate(prompt, params), engine.generate(prompt, params)
    assert alone.tokens == after.tokens
    assert figures(alone.rounds) != figures(after.rounds), "the second run quotes the first"
    costs = RecordedCosts.of([alone])
    assert figures(replay(alone, params, costs)) == figures(alone.rounds)
    with pytest.raises(
        ReplayRefused,
        match=r"rounds\[\d+\]: 'ngram' drafted here from what earlier requests.*record=\"replay\".*cache_key",
    ):
        replay(after, params, costs)
    lookup = msgspec.structs.replace(params, speculate="lookup")
    assert figures(replay(after, lookup, costs)) == figures(replay(alone, lookup, costs))


def ngram(**changes: Any) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "logit_bias": FEW, "temperature": 0.8, "seed": 5}
    return SamplingParams(**{**common, "speculate": "ngram", "controller": "fixed", "width": 7, **changes})


def after_others(ops: Any, params: SamplingParams) -> RunRecord:
    """A run in an engine in which others of its namespace, and of another one, have spoken before: the same prompt among them."""
    engine = tiny.engine(SHAPE, ops, context=256, max_batch=2)
    for seed, namespace in ((4, "a"), (6, "a"), (4, "b"), (7, "a")):
        engine.generate(prompt_of(seed, 40), ngram(max_tokens=50, seed=seed), cache_key=namespace)
    record = engine.generate(prompt_of(4, 40), params, cache_key="a")
    config = EngineConfig(context=256, max_batch=2).told()
    return msgspec.structs.replace(record, engine=msgspec.structs.replace(record.engine, config=config))


@pytest.mark.parametrize("piece", [256, 1])
@pytest.mark.parametrize("recorded", ["ngram", "off"])
def test_a_run_after_others_of_its_namespace_replays_from_what_they_said(
    recorded: str, piece: int, numba_ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the run itself drafted with, also where only a part of the others' texts is searched when it begins."""
    monkeypatch.setattr("power_lab.engine.speculation.drafters.suffix.CORPUS_PIECE", piece)
    ops = numba_ops(1)
    record = after_others(ops, ngram(record="replay", speculate=recorded))
    assert record.corpus is not None
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=RunRecord)
    assert crossed.corpus == record.corpus
    assert sum(texts.count(-1) for texts in (*crossed.corpus.generations, crossed.corpus.waiting)) >= 3
    assert (record.corpus.begun > 0) == (piece == 1), "else only what was said last is not searched yet"
    foreign = 0
    for changes in ({}, {"width": 2}, {"width": 15, "controller": "adaptive"}, {"gate": 0.5}, {"speculate": "lookup"}):
        real = after_others(ops, ngram(**changes))
        same(crossed, real, ngram(**changes))
        alone = msgspec.structs.replace(record, corpus=CorpusTexts())
        foreign += figures(replay(alone, ngram(**changes), NOTHING)) != figures(real.rounds)
    assert foreign >= 3, "few rounds drafted from others"
    (without,) = (what_if(msgspec.structs.replace(record, corpus=c), NOTHING).caveats for c in [record.corpus])
    assert not any("earlier requests" in caveat for caveat in without)


def test_a_corpus_is_recorded_on_request_alone(numba_ops: Ops) -> None:
    assert after_others(numba_ops(1), ngram()).corpus is None
    engine = tiny.engine(SHAPE, numba_ops(1))
    assert engine.generate(prompt_of(4, 40), ngram(record="replay")).corpus == CorpusTexts()
    again = engine.generate(prompt_of(4, 40), ngram(record="replay"))
    assert again.corpus is not None and again.corpus.waiting[0] == -1
    assert list(again.corpus.waiting[1:]) == [*again.prompt_tokens, *again.tokens], "the one before said the same"
    assert engine.generate(prompt_of(4, 40), ngram(record="replay"), cache_key="b").corpus == CorpusTexts()
    engine.drop_prefixes()
    assert engine.generate(prompt_of(4, 40), ngram(record="replay")).corpus == CorpusTexts()


@pytest.mark.parametrize("drafter", ["lookup", "ngram"])
def test_prompts_that_are_indexed_in_pieces(drafter: str, numba_ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("power_lab.engine.speculation.drafters.suffix.OWN_PIECE", 8)
    bench = Bench(numba_ops(1), step_tokens=64, context=256, max_batch=1)
    asked: dict[str, Any] = {"speculate": drafter, "controller": "fixed", "logit_bias": FEW}
    params = SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.8, seed=2, **asked)
    real = bench.run(prompt_of(8, 150), params)
    first = next(index for index, entry in enumerate(real.rounds) if entry.drafted)
    assert first > 3, "no drafts before the prompt is indexed"
    same(real, real, params)


def test_controllers_that_weigh_seconds_need_them(numba_ops: Ops) -> None:
    record = run_record(60, seed=3)
    params = SamplingParams(max_tokens=60, speculate="lookup", width=6, controller="governor")
    with pytest.raises(
        ReplayRefused, match=r"controller: 'governor' weighs the seconds.*no step of 1 rows.*costs_from"
    ):
        replay(record, params, NOTHING)
    cheap = RecordedCosts(dict.fromkeys(range(1, 99), 1.0), {"lookup": 0.0})
    dear = RecordedCosts({rows: float(rows) for rows in range(1, 99)}, {"lookup": 0.5})
    bench = Bench(numba_ops(1), step_tokens=64, context=256, max_batch=1)
    common = {"max_tokens": 200, "ignore_eos": True, "logit_bias": {65: 30.0, 66: 30.0}, "temperature": 1.0, "seed": 1}
    run = bench.run([65, 66, 65, 66], SamplingParams(**common))
    for controller in ("cost", "governor"):
        params = SamplingParams(**common, speculate="ngram", controller=controller)
        free, paid = (sum(len(r.drafted) for r in replay(run, params, costs)) for costs in (cheap, dear))
        assert free > 1.5 * paid, "drafts that cost more are made less often"
