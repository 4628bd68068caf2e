"""A step's arrays: what the host writes is what the device finds, padding included, in one block of bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from power_lab.engine import sampler
from power_lab.engine.batch import ALIGNED, Inputs
from power_lab.engine.plan import Span, StepPlan
from power_lab.engine.request import Request, SamplingParams
from power_lab.kernels.ops import Ops
from tests.lagged import Lagged

PAGES = 6
spans = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=5)


def plan_of(shape: list[tuple[int, int, int]]) -> tuple[StepPlan, dict[int, Request]]:
    """Spans of (start, rows, sampled rows at most), each with pages of its own."""
    made, requests = [], {}
    for number, (start, rows, sampled) in enumerate(shape):
        blocks = tuple(1 + number * PAGES + i for i in range(-(-(start + rows) // 64)))
        sampled = min(sampled, rows)
        drafts = max(sampled - 1, 0)
        made.append(Span(number, start, tuple(range(10, 10 + rows)), drafts, sampled, blocks))
        params = SamplingParams(temperature=0.5 + number, top_k=number, seed=2**62 + number)
        requests[number] = Request(number, 1, params, [0] * (start + rows - drafts), 1 << 20, frozenset())
    return StepPlan(0, tuple(made)), requests


@settings(max_examples=150, deadline=None)
@given(shape=spans, padding=st.integers(0, 7), more=st.integers(0, 3))
def test_rows_and_draws_are_where_the_plan_says(
    shape: list[tuple[int, int, int]], padding: int, more: int, numba_ops: Callable[[int], Ops]
) -> None:
    plan, requests = plan_of(shape)
    sampled = sum(span.sampled for span in plan.spans)
    rows = plan.rows + padding
    inputs = Inputs(numba_ops(1), 64, 32, 5, PAGES)
    layout = inputs.layout(rows, sampled + more)
    inputs.fill(layout, plan, requests, sampler.lists(plan, requests))
    batch, draws = layout.batch, layout.draws
    at = drawn = 0
    for number, span in enumerate(plan.spans):
        for row in range(span.rows):
            position = span.start + row
            assert batch.ids[at] == span.tokens[row] and batch.positions[at] == position
            assert batch.slots[at] == span.blocks[position // 64] * 64 + position % 64
            assert batch.tables[batch.table_of[at]].tolist() == [*span.blocks, *[0] * (PAGES - len(span.blocks))]
            at += 1
        for row in range(span.rows - span.sampled, span.rows):
            assert batch.sampled[drawn] == at - span.rows + row
            assert draws.positions[drawn] == span.start + row + 1, "the position of the token that is drawn"
            params = requests[number].params
            assert (draws.temperature[drawn], draws.top_k[drawn], draws.seeds[drawn]) == (
                0.5 + number,
                number,
                params.seed,
            )
            drawn += 1
    for row in range(at, rows):
        assert (batch.ids[row], batch.positions[row], batch.slots[row]) == (0, 0, 0), "the dummy page"
        assert batch.tables[batch.table_of[row]].tolist() == [0] * PAGES
        assert batch.table_of[row] not in batch.table_of[:at]
    assert (batch.sampled[drawn:] == 0).all() and (draws.temperature[drawn:] == 0).all()
    assert (draws.top_p[drawn:] == 1).all() and (draws.repetition[drawn:] == 1).all()


def test_arrays_of_a_shape_stay_where_they_are_and_do_not_overlap(numba_ops: Callable[[int], Ops]) -> None:
    """Graphs refer to them; kernels read 16 bytes at a time."""
    inputs = Inputs(numba_ops(1), 64, 32, 5, PAGES)
    first = inputs.layout(7, 3)
    for other in range(1, 60):
        inputs.layout(other, 1)
    assert inputs.layout(7, 3) is first
    ends = 0
    for start, shape, dtype in first.places.values():
        assert start % ALIGNED == 0 and start >= ends
        ends = start + int(np.prod(shape)) * np.dtype(dtype).itemsize
    assert ends <= inputs.nbytes


def test_a_step_that_still_runs_keeps_its_values(numba_ops: Callable[[int], Ops]) -> None:
    """The host writes the next one's elsewhere, and waits for memory that a copy has yet to read."""
    ops = Lagged(numba_ops(1))
    inputs = Inputs(ops, 64, 32, 5, PAGES)  # type: ignore[arg-type]
    seen: list[list[int]] = []
    for start in range(6):
        plan, requests = plan_of([(start, 1, 1)])
        layout = inputs.layout(1, 1)
        inputs.fill(layout, plan, requests, None)
        ops._queue.append(lambda layout=layout: seen.append(layout.batch.positions.tolist()))
    ops.wait()
    assert seen == [[start] for start in range(6)]


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(spans, st.integers(0, 2), st.booleans()), min_size=2, max_size=8))
def test_what_is_left_in_staging_memory_is_what_would_be_written(
    steps: list[tuple[list[tuple[int, int, int]], int, bool]], numba_ops: Callable[[int], Ops]
) -> None:
    """Block tables and controls are written only where others lie there: the arrays are those of inputs that never saw another step."""
    inputs = Inputs(numba_ops(1), 64, 32, 5, PAGES)
    for shape, padding, penalised in steps:
        plan, requests = plan_of(shape)
        for request in requests.values():
            request.params = SamplingParams(temperature=0.5, seed=1, presence_penalty=0.5 * penalised)
        size = plan.rows + padding, sum(span.sampled for span in plan.spans) + padding
        found = []
        for one in (inputs, Inputs(numba_ops(1), 64, 32, 5, PAGES)):
            layout = one.layout(*size)
            one.fill(layout, plan, requests, sampler.lists(plan, requests))
            tables = len(plan.spans) + (padding > 0)
            found.append(
                {name: values[:tables] if name == "tables" else values for name, values in layout.arrays.items()}
            )
        for name, values in found[1].items():
            np.testing.assert_array_equal(found[0][name], values, name)


