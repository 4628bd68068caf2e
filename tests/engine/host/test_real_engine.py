"""The real engine behind the host: the same tokens as in process, whatever happens around a run."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from power_lab.engine.config import EngineConfig, HostSettings, Paths
from power_lab.engine.host.remote import RemoteEngine
from power_lab.engine.request import SamplingParams
from power_lab.engine.vitals import LensAsk
from power_lab.errors import CapacityError, ConfigError, EngineClosed, HostUnavailable, PowerLabError
from tests import tiny
from tests.engine.host.tiny_engine import SHAPE
from tests.hosting import Home, eventually, kill, raises

FACTORY = f"{Path(__file__).parent / 'tiny_engine.py'}:make"
SETTINGS = EngineConfig(model="tiny", kv_tokens=2048, step_tokens=64)
PROMPT = list(b"a tiny prompt for a tiny model")


@pytest.fixture
def engine(home: Home) -> RemoteEngine:
    home.settings = HostSettings(factory=FACTORY, client="test")
    home.paths = Paths(
        Paths.default().cache, home.paths.runtime, home.paths.state
    )  # kernels are compiled once a machine
    return connected(home)


def connected(home: Home) -> RemoteEngine:
    client = home.client()
    return RemoteEngine(client, client.load(SETTINGS))


@pytest.mark.parametrize("speculate", ["off", "lookup"])
def test_the_host_gives_the_tokens_of_the_engine_in_process(engine: RemoteEngine, numba_ops, speculate):
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=3, logprobs=2, speculate=speculate)
    here = tiny.engine(SHAPE, numba_ops(2), step_tokens=64).generate(PROMPT, params)
    pieces: list[str] = []
    there = engine.submit(PROMPT, params).result(on_delta=lambda delta: pieces.append(delta.text))
    assert (there.tokens, there.text, there.pieces, there.finish) == (here.tokens, here.text, here.pieces, here.finish)
    assert [round_.logprobs for round_ in there.rounds] == [round_.logprobs for round_ in here.rounds]
    assert "".join(pieces) == there.text


def test_a_cancelled_run_is_a_prefix_and_leaves_the_pool_clean(engine: RemoteEngine):
    params = SamplingParams(max_tokens=900, ignore_eos=True, temperature=1.0, seed=4)
    run = engine.submit(PROMPT, params)
    record = run.result(on_delta=lambda delta: run.cancel())
    whole = engine.submit(PROMPT, params).result()
    assert record.finish == "cancelled"
    assert 0 < len(record.tokens) < 900
    assert whole.tokens[: len(record.tokens)] == record.tokens
    status = engine.status()
    assert (status.running, status.waiting, status.used_blocks) == (0, 0, 0)


def test_a_batch_over_two_clients_gives_the_tokens_that_each_gives_alone(engine: RemoteEngine, home: Home):
    other = connected(home)
    assert other.key == engine.key
    prompts = [PROMPT[i:] for i in range(8)]
    params = [SamplingParams(max_tokens=30, temperature=0.8, seed=i) for i in range(8)]
    together = [(engine, other)[i % 2].submit(prompts[i], params[i]) for i in range(8)]
    tokens = [run.result().tokens for run in together]
    assert tokens == [engine.submit(prompts[i], params[i], cache_key="cold").result().tokens for i in range(8)]


def test_errors_of_the_engine_come_back_typed(engine: RemoteEngine):
    with pytest.raises(CapacityError):
        engine.submit(PROMPT, SamplingParams(max_tokens=100_000)).result()
    with pytest.raises(ConfigError):
        engine.submit([10_000_000], SamplingParams()).result()
    with pytest.raises(PowerLabError):
        engine.submit([], SamplingParams()).result()
    record = engine.submit(PROMPT, SamplingParams(max_tokens=900, ignore_eos=True), deadline_s=0.01).result()
    assert record.finish == "deadline"


def test_inspectors_are_told_the_same_as_in_process(engine: RemoteEngine, numba_ops):
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=3, speculate="lookup", controller="fixed")
    here = tiny.engine(SHAPE, numba_ops(2), kv_tokens=2048, step_tokens=64)
    prompt = PROMPT * 5
    for one in (here.submit(prompt, params), engine.submit(prompt, params)):
        record = one.result()
    theirs, mine = engine.steps(), here.steps()
    assert [(step.number, step.rows, step.tokens, step.how) for step in theirs] == [
        (step.number, step.rows, step.tokens, step.how) for step in mine
    ]
    assert engine.shapes().demand == here.shapes().demand
    nodes, ours = engine.prefixes().nodes, here.prefixes().nodes
    assert [(node.hash, node.tokens, node.eviction) for node in nodes] == [
        (node.hash, node.tokens, node.eviction) for node in ours
    ]
    asked = [*prompt, 1]
    there = engine.lookup(asked)
    assert (there.served, there.reason, there.blocks) == (
        (len(prompt)) // 64 * 64,
        "last-block",
        here.lookup(asked).blocks,
    )
    ask = LensAsk.of(record, len(prompt) + 3)
    assert engine.lens(ask) == here.lens(ask) and engine.lens(ask).exact
    assert "position" in str(raises(ConfigError, lambda: engine.lens(msgspec.structs.replace(ask, position=0))))


def test_a_stopped_and_a_released_engine_end_their_runs_at_a_step(engine: RemoteEngine, home: Home):
    params = SamplingParams(max_tokens=900, ignore_eos=True, temperature=1.0, seed=4)
    whole = engine.submit(PROMPT, params).result().tokens
    other = home.client()
    for end in (other.stop_runs, other.release):
        begun = threading.Event()
        run = engine.submit(PROMPT, params, on_delta=lambda delta, begun=begun: begun.set())
        assert begun.wait(30)
        end(engine.key)
        record = run.result()
        assert record.finish == "cancelled" and 0 < len(record.tokens) < 900
        assert record.tokens == whole[: len(record.tokens)]
    assert "closed by" in str(raises(EngineClosed, engine.status))
    again = connected(home)
    assert again.submit(PROMPT, params).result().tokens == whole


def test_the_engine_tells_of_itself(engine: RemoteEngine):
    engine.submit(PROMPT, SamplingParams(max_tokens=70, ignore_eos=True)).result()
    assert {decision.key for decision in engine.explain()} >= {"mode", "kv_tokens"}
    assert engine.memory().total > 0
    assert any(block.state == "cached" for block in engine.blocks())
    assert engine.status().tokens >= 70
    assert engine.tokenize("ab") == [97, 98]


def test_a_killed_host_comes_back_with_the_same_tokens(engine: RemoteEngine, home: Home):
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=8)
    before = engine.submit(PROMPT, params).result().tokens
    run = engine.submit(PROMPT, SamplingParams(max_tokens=900, ignore_eos=True))
    kill(engine.client.pid)
    raises(HostUnavailable, run.result)
    assert connected(home).submit(PROMPT, params).result().tokens == before


def test_an_unloaded_engine_takes_its_memory_along(engine: RemoteEngine):
    client = engine.client
    engine.close()
    raises(EngineClosed, lambda: engine.submit(PROMPT, SamplingParams()).result())
    eventually(lambda: client.status().engines == ())
