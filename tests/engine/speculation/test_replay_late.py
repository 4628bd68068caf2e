"""Replays of runs on a device that works by itself: drafts stay there, each step is planned behind one that is not over, and what a replay
says is nevertheless what a real run does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.engine import Engine
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters.tabled import TabledHybrid, TabledOnDevice
from power_lab.engine.speculation.recorded import RecordedCosts, RecordedRounds
from power_lab.engine.speculation.replay import FROM_COUNTS, replay
from power_lab.engine.trace import DraftTable, RunRecord
from power_lab.errors import ReplayRefused
from power_lab.evidence.dataset import trace_dataset
from power_lab.what_if import what_if
from tests import drafters, drafting, tiny
from tests.engine.speculation import test_replay
from tests.engine.speculation.test_recording import VARIANTS, engine_of, known
from tests.engine.speculation.test_replay import prompt_of
from tests.factories import run_record
from tests.pairs import all_pairs

HOSTED = ("lookup", "ngram", "draft-model", "dflash2")
"""Drafters that make no drafts behind a step in flight."""
LIMIT = 70
SAMPLINGS: dict[str, dict[str, Any]] = {
    "loops": {"temperature": 0.0},
    "varies": {"temperature": 2.5, "top_p": 0.95},
    "penalised": {"repetition_penalty": 1.1},
    "biased": {"temperature": 0.8, "logit_bias": dict.fromkeys(range(65, 77), 9.0)},
}
"""Noise decides most where outputs vary, and a drafter that draws with the same is often right. The last two keep a request's rounds on
the host: what is drawn depends on a list of tokens."""
WIDTHS = [(width, "fixed") for width in (1, 2, 4, 7, 15, 40)] + [(3, "adaptive"), (15, "adaptive")]
Ops = Callable[[int], Any]
Behind = Callable[[Any], Any]


def figures(rounds: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [(*one, r.resumed, r.light) for one, r in zip(test_replay.figures(rounds), rounds, strict=True)]


def same(recorded: RunRecord, real: RunRecord, params: SamplingParams) -> None:
    assert recorded.tokens == real.tokens
    assert figures(replay(recorded, params, RecordedCosts.of([recorded]))) == figures(real.rounds)


def params_of(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LIMIT, "ignore_eos": True, "seed": 5, "width": 40, **changes})


def run(engine: Engine, prompt: list[int], params: SamplingParams) -> RunRecord:
    return known(engine.generate(prompt, params))


@pytest.mark.parametrize("drafter", drafting.DRAFTERS)
def test_a_replay_of_every_drafter_is_what_a_late_engine_does(drafter: str, numba_ops: Ops, behind: Behind) -> None:
    engine = engine_of(drafter, behind(numba_ops(1)), prefix_cache=False)
    asked, common = prompt_of(4, 65), SAMPLINGS["varies"]
    recorded = run(engine, asked, params_of(record="replay", **common))
    rounds = []
    for number, (width, controller) in enumerate(WIDTHS):
        params = params_of(speculate=drafter, width=width, controller=controller, **common)
        real = engine.generate(asked, params, cache_key=str(number))  # others' tokens are not in a replay
        same(recorded, real, params)
        rounds += real.rounds
    accepted = sum(entry.accepted for entry in rounds)
    assert accepted > 5 or drafter == "lookup", "windows that are all refused would prove little"
    assert any(entry.resumed for entry in rounds) == (drafter not in HOSTED)
    table = recorded.drafts.get(drafter)
    assert table is None or bool(table.most) == (drafter not in HOSTED)


def test_hybrid_rounds_with_and_without_its_network_are_among_those(
    numba_ops: Ops, behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops are copied, and a request that comes on by copying leaves the network out. Without these cases the ones above prove little."""
    lights: list[bool] = []
    onward = TabledHybrid.onward

    def listened(self: TabledHybrid, tokens: Sequence[int], width: int, light: bool) -> tuple[int, ...]:
        lights.append(light)
        return onward(self, tokens, width, light)

    monkeypatch.setattr(TabledHybrid, "onward", listened)
    engine, prompt = engine_of("hybrid", behind(numba_ops(1)), prefix_cache=False), prompt_of(4, 130)
    recorded = run(engine, prompt, params_of(record="replay"))
    params = params_of(speculate="hybrid", width=31, controller="fixed")
    real = run(engine, prompt, params)
    same(recorded, real, params)
    assert any(lights) and not all(lights)
    wide = [entry for entry in real.rounds if entry.resumed and len(entry.drafted) > 7]
    assert any(entry.accepted > 7 for entry in wide), "copied"
    assert any(entry.accepted < 7 for entry in wide), (
        "the network's drafts, and behind them what is copied all the same"
    )
    trace = trace_dataset(real)
    assert trace.resumed.values.tolist() == [entry.resumed for entry in real.rounds]
    assert 0 < trace.light.sum() < trace.resumed.sum()


