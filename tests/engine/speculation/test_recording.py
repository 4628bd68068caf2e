"""Runs recorded for replay: what is recorded of every drafter, replayed, is what a real run does; nobody else is touched by recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.recorded import RecordedCosts
from power_lab.engine.speculation.replay import FROM_TOKENS, replay
from power_lab.engine.trace import RunRecord
from power_lab.errors import ConfigError, ReplayRefused
from power_lab.evidence.dataset import trace_dataset
from power_lab.run import Run
from power_lab.what_if import sweep, what_if
from tests import drafters, drafting, tiny
from tests.engine.speculation.test_replay import figures, prompt_of

SHAPE = tiny.Shape(layers=2, seed=2)
FEW = dict.fromkeys(range(65, 77), 12.0)  # favoured tokens: some drafts are right
READERS = tuple(name for name in drafting.DRAFTERS if name not in FROM_TOKENS)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"repetition_penalty": 1.05},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
OPTIONS: dict[str, Any] = {"kv_tokens": 2048, "step_tokens": 64, "max_batch": 4, "context": 512}
Ops = Callable[[int], Any]


def engine_of(drafter: str, ops: Any, **options: Any) -> Engine:
    return drafting.engine(drafter, SHAPE, ops, **{**OPTIONS, **options})


def known(record: RunRecord, **options: Any) -> RunRecord:
    """As a loaded model's record is: with the engine's settings."""
    config = EngineConfig(**{**OPTIONS, **options}).told()
    return msgspec.structs.replace(record, engine=msgspec.structs.replace(record.engine, config=config))


def params_of(sampling: str, **changes: Any) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, "seed": 5, "logit_bias": FEW, "width": 15}
    return SamplingParams(**{**common, **SAMPLINGS[sampling], "controller": "fixed", **changes})


def same(recorded: RunRecord, real: RunRecord, params: SamplingParams) -> None:
    assert recorded.tokens == real.tokens
    assert figures(replay(recorded, params, RecordedCosts.of([recorded]))) == figures(real.rounds)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", READERS)
def test_a_replay_of_every_drafter_is_what_a_real_run_does(drafter: str, sampling: str, numba_ops: Ops) -> None:
    ops, prompt = numba_ops(1), prompt_of(3, 65)
    recorded = known(engine_of(drafter, ops).generate(prompt, params_of(sampling, record="replay")))
    settings = [(width, "fixed", 0.0) for width in (1, 2, 3, 5, 7, 15)] + [(15, "adaptive", 0.0)]
    settings += [(15, "fixed", 0.02), (7, "fixed", 0.3), (15, "adaptive", 0.1)]
    accepted = 0
    for width, controller, gate in settings:
        asked: dict[str, Any] = {"speculate": drafter, "width": width, "controller": controller, "gate": gate}
        params = params_of(sampling, **asked)
        real = engine_of(drafter, ops).generate(prompt, params)
        same(recorded, real, params)
        accepted += sum(entry.accepted for entry in real.rounds)
    assert accepted, "windows that are all refused would prove little"


VARIANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "blocks that see all of themselves": ("dflash", lambda ops: drafters.block_drafter(SHAPE, ops, causal=False)),
    "filters over whole blocks": (
        "dflash2",
        lambda ops: drafters.block_drafter(SHAPE, ops, causal=False, **drafters.FILTERS),
    ),
    "blocks whose anchor drafts": ("dflash", lambda ops: drafters.block_drafter(SHAPE, ops, from_anchor=True)),
    "windows": ("dspark", lambda ops: drafters.block_drafter(SHAPE, ops, markov_rank=8, window=9)),
    "several heads": ("mtp", lambda ops: drafters.mtp_drafter(SHAPE, ops, layers=3, normed_chain=True)),
    "two names": ("dflash", lambda ops: drafters.block_drafter(SHAPE, ops, markov_rank=8)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafters_of_other_kinds(variant: str, numba_ops: Ops) -> None:
    """Behind a prompt whose last token is in a step of its own, at the widths of one run that used the drafter itself."""
    drafter, made = VARIANTS[variant]
    loaded, prompt = made(numba_ops(1)), prompt_of(6, 129)
    asked: dict[str, Any] = {"speculate": drafter, "record": "replay"}
    recorded = known(drafters.engine(loaded, **OPTIONS).generate(prompt, params_of("sampled", **asked)))
    assert set(recorded.drafts) - {"hybrid"} == set(loaded.trained.serves)  # type: ignore[union-attr]
    for name in recorded.drafts:
        for width in (2, 6, 15):
            params = params_of("sampled", speculate=name, width=width)
            real = drafters.engine(loaded, **OPTIONS).generate(prompt, params)
            same(recorded, real, params)


@pytest.mark.parametrize("prompt", [63, 64, 200, 300])
def test_a_draft_model_that_reads_a_long_prompt_first(prompt: int, numba_ops: Ops) -> None:
    ops, params = numba_ops(1), params_of("greedy", speculate="draft-model", width=4)
    recorded = known(engine_of("draft-model", ops).generate(prompt_of(8, prompt), params_of("greedy", record="replay")))
    real = engine_of("draft-model", ops).generate(prompt_of(8, prompt), params)
    assert any("has read" in entry.note for entry in real.rounds) == (prompt > 63)
    same(recorded, real, params)


# --- among others -----------------------------------------------------------------------------------------------------------------


def crowd(engine: Engine, drafter: str, record: bool) -> list[RunRecord]:
    """Seven requests of every sort that come one after another; every third one may be recorded."""
    tickets = []
    for at in range(7):
        speculate = (drafter, "off", "lookup")[at // 3 % 3]
        asked: dict[str, Any] = {"speculate": speculate, "max_tokens": 40 + 9 * at, "width": 1 + at}
        recording = "replay" if record and at % 3 == 0 else ""
        params = params_of("sampled" if at % 2 else "greedy", record=recording, **asked)
        tickets.append(engine.submit(prompt_of(at % 4, 40 + 30 * (at % 4)), params))
        for _ in range(3):
            engine.step()
            engine.check()
    records = [ticket.result() for ticket in tickets]
    engine.check()
    return records


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("drafter", READERS)
def test_neighbours_are_as_they_were(drafter: str, late: bool, numba_ops: Ops, behind: Callable[[Any], Any]) -> None:
    """Whatever runs beside it, shares its prefix, or preempts it: what is recorded and what is said are the same. So are the drafts of
    requests that find the prefix of a recorded one in the cache."""
    ops = behind(numba_ops(1)) if late else numba_ops(1)
    crowded: dict[str, Any] = {"kv_tokens": 320, "max_batch": 3, "context": 256}
    engine = engine_of(drafter, ops, **crowded)
    records, plain = crowd(engine, drafter, True), crowd(engine_of(drafter, ops, **crowded), drafter, False)
    assert [record.tokens for record in records] == [record.tokens for record in plain]
    assert any(record.preemptions for record in records[::3])
    assert [bool(record.drafts) for record in records] == [at % 3 == 0 for at in range(7)]
    assert not engine._stepper.recorder.pending and not engine._scheduler.kept
    for record in records[::3]:
        assert record.drafts[drafter].cut == ""
        params = msgspec.convert(record.params, SamplingParams, strict=False)
        alone = engine_of(drafter, ops).generate(record.prompt_tokens, params)
        assert tables(alone) == tables(record)
    question = prompt_of(7, 130)
    first = engine.generate(question, params_of("greedy", record="replay"))
    again = params_of("greedy", speculate=drafter, width=9)
    warm, cold = engine.generate(question, again), engine_of(drafter, ops).generate(question, again)
    assert first.tokens == warm.tokens
    assert warm.cached == 128, "two blocks of the prompt, none of the output's"
    assert [(r.drafted, r.emitted) for r in warm.rounds] == [(r.drafted, r.emitted) for r in cold.rounds]


def tables(record: RunRecord) -> dict[str, Any]:
    """Without times."""
    return {name: msgspec.structs.replace(table, calls=()) for name, table in record.drafts.items()}


def test_others_step_on_while_a_request_is_recorded(numba_ops: Ops) -> None:
    engine = engine_of("mtp", numba_ops(1))
    recorded = engine.submit(prompt_of(1, 30), params_of("greedy", record="replay", max_tokens=40))
    other = engine.submit(prompt_of(2, 30), params_of("greedy", max_tokens=120))
    while not engine._stepper.recorder.pending:
        engine.step()
    said = other._live.request.emitted
    for _ in range(20):
        engine.step()
    assert other._live.request.emitted == said + 20
    assert not recorded._live.done.is_set()
    assert other.result().drafts == {}
    assert recorded.result().drafts["mtp"].cut == ""


def test_an_engine_with_its_own_thread_records_when_nothing_else_is_to_be_done(numba_ops: Ops) -> None:
    loaded = drafting.EQUIPMENT["mtp"](SHAPE, numba_ops(1))
    params = params_of("greedy", record="replay", max_tokens=30)
    alone = drafters.engine(loaded, **OPTIONS).generate(prompt_of(1, 30), params)
    engine = Engine(EngineConfig(**OPTIONS), loaded=loaded)
    try:
        records = [ticket.result(60) for ticket in [engine.submit(prompt_of(1, 30), params) for _ in range(6)]]
    finally:
        engine.close()
    assert [tables(record) for record in records] == [tables(alone)] * 6


def test_a_step_that_fails_leaves_recordings_alone(numba_ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("mtp", numba_ops(1))
    ticket = recording(engine)
    other = engine.submit(prompt_of(2, 30), params_of("greedy"))

    def fail(*args: Any) -> None:
        raise OSError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "collect", fail)
        engine.step()
    assert other.result().finish == "error"
    assert ticket.result().drafts["mtp"].cut == ""
    engine.check()


def test_one_that_is_not_even_added_is_told_without(numba_ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault between the commit that ends a request and its recording: its blocks come back, and it is told what it said."""
    engine = engine_of("mtp", numba_ops(1))
    ticket = engine.submit(prompt_of(1, 30), params_of("greedy", record="replay", max_tokens=40))

    def fail(*args: Any) -> None:
        raise OSError("planted")

    monkeypatch.setattr(engine._stepper.recorder, "add", fail)
    record = ticket.result()
    assert len(record.tokens) == 40 and record.drafts == {}
    assert not engine._scheduler.kept and engine._scheduler.pool.used == 0
    engine.check()


