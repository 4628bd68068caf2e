"""Rows are listed in groups once for all layers of a step: the GPU's engine through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from power_lab.engine.request import SamplingParams
from power_lab.kernels.triton import attention
from tests import tiny
from tests.engine.test_exactness import Oracle, Recorder, prompt_of
from tests.interpreted import InterpretedOps

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
SHAPE = tiny.Shape(kind="qwen2 windows")  # one layer sees everything, the other the last 50
PROMPT = prompt_of(3, 45)
SAID = SamplingParams(max_tokens=12, ignore_eos=True)
LISTED, SHARED = (1, 2, 0), (0, 0, 2)
"""Launches of a step: lists, and layers that take groups whole or share splits."""


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps of 3 rows take groups whole: few are enough for the interpreter."""
    monkeypatch.setattr(attention, "FULL", 3)
    _forget()
    yield
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    for cached in (attention.plan, attention.scratch_floats):
        cached.cache_clear()


def launches(ops: InterpretedOps) -> list[tuple[int, int, int]]:
    return [(step.count("list_groups"), step.count("attend_many"), step.count("attend_few")) for step in ops.steps]


@pytest.mark.usefixtures("early")
@pytest.mark.timeout(300)
def test_a_step_lists_its_groups_once_and_says_the_same() -> None:
    """Alone, listed nowhere but in the prompt; then two at once, in windows that are partly rejected, eager and captured."""
    alone, recorder = InterpretedOps(), Recorder()
    engine = tiny.engine(SHAPE, alone, prefix_cache=False, observer=recorder, graph_mb=0)
    plain = engine.submit(PROMPT, SAID).result()
    want = recorder.of(plain.id, [*PROMPT, *plain.tokens])
    assert launches(alone) == [LISTED, *[SHARED] * (len(plain.tokens) - 1)]

    ops, recorder = InterpretedOps(), Recorder()
    engine = tiny.engine(SHAPE, ops, step_tokens=50, prefix_cache=False, observer=recorder)
    engine._proposer._make = lambda _: Oracle([*PROMPT, *plain.tokens])
    drafted = msgspec.structs.replace(SAID, speculate="ngram", width=2, controller="fixed")
    for ticket in [engine.submit(PROMPT, drafted) for _ in range(2)]:
        record = ticket.result()
        assert record.tokens == plain.tokens
        got = recorder.of(record.id, [*PROMPT, *record.tokens])
        assert {at: got[at] for at in want} == want
    assert set(launches(ops)) <= {LISTED, SHARED} and launches(ops).count(LISTED) > 3
    replayed = {line.shape.rows for line in engine.shape_stats() if line.replays}
    assert max(replayed) >= attention.FULL, "no listed step was captured"