def test_what_draws_ask_for_is_what_any_request_asks_for() -> None:
    greedy, warm = SamplingParams(), SamplingParams(temperature=1.0, logprobs=2)
    assert sampler.Asked.of([greedy, greedy])[1:] == ("greedy", False, None)
    assert sampler.Asked.of([greedy, warm])[1:] == ("random", False, 2)
    assert sampler.Asked.of([warm, SamplingParams(temperature=1.0, top_k=3, logprobs=0)])[1:] == ("limited", False, 2)
    assert sampler.Asked.of([SamplingParams(top_k=3, logit_bias={1: 1.0})])[1:] == ("greedy", True, None)
    assert sampler.Asked.of([SamplingParams(repetition_penalty=1.5)]).listed


def test_lists_are_there_only_for_requests_that_need_them() -> None:
    plan, requests = plan_of([(5, 3, 3), (0, 4, 1)])
    assert sampler.lists(plan, requests) is None
    requests[0].params = SamplingParams(presence_penalty=0.5, seed=0)
    given_ = sampler.lists(plan, requests)
    assert given_ is not None and given_.history_span.shape == (4, 3)
    assert [end for _, _, end in given_.history_span[:3].tolist()] == [6, 7, 8], (
        "a window's rows see the drafts before them"
    )
    assert (given_.history_span[3] == given_.history_span[3][0]).all() and len(given_.bias_ids) == 1


def test_biases_lie_by_request_in_the_order_of_their_tokens() -> None:
    plan, requests = plan_of([(4, 3, 2), (9, 1, 1), (70, 2, 1)])
    for id, bias in ((0, {7: -1, 3: 0.1}), (2, {5: 2.0})):
        request = requests[id]
        request.params = structs.replace(request.params, logit_bias=bias)
    found = sampler.lists(plan, requests)
    assert found is not None and found.bias_ids.dtype == np.int32 and found.bias_values.dtype == np.float32
    assert found.bias_ids.tolist() == [3, 7, 5] and found.bias_values.tolist() == [np.float32(0.1), -1.0, 2.0]
    assert found.bias_span.tolist() == [[0, 2], [0, 2], [2, 2], [2, 3]]