def test_a_caller_may_close_the_engine_when_a_recording_is_done(numba_ops: Ops) -> None:
    engine = engine_of("mtp", numba_ops(1))
    asked = params_of("greedy", record="replay", max_tokens=30)
    first = engine.submit(prompt_of(1, 30), asked, on_done=lambda _: engine.close())
    second = engine.submit(prompt_of(2, 30), msgspec.structs.replace(asked, max_tokens=60))
    assert first.result().drafts["mtp"].cut == ""
    record = second.result()
    assert record.finish == "cancelled" or record.drafts["mtp"].cut


# --- where it ends early, or is not asked for -------------------------------------------------------------------------------------


def recording(engine: Engine, steps: int = 3, **options: Any) -> Any:
    """A request that is over and in the middle of being recorded."""
    ticket = engine.submit(prompt_of(1, 30), params_of("greedy", record="replay", max_tokens=40), **options)
    while not engine._stepper.recorder.pending:
        engine.step()
    for _ in range(steps):
        engine.step()
    assert not ticket._live.done.is_set()
    return ticket


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
@pytest.mark.parametrize("drafter", READERS)
def test_a_recording_that_is_cut_off_says_so(drafter: str, how: str, numba_ops: Ops) -> None:
    now = 0.0
    loaded = drafting.EQUIPMENT[drafter](SHAPE, numba_ops(1))
    engine = drafters.engine(loaded, **OPTIONS, clock=lambda: now)
    ticket = recording(engine, deadline_s=5.0)
    if how == "cancel":
        ticket.cancel()
    elif how == "deadline":
        now = 6.0
    else:
        engine.close()
    record = ticket.result()
    assert record.finish == "length" and len(record.tokens) == 40
    assert 0 < len(record.drafts[drafter].drafts) < 40
    with pytest.raises(
        ReplayRefused, match=rf"drafts\['{drafter}'\]: the request was cancelled.*again with record=\"replay\""
    ):
        replay(known(record), params_of("greedy", speculate=drafter, max_tokens=40), RecordedCosts({}, {}))
    assert not engine._scheduler.kept and not engine._stepper.recorder.pending
    if how != "close":
        engine.check()
        assert engine.generate(prompt_of(1, 30), params_of("greedy", max_tokens=40)).tokens == record.tokens


