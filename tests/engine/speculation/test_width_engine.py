"""Controllers in the engine: what they choose is in the trace, costs are measured, and no token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.width import Choice, Costs, WidthAsk
from power_lab.engine.speculation.width.fixed import FixedController
from power_lab.engine.trace import Round, RunRecord
from power_lab.errors import ConfigError
from power_lab.kernels.ops import Ops
from tests import tiny
from tests.engine.test_exactness import prompt_of

PROMPT = prompt_of(3, 230)
PARAMS = SamplingParams(max_tokens=90, speculate="ngram", ignore_eos=True)


def with_controller(name: str, **settings: Any) -> SamplingParams:
    return msgspec.structs.replace(PARAMS, controller=name, **settings)


@pytest.mark.parametrize("controller", ["cost", "adaptive", "governor", "fixed"])
def test_each_round_tells_its_width_and_why(controller: str, numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(), numba_ops(2))
    plain = engine.generate(PROMPT, with_controller("fixed", speculate="off"))
    assert all((round_.width, round_.why) == (-1, "") for round_ in plain.rounds)
    record = engine.generate(PROMPT, with_controller(controller))
    assert record.tokens == plain.tokens
    prompt, *rounds = record.rounds
    assert prompt.width == -1
    for round_ in rounds:
        if round_.note == "no room: prompt or last token":
            assert (round_.width, round_.why) == (-1, "")
            continue
        assert len(round_.drafted) <= round_.width <= PARAMS.width
        assert round_.why.startswith(f"{round_.width}: ")
        assert bool(round_.note) == (not round_.drafted)
    assert any(round_.drafted for round_ in rounds)


def test_a_batch_of_controllers_says_what_each_says_alone(numba_ops: Callable[[int], Ops]) -> None:
    names = ("cost", "adaptive", "governor", "fixed", "cost")
    asked = [(prompt_of(at, 100 + at), with_controller(name, width=2 + at)) for at, name in enumerate(names)]
    alone = [tiny.engine(tiny.Shape(), numba_ops(2)).generate(*each).tokens for each in asked]
    engine = tiny.engine(tiny.Shape(), numba_ops(2))
    assert [ticket.result().tokens for ticket in [engine.submit(*each) for each in asked]] == alone


def test_costs_are_measured_and_told(numba_ops: Callable[[int], Ops]) -> None:
    engine = tiny.engine(tiny.Shape(), numba_ops(2))
    told = {decision.key: decision for decision in engine.explain()}
    assert told["step_costs"].value == "not measured yet"
    assert told["width"].value == "cost, adaptive, governor, fixed"
    engine.generate(PROMPT, with_controller("fixed"))
    points = engine._costs.points()
    assert points.keys() >= {1, 2} and all(seconds > 0 for seconds in points.values())
    assert (engine._costs.draft("ngram", 1, 4) or 0.0) > 0
    assert {decision.key: decision for decision in engine.explain()}["step_costs"].value.startswith("1: ")


def test_a_controller_sees_every_round_and_its_seconds(numba_ops: Callable[[int], Ops]) -> None:
    seen: list[tuple[int, int, float]] = []

    class Watching(FixedController):
        def observe(self, request_id: int, drafted: int, accepted: int, seconds: float) -> None:
            seen.append((drafted, accepted, seconds))

    engine = tiny.engine(tiny.Shape(), numba_ops(2))
    engine._proposer._make_controller = lambda _: Watching()
    record = engine.generate(PROMPT, with_controller("fixed"))
    rounds = [round_ for round_ in record.rounds if round_.width >= 0]
    assert [(drafted, accepted) for drafted, accepted, _ in seen] == [(len(r.drafted), r.accepted) for r in rounds]
    assert all(seconds >= r.forward_s + r.draft_s for (_, _, seconds), r in zip(seen, rounds, strict=True))


def test_a_controller_that_raises_costs_no_request(numba_ops: Callable[[int], Ops]) -> None:
    class Failing(FixedController):
        def ask(self, asks: Sequence[WidthAsk], other_rows: int, costs: Costs) -> list[Choice]:
            raise RuntimeError("planted")

    engine = tiny.engine(tiny.Shape(), numba_ops(2))
    want = engine.generate(PROMPT, with_controller("fixed", speculate="off"))
    engine._proposer._make_controller = lambda _: Failing()
    record = engine.generate(PROMPT, with_controller("fixed"))
    assert (record.tokens, record.finish) == (want.tokens, "length")
    assert record.rounds[1].note == "fixed failed: RuntimeError: planted"


def test_a_controller_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"controller: 'wide'.*Use one of cost, adaptive, governor, fixed"):
        SamplingParams(controller="wide")  # type: ignore[arg-type]


def test_records_from_before_controllers_still_read(numba_ops: Callable[[int], Ops]) -> None:
    record = tiny.engine(tiny.Shape(layers=1), numba_ops(2)).generate([1, 2, 3], SamplingParams(max_tokens=3))
    stored = msgspec.to_builtins(record, str_keys=True)
    for round_ in stored["rounds"]:
        del round_["width"], round_["why"]
    read = msgspec.json.decode(msgspec.json.encode(stored), type=RunRecord)
    assert isinstance(read.rounds[0], Round) and (read.rounds[0].width, read.rounds[0].why) == (-1, "")
    assert read.rounds == record.rounds
