"""What speculation came to: counted once, the same in records, datasets and an engine's own account."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings

from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters.suffix import LookupDrafter
from power_lab.engine.speculation.metrics import Metrics
from power_lab.engine.trace import RunRecord
from power_lab.evidence.dataset import trace_dataset
from power_lab.kernels.ops import Ops
from power_lab.run import Run
from tests import drafting, tiny
from tests.engine.test_exactness import prompt_of
from tests.factories import run_record, run_records

PARAMS = SamplingParams(max_tokens=60, width=6, controller="fixed", ignore_eos=True)


@settings(deadline=None)
@given(run_records())
def test_counts_agree_with_the_trace(record: RunRecord) -> None:
    metrics, data = Metrics.of([record]), trace_dataset(record)
    drafted = [len(entry.drafted) for entry in record.rounds]
    assert metrics.passes == len(record.steps) and metrics.rounds == len(drafted) == metrics.widths.total()
    assert (metrics.drafted, metrics.emitted) == (sum(drafted), len(record.tokens))
    assert metrics.drafted == sum(width * count for width, count in metrics.widths.items())
    assert metrics.accepted == sum(length * count for length, count in metrics.accepted_lengths.items())
    assert metrics.accepted_lengths.total() == sum(width > 0 for width in drafted)
    assert (int(data["width_rounds"].sum()), data.attrs["total_accepted"]) == (metrics.rounds, metrics.accepted)
    lengths = data["length"].to_numpy()
    assert int((data["accepted_rounds"] * lengths).sum()) == metrics.accepted
    if not metrics.drafted:
        assert metrics.acceptance is None and data.attrs["total_acceptance"] != data.attrs["total_acceptance"]


def test_two_records_are_counted_together() -> None:
    first, second = run_record(40, seed=1), run_record(30, seed=2)
    both, alone = Metrics.of([first, second]), [Metrics.of([record]) for record in (first, second)]
    assert both.widths == alone[0].widths + alone[1].widths
    assert both.verify_s == pytest.approx(alone[0].verify_s + alone[1].verify_s)
    assert both.tokens_per_pass == (40 + 30) / both.rounds


def test_a_shared_step_is_parted_between_its_requests() -> None:
    record = run_record(10, drafter="off")
    rounds = tuple(msgspec.structs.replace(entry, requests=4, forward_s=0.4, sample_s=0.04) for entry in record.rounds)
    metrics = Metrics.of([msgspec.structs.replace(record, rounds=rounds)])
    assert (metrics.verify_s, metrics.sample_s) == (pytest.approx(0.1 * 10), pytest.approx(0.01 * 10))


@pytest.mark.parametrize("drafter", drafting.DRAFTERS)
def test_an_engine_says_what_its_records_say(drafter: str, numba_ops: Callable[[int], Ops]) -> None:
    engine = drafting.engine(drafter, tiny.Shape(), numba_ops(2))
    assert not [decision for decision in engine.explain() if decision.key.startswith("speculated")]
    params = msgspec.structs.replace(PARAMS, speculate=drafter)
    tickets = [engine.submit(prompt_of(at, 80 + at), params) for at in range(3)]
    engine.submit(prompt_of(9, 40), PARAMS).result()
    metrics = Metrics.of([ticket.result() for ticket in tickets])
    told = [decision for decision in engine.explain() if decision.key.startswith("speculated")]
    assert told == [metrics.decision(drafter)] and metrics.drafted > 0
    assert metrics.replays == 0 and "0 replays" in told[0].reason and metrics.verify_s > 0 and metrics.draft_s > 0
    assert told[0].value == f"{metrics.tokens_per_pass:.2f} tokens a pass"
    summary = Run(tickets[0].result()).summary()
    assert {"passes", "draft_s", "verify_s", "replays", "fr_coverage"} <= summary.keys()


def test_the_part_of_the_vocabulary_that_a_drafter_has_is_measured(numba_ops: Callable[[int], Ops]) -> None:
    class Half(LookupDrafter):
        subset = frozenset(range(128))

    engine = tiny.engine(tiny.Shape(), numba_ops(2))
    engine._proposer._make = lambda _: Half()
    record = engine.submit(prompt_of(3, 100), msgspec.structs.replace(PARAMS, speculate="lookup")).result()
    weighed = [token for entry in record.rounds if entry.reachable >= 0 for token in entry.emitted]
    metrics = Metrics.of([record])
    assert metrics.weighed == len(weighed) >= 40
    assert metrics.coverage == sum(token < 128 for token in weighed) / len(weighed)
    assert re.search(r"\d% of tokens are in the draft vocabulary", metrics.decision("lookup").reason)
    assert Run(record).summary()["fr_coverage"] == metrics.coverage