@pytest.mark.parametrize("method", ["begin", "propose", "end"])
def test_a_drafter_that_fails_costs_its_part_alone(
    method: str, numba_ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = drafters.engine(VARIANTS["two names"][1](numba_ops(1)), **OPTIONS)
    params = params_of("greedy", record="replay", max_tokens=20)
    whole = engine.generate(prompt_of(1, 30), params)

    def fail(*args: Any) -> None:
        raise OSError("planted")

    monkeypatch.setattr(engine._stepper.recorder._drafters["dspark"], method, fail)
    record = engine.generate(prompt_of(1, 30), params)
    engine.check()
    assert record.tokens == whole.tokens
    assert tables(record)["dflash"] == tables(whole)["dflash"]
    assert record.drafts["dspark"].cut == ("" if method == "end" else "dspark failed: OSError: planted")


def test_nothing_is_recorded_where_nobody_asked_or_nothing_is_needed(numba_ops: Ops) -> None:
    engine = engine_of("mtp", numba_ops(1))
    plain = engine.generate(prompt_of(1, 100), params_of("greedy", speculate="mtp"))
    assert plain.drafts == {}
    with pytest.raises(
        ReplayRefused, match=r"'mtp' drafts from more than.*off, lookup, ngram, or run.*record=\"replay\".*'mtp'"
    ):
        replay(plain, params_of("greedy", speculate="mtp"), RecordedCosts({}, {}))
    with pytest.raises(ReplayRefused, match="'auto' is another drafter"):
        replay(plain, params_of("greedy", speculate="auto"), RecordedCosts({}, {}))
    tokens_only = engine_of("lookup", numba_ops(1))
    ticket = tokens_only.submit(prompt_of(1, 100), params_of("greedy", record="replay"))
    assert not ticket._live.request.recorded
    assert ticket.result().drafts == {}
    with pytest.raises(ConfigError, match="record: 'all' is nothing that can be recorded"):
        SamplingParams(record="all")  # type: ignore[arg-type]


def test_a_replay_wider_than_the_record_is_refused(numba_ops: Ops) -> None:
    record = known(
        engine_of("draft-model", numba_ops(1)).generate(prompt_of(1, 30), params_of("greedy", record="replay", width=3))
    )
    with pytest.raises(ReplayRefused, match=r"width: 4, but no more than 3 drafts.*width=4, or use at most 3"):
        replay(record, params_of("greedy", speculate="draft-model", width=4), RecordedCosts({}, {}))


def test_a_drafter_with_blocks_shorter_than_the_record_has_all_widths(numba_ops: Ops) -> None:
    ops = numba_ops(1)
    record = known(engine_of("dflash", ops).generate(prompt_of(1, 30), params_of("greedy", record="replay", width=10)))
    params = params_of("greedy", speculate="dflash", width=40)
    same(record, engine_of("dflash", ops).generate(prompt_of(1, 30), params), params)


# --- what becomes of it -----------------------------------------------------------------------------------------------------------


def test_a_recorded_run_crosses_the_socket_and_has_its_drafts_in_the_trace(numba_ops: Ops) -> None:
    engine = drafters.engine(VARIANTS["two names"][1](numba_ops(1)), **OPTIONS)
    record = engine.generate(prompt_of(1, 30), params_of("sampled", record="replay", max_tokens=20))
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=RunRecord)
    assert crossed.drafts == record.drafts
    trace = trace_dataset(record)
    assert dict(trace.sizes) | {"drafter": 3, "known": 19, "place": 7} == dict(trace.sizes)
    table = record.drafts["dspark"]
    assert (table.first, table.width, len(table.drafts), table.reads) == (30, 15, 19, 0)
    for index in range(19):
        one = trace.sel(drafter="dspark", known=30 + index)
        count = len(table.drafts[index])
        assert count == min(7, 19 - index), "as many as there is room for"
        assert one.recorded_token.values.tolist() == [*table.drafts[index], *[-1] * (7 - count)]
        assert one.recorded_confidence.values[:count].tolist() == list(table.confidence[index])
        assert np.isnan(one.recorded_confidence.values[count:]).all()
    assert [drawn for drawn, _ in table.calls] == [min(7, 19 - index) for index in reversed(range(19))]