VARIED = {**VARIANTS, "short blocks": ("dspark", lambda ops: _short(ops))}


def _short(ops: Any) -> Any:
    return drafters.block_drafter(_shape(), ops, markov_rank=8, block_size=4)


def _shape() -> tiny.Shape:
    return tiny.Shape(layers=2, seed=2)


@pytest.mark.parametrize("variant", VARIED)
def test_drafters_of_other_kinds(variant: str, numba_ops: Ops, behind: Behind) -> None:
    loaded, prompt = VARIED[variant][1](behind(numba_ops(1))), prompt_of(6, 129)
    options: dict[str, Any] = {"kv_tokens": 2048, "step_tokens": 64, "max_batch": 4, "context": 512}
    engine = drafters.engine(loaded, **options, prefix_cache=False)
    recorded = run(engine, prompt, params_of(record="replay"))
    for name in recorded.drafts:
        for width in (2, 6, 15):
            params = params_of(speculate=name, width=width, controller="fixed")
            same(recorded, run(engine, prompt, params), params)


AXES: dict[str, list[Any]] = {
    "recorded": ["off", "lookup", "hybrid", "mtp"],
    "speculate": ["hybrid", "mtp", "lookup", "ngram"],
    "width": [1, 3, 7, 15],
    "controller": [*FROM_COUNTS],
    "sampling": [*SAMPLINGS],
    "end": ["max_tokens", "token", "context", "few"],
    "step_tokens": [16, 64, 256],
    "prompt": [1, 2, 17, 65, 129, 150],
    "prefix": ["cold", "warm"],
    "overlap": [True, False],
    "gate": [0.0, 0.02],
}
CONTEXT = 192


@pytest.mark.parametrize("case", all_pairs(AXES), ids=lambda case: "-".join(map(str, case.values())))
def test_every_circumstance_is_replayed(case: dict[str, Any], numba_ops: Ops, behind: Behind) -> None:
    """A pool of just one context, so that a step that is planned ahead must not count on more."""
    ops, prompt, common = behind(numba_ops(1)), prompt_of(case["prompt"], case["prompt"]), SAMPLINGS[case["sampling"]]
    options: dict[str, Any] = {name: case[name] for name in ("step_tokens", "overlap")}
    options |= {"context": CONTEXT, "kv_tokens": CONTEXT, "max_batch": 2}

    def one(**changes: Any) -> RunRecord:
        engine = engine_of("hybrid", ops, **options)
        if case["prefix"] == "warm":
            engine.generate(prompt, SamplingParams(max_tokens=1))
        return known(engine.generate(prompt, params_of(**{**common, **changes})), **options)

    common = {**common, "max_tokens": CONTEXT - len(prompt) if case["end"] == "context" else 40}
    if case["end"] == "token":
        said = one().tokens
        common = {**common, "stop_tokens": (max(said, key=said.index),)}
    elif case["end"] == "few":
        common = {**common, "max_tokens": 3}
    settings = {name: case[name] for name in ("speculate", "width", "controller", "gate")}
    recorded, real = one(speculate=case["recorded"], record="replay", width=15), one(**settings)
    same(recorded, real, params_of(**{**common, **settings}))
    stays = case["overlap"] and case["sampling"] in ("loops", "varies") and case["speculate"] in ("hybrid", "mtp")
    assert (stays and not case["gate"]) or not any(entry.resumed for entry in real.rounds)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("drafter", ["hybrid", "dspark"])
def test_any_run_replays_as_any_other(drafter: str, data: st.DataObject, late: dict[str, Engine]) -> None:
    prompt = data.draw(st.lists(st.sampled_from([65, 66, 67]), min_size=1, max_size=140))
    asked = data.draw(
        st.fixed_dictionaries(
            {
                "max_tokens": st.integers(1, 30),
                "temperature": st.sampled_from([0.0, 0.7]),
                "seed": st.integers(0, 99),
                "stop_tokens": st.sampled_from([(), (67,), (68,)]),
            }
        )
    )
    chosen = st.tuples(st.integers(1, 40), st.sampled_from(FROM_COUNTS))
    (width, controller), (first, _) = data.draw(chosen), data.draw(chosen)
    recorded = run(
        late[drafter], prompt, params_of(**asked, speculate=drafter, record="replay", width=max(first, width))
    )
    params = params_of(**asked, speculate=drafter, width=width, controller=controller)
    same(recorded, run(late[drafter], prompt, params), params)


