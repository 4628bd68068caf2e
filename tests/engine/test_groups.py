"""Rows are listed in groups once for all layers of a step: the GPU's engine through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from power_lab.engine.request import SamplingParams
from power_lab.kernels.triton import attention
from tests import drafters, tiny
from tests.engine.test_exactness import Oracle, Recorder, prompt_of
from tests.interpreted import InterpretedOps

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.timeout(400),
]
SHAPE = tiny.Shape(kind="qwen2 windows")  # one layer sees everything, the other the last 50
PROMPT = prompt_of(3, 45)
SAID = SamplingParams(max_tokens=12, ignore_eos=True)
LISTED, SHARED = (1, 2, 0), (0, 0, 2)
"""Launches of a step: lists, and layers that take groups whole or share splits."""

Alone = tuple[tuple[int, ...], dict[int, bytes]]
"""What a request says, and the bits of the logits behind it."""


@pytest.fixture(scope="module", autouse=True)
def early() -> Iterator[None]:
    """Steps of 3 rows take groups whole: few are enough for the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "FULL", 3)
        _forget()
        yield
    _forget()


def _forget() -> None:
    for cached in (attention.plan, attention.scratch_floats):
        cached.cache_clear()


@pytest.fixture(scope="module")
def alone(early: None) -> Alone:
    """One request alone, eager, whose groups are listed in its prompt and nowhere else."""
    ops, recorder = InterpretedOps(), Recorder()
    engine = tiny.engine(SHAPE, ops, prefix_cache=False, observer=recorder, graph_mb=0)
    record = engine.submit(PROMPT, SAID).result()
    assert launches(ops) == [LISTED, *[SHARED] * (len(record.tokens) - 1)]
    return record.tokens, recorder.of(record.id, [*PROMPT, *record.tokens])


def launches(ops: InterpretedOps) -> list[tuple[int, int, int]]:
    return [(step.count("list_groups"), step.count("attend_many"), step.count("attend_few")) for step in ops.steps]


def test_a_step_lists_its_groups_once_and_says_the_same(alone: Alone) -> None:
    """Two at once, in windows that are partly rejected, eager and captured."""
    ops, recorder = InterpretedOps(), Recorder()
    engine = tiny.engine(SHAPE, ops, step_tokens=50, prefix_cache=False, observer=recorder)
    engine._proposer._make = lambda _: Oracle([*PROMPT, *alone[0]])
    drafted = msgspec.structs.replace(SAID, speculate="ngram", width=2, controller="fixed")
    for ticket in [engine.submit(PROMPT, drafted) for _ in range(2)]:
        record = ticket.result()
        assert record.tokens == alone[0]
        got = recorder.of(record.id, [*PROMPT, *record.tokens])
        assert {at: got[at] for at in alone[1]} == alone[1]
    assert set(launches(ops)) <= {LISTED, SHARED} and launches(ops).count(LISTED) > 3
    replayed = {line.shape.rows for line in engine.shape_stats() if line.replays}
    assert max(replayed) >= attention.FULL, "no listed step was captured"


def test_a_drafter_lists_its_own_beside_its_targets(alone: Alone) -> None:
    """In one captured step, drafts first, on scratch that both share."""
    ops = InterpretedOps()
    engine = drafters.engine(drafters.KINDS["dflash"](SHAPE, ops), step_tokens=50, prefix_cache=False)
    drafted = msgspec.structs.replace(SAID, max_tokens=8, speculate="dflash", width=3, controller="fixed")
    for ticket in [engine.submit(PROMPT, drafted) for _ in range(2)]:
        assert ticket.result().tokens == alone[0][:8]
    assert launches(ops).count((2, 4, 0)) > 2