def test_an_output_of_one_token_has_hardly_anything_to_draft(numba_ops: Ops) -> None:
    engine = engine_of("mtp", numba_ops(1))
    assert (
        engine.generate(prompt_of(1, 30), params_of("greedy", record="replay", max_tokens=1)).drafts["mtp"].drafts == ()
    )
    two = engine.generate(prompt_of(1, 30), params_of("greedy", record="replay", max_tokens=2)).drafts["mtp"]
    assert two.first == 30 and [len(draft) for draft in two.drafts] == [1], "behind the prompt alone"


def test_what_ifs_of_a_recorded_run(numba_ops: Ops) -> None:
    """Widths of a run that did not speculate; seconds only once such drafts were measured."""
    ops, prompt = numba_ops(1), prompt_of(3, 65)
    run = Run(known(engine_of("mtp", ops).generate(prompt, params_of("sampled", record="replay"))))
    bare = msgspec.structs.replace(run.record, drafts=tables(run.record))
    steps = dict.fromkeys(range(1, 99), 1.0)
    plain = what_if(bare, RecordedCosts(steps, {}), speculate="mtp", width=3)
    assert plain.draft_source == "not measured" and np.isnan(plain.seconds)
    assert plain.reason.startswith("No draft of 3 tokens by 'mtp' was measured")
    own = RecordedCosts.of([run.record])
    assert what_if(bare, RecordedCosts(steps, {}, own.widths), speculate="mtp").tokens_per_s > 0, (
        "recording measures drafts"
    )
    assert own.draft("mtp", 1) == np.median([seconds for _, seconds in run.record.drafts["mtp"].calls])
    reals = [
        Run(known(engine_of("mtp", ops).generate(prompt, params_of("sampled", speculate="mtp", width=w))))
        for w in (1, 3, 7)
    ]
    result = run.what_if(speculate="mtp", width=3, costs_from=reals)
    assert result.draft_source == "recorded" and result.rounds[5].draft_s > 0
    assert (result.drafted, result.accepted) == (reals[1].drafted, reals[1].accepted)
    assert result.accepted > 5
    assert result.accepted_lengths == dict(reals[1].speculation.accepted_lengths)
    shown = result._repr_html_()
    assert "data:image/svg+xml" in shown and len(result.rounds) == len(reals[1].record.rounds)
    widths = run.what_if_widths([1, 3, 7], speculate="mtp", costs_from=reals)
    assert widths.accepted.values.tolist() == [real.accepted for real in reals]
    assert widths.rounds.values.tolist() == [len(real.record.rounds) for real in reals]
    both = sweep([run], speculate=["lookup", "mtp"], widths=[2], costs_from=reals)
    assert both.sel(drafter="mtp").rounds.item() == len(run.what_if(speculate="mtp", width=2).rounds)
    chosen = run.what_if(speculate="mtp", width=15, controller="cost", costs_from=reals)
    assert sum(len(entry.emitted) for entry in chosen.rounds) == len(run.tokens)
    assert any("decides by measured seconds" in caveat for caveat in chosen.caveats)