@pytest.fixture(scope="module")
def late(numba_ops: Ops, behind: Behind) -> dict[str, Engine]:
    """Engines on a late device, for many runs."""
    return {name: engine_of(name, behind(numba_ops(1)), prefix_cache=False) for name in ("hybrid", "dspark")}


# --- seconds ----------------------------------------------------------------------------------------------------------------------


def test_steps_that_draft_on_the_device_are_costs_of_their_own(numba_ops: Ops, behind: Behind) -> None:
    engine, prompt = engine_of("mtp", behind(numba_ops(1)), prefix_cache=False), prompt_of(4, 130)
    recorded = run(engine, prompt, params_of(record="replay"))
    params = params_of(speculate="mtp", width=3, controller="fixed")
    foreign = what_if(recorded, RecordedCosts.of([recorded]), speculate="mtp", width=3, controller="fixed")
    assert "No step of 2, 4 rows with drafts of 'mtp' made on the device" in foreign.reason
    real = run(engine, prompt, params)
    costs = RecordedCosts.of([recorded, real])
    resumed = [entry for entry in real.rounds if entry.resumed]
    assert set(costs.rounds) == {("mtp", entry.rows, False) for entry in resumed}
    assert all(entry.draft_s == 0 for entry in replay(recorded, params, costs) if entry.resumed), "it is in the step"
    assert set(costs.steps) == {1} | {entry.rows for entry in real.rounds[1:] if not entry.resumed}


def test_a_controller_that_weighs_seconds_decides_by_those(numba_ops: Ops, behind: Behind) -> None:
    engine, prompt = engine_of("mtp", behind(numba_ops(1)), prefix_cache=False), prompt_of(4, 130)
    recorded = run(engine, prompt, params_of(record="replay"))
    steps = {1: 1.0}
    cheap, dear = (
        RecordedCosts(steps, {}, rounds={("mtp", width + 1, False): seconds for width in (1, 3, 7, 15)})
        for seconds in (1.0, 50.0)
    )
    free, paid = (what_if(recorded, costs, speculate="mtp", width=15, controller="cost") for costs in (cheap, dear))
    assert sum(len(entry.emitted) for entry in free.rounds) == len(recorded.tokens)
    assert free.drafted > 1.5 * paid.drafted, "drafts that cost more are made less often"
    assert any("decides by measured seconds" in caveat for caveat in free.caveats)
    with pytest.raises(ReplayRefused, match="no step of 16 rows was measured"):
        what_if(recorded, RecordedCosts(steps, {}), speculate="mtp", controller="governor")


def test_medians_tell_steps_apart() -> None:
    record = run_record(60, drafter="mtp")
    rounds = tuple(
        msgspec.structs.replace(entry, resumed=bool(entry.drafted) and entry.rows != 5, light=entry.rows == 3)
        for entry in record.rounds
    )
    costs = RecordedCosts.of([msgspec.structs.replace(record, rounds=rounds)])
    assert {rows for _, rows, light in costs.rounds if light} == {3}
    assert {rows for _, rows, light in costs.rounds if not light} == {2, 4, 6, 7}
    assert set(costs.steps) == {1, 5}, "of steps without drafts, and of those that were drafted before"
    own = RecordedRounds(costs, "mtp")
    assert own.light.staircase(1, 4) == [costs.step(1), None, costs.resumed("mtp", 3, light=True), None]
    assert own.heavy.step(3) is None and own.heavy.step(4) == costs.resumed("mtp", 4, light=False)
    assert RecordedRounds(costs, "ngram").heavy.staircase(1, 3) == [costs.step(1), None, None]


def test_drafts_that_no_device_was_asked_for_are_refused() -> None:
    """A drafter whose logits held NaN said fewer; what a device takes in their place is not known."""
    table = DraftTable(first=3, width=5, drafts=((1, 2),), confidence=((),), notes=("",), most=15)
    drafter = TabledOnDevice("mtp", table)
    assert drafter.onward([1, 1, 1], 2, False) == (1, 2)
    with pytest.raises(ReplayRefused, match=r"drafts\['mtp'\]: 2 behind 3 tokens, and 4 are made.*NaN"):
        drafter.onward([1, 1, 1], 4, False)
