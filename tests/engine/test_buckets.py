"""The setting `buckets`: what steps are padded to. It changes shapes, and never a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.compilers import Asked
from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.graphs import LONG
from power_lab.engine.rehearsal import rehearse
from power_lab.engine.request import SamplingParams
from power_lab.engine.runner import Launched, Runner, Sizes
from power_lab.engine.trace import EngineFacts
from power_lab.errors import ConfigError
from power_lab.kernels.ops import Ops
from tests import drafters, tiny

STEP = 48
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6] * 9, [2, 7, 1, 8, 2, 8] * 3, [1, 6, 1, 8])
BUCKETS = st.sets(st.integers(1, STEP), min_size=1, max_size=8).map(lambda rows: tuple(sorted(rows)))


def engine_of(ops: Ops, **options: Any) -> Engine:
    made = drafters.KINDS["mtp"](tiny.Shape(scale=1.2), ops)
    return drafters.engine(made, step_tokens=STEP, max_batch=3, kv_tokens=1024, context=256, **options)


def outputs(engine: Engine, speculate: Sequence[str]) -> list[tuple[int, ...]]:
    params = [
        SamplingParams(max_tokens=12, temperature=at * 0.5, seed=at, speculate=drafter, width=3, ignore_eos=True)  # type: ignore[arg-type]
        for at, drafter in enumerate(speculate)
    ]
    tickets = [engine.submit(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    return [ticket.result().tokens for ticket in tickets]


@settings(max_examples=12, deadline=None)
@given(
    buckets=BUCKETS,
    speculate=st.lists(st.sampled_from(["off", "ngram", "mtp"]), min_size=3, max_size=3),
    late=st.booleans(),
)
def test_outputs_are_the_same_in_all_buckets(
    buckets: tuple[int, ...],
    speculate: list[str],
    late: bool,
    numba_ops: Callable[[int], Ops],
    behind: Callable[[Ops], Ops],
) -> None:
    """On a device that is waited for, where nothing is padded by itself, and on one that runs behind, whose table they replace."""
    ops = behind(numba_ops(1)) if late else numba_ops(1)
    plain, padded = engine_of(numba_ops(1)), engine_of(ops, buckets=buckets)
    assert outputs(padded, speculate) == outputs(plain, speculate)
    stats = padded.shape_stats()
    long = [one for one in stats if one.shape.rows > buckets[-1]]
    assert {one.shape.rows for one in stats if one not in long} <= set(buckets)
    assert all(one.eager.keys() == {LONG} and not one.captures for one in long), "a path with a name"
    assert padded.shapes().planned.declared == buckets  # type: ignore[union-attr]
    padded.check()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"buckets": (4, 2)}, "not ascending"),
        ({"buckets": (2, 2)}, "not ascending"),
        ({"buckets": (0, 2)}, "not ascending"),
        ({"buckets": (1, 513)}, "no step has 513 rows: step_tokens is 512"),
        ({"buckets": tuple(range(1, 200))}, "199 are more than the 128"),
        ({"buckets": (1, 2), "graph_mb": 0}, "graph_mb is 0"),
        ({"buckets": (1, 2), "mode": "fast"}, "mode is fast"),
    ],
)
def test_buckets_that_cannot_act_are_refused(wrong: dict[str, Any], why: str) -> None:
    for make in (EngineConfig.of, lambda changes: EngineConfig(**changes)):
        with pytest.raises(ConfigError, match=why) as caught:
            make(wrong)
        assert caught.value.key == "buckets" and caught.value.remedy


def test_buckets_are_row_counts() -> None:
    for wrong in ([1, 2], (1, 2.0), (True,), 4):
        with pytest.raises(ConfigError, match="not a tuple of row counts"):
            EngineConfig(buckets=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Expected") as caught:
        EngineConfig.of({"buckets": "1, 2"})
    assert caught.value.key.startswith("buckets")


def test_buckets_cross_the_socket_and_tell_engines_apart() -> None:
    config = EngineConfig.of({"buckets": [1, 2, 8]})
    assert config == EngineConfig(buckets=(1, 2, 8)) != EngineConfig()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    assert EngineConfig.of({**config.asked(), "threads": 2}).buckets == (1, 2, 8)


def test_kernels_are_compiled_for_the_buckets_that_steps_are_padded_to(
    numba_ops: Callable[[int], Ops], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: set[int] = set()
    launch = Runner.launch

    def seen(self: Runner, *arguments: Any) -> Launched:
        launched = launch(self, *arguments)
        rows.add(launched.shape.rows)
        return launched

    monkeypatch.setattr(Runner, "launch", seen)
    monkeypatch.setattr("power_lab.engine.rehearsal.probe", lambda *_: None)  # it would need weights
    rehearse(tiny.loaded(tiny.Shape(layers=1), numba_ops(1)).model, Sizes(8, 8, 3, 64), buckets=(3, 8))
    assert rows == {3, 8}
    same = {"model": "", "digest": "", "context": 64, "vocab": 258, "capability": 90}
    asked = [Asked(config=EngineConfig(buckets=buckets), **same) for buckets in ((), (3, 8), (3, 9))]  # type: ignore[arg-type]
    assert len({one.mark for one in asked}) == 3


def test_an_engine_of_a_file_records_its_buckets_as_text(smollm2_path: Path) -> None:
    """Facts cross the socket, and receipts hold them: their settings are numbers and words."""
    config = EngineConfig(model=str(smollm2_path), device="cpu", draft="", kv_tokens=256, threads=1, buckets=(1, 4))
    engine = Engine(config, threaded=False)
    try:
        facts = msgspec.msgpack.decode(msgspec.msgpack.encode(engine.facts), type=EngineFacts)
        assert facts.config["buckets"] == "1, 4"
        assert engine.generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)).finish == "length"
        assert {one.shape.rows for one in engine.shape_stats()} == {1, 4}
    finally:
        engine.close()


def test_an_engine_tells_its_buckets_and_why(numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops]) -> None:
    def told(ops: Ops, **options: Any) -> tuple[str, str]:
        engine = tiny.engine(tiny.Shape(), ops, **options)
        (found,) = [one for one in engine.explain() if one.key == "buckets"]
        assert found.owner == "backend"
        return found.value, found.reason

    late = behind(numba_ops(1))
    assert told(numba_ops(1), buckets=(2, 8)) == (
        "2, 8",
        "as asked; steps of more than 8 rows run operation by operation",
    )
    value, reason = told(numba_ops(1))
    assert value == "1 to 64" and "nothing is padded" in reason
    value, reason = told(late)
    assert value == ", ".join(map(str, late.row_buckets)) and "this device's table" in reason
    assert told(late, graph_mb=0) == ("none", "no step is recorded")