# --- gates ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", drafting.DRAFTERS)
def test_what_a_gate_would_have_done_is_foreseen_also_on_a_device_that_runs_behind(
    drafter: str, numba_ops: Ops, behind: Callable[[Any], Any]
) -> None:
    """Every drafter has something to say to a gate; the run with one is drafted on the host, whatever the device, and says the same."""
    ops, prompt = numba_ops(1), prompt_of(3, 65)
    free = params_of("greedy", speculate=drafter, record="replay", repetition_penalty=1.0, logit_bias={})
    recorded = known(engine_of(drafter, behind(ops)).generate(prompt, free))
    for gate in (0.02, 0.97):
        gated = msgspec.structs.replace(free, gate=gate, record="")
        reals = [engine_of(drafter, device).generate(prompt, gated) for device in (ops, behind(ops))]
        result = what_if(recorded, RecordedCosts.of([recorded]), gate=gate, controller="fixed")
        assert result.settings["gate"] == gate
        for real in reals:
            assert real.tokens == recorded.tokens
            assert figures(result.rounds) == figures(real.rounds)
            assert any(f"gate {gate:g}: draft" in entry.why for entry in real.rounds) or gate < 0.97
    every = [what_if(recorded, RecordedCosts({}, {}), gate=gate).drafted for gate in (0.0, 0.5, 1.0)]
    assert every[0] > every[2] and every[1] >= every[2]


def test_drafts_that_a_gate_cut_do_not_tell_what_such_drafts_cost(numba_ops: Ops) -> None:
    engine = engine_of("mtp", numba_ops(1))
    free, gated = (
        known(engine.generate(prompt_of(3, 65), params_of("greedy", speculate="mtp", gate=gate)))
        for gate in (0.0, 0.01)
    )
    assert ("mtp", 15) in RecordedCosts.of([free]).widths
    assert any(entry.drafted for entry in gated.rounds) and not RecordedCosts.of([gated]).widths
