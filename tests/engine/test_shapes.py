"""Shapes of captured steps: the smallest bucket covers, nothing that ran goes uncounted, and the books stay bounded."""

from __future__ import annotations

import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.shapes import OTHERS, Coverage, Registry, Sampling, Shape, ShapeStats, pad
from power_lab.errors import ConfigError

coverages = st.sets(st.integers(1, 300), min_size=1).map(lambda rows: Coverage(tuple(sorted(rows))))


@st.composite
def steps(draw: st.DrawFn, most: int = 40) -> Shape:
    sampling: Sampling = draw(st.sampled_from(("none", "greedy", "random", "limited", "apart")))
    rows = draw(st.integers(1, most))
    sampled = 0 if sampling == "none" else draw(st.integers(1, rows))
    return Shape(rows, sampled, sampling, draw(st.sampled_from("abc")) if sampling == "apart" else "")


@given(coverages, st.integers(1, 400))
def test_a_step_is_covered_by_the_smallest_bucket_that_holds_it(coverage: Coverage, rows: int) -> None:
    assert coverage.cover(rows) == min((bucket for bucket in coverage.rows if bucket >= rows), default=None)


@pytest.mark.parametrize("rows", [(), (0, 1), (2, 1), (1, 1), (-1, 4)])
def test_rows_that_are_no_buckets_are_refused(rows: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="ascending") as caught:
        Coverage(rows)
    assert caught.value.key == "coverage"


@given(st.integers(1, 1000))
def test_exact_coverage_pads_nothing(most: int) -> None:
    coverage = Coverage.exact(most)
    assert all(coverage.cover(rows) == rows for rows in range(1, most + 1))
    assert coverage.cover(most + 1) is None


def test_the_standard_buckets_of_a_gpu() -> None:
    assert Coverage.standard(2048).rows == (
        *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128),
        *(192, 256, 384, 512, 768, 1024, 1536, 2048),
    )
    assert Coverage.standard(500).rows[-2:] == (384, 500)
    assert Coverage.standard(1).rows == (1,)


@given(st.integers(1, 20_000), st.data())
def test_standard_coverage_reaches_its_budget_and_pads_less_than_a_third(most: int, data: st.DataObject) -> None:
    coverage = Coverage.standard(most)
    assert coverage.most == most
    rows = data.draw(st.integers(1, most))
    bucket = coverage.cover(rows)
    assert bucket is not None and rows <= bucket
    assert bucket - rows < (bucket / 3 if rows > 16 else bucket / 2 + (bucket == 1))


@given(steps(400), coverages, coverages)
def test_padding_covers_and_changes_nothing_else(asked: Shape, rows: Coverage, sampled: Coverage) -> None:
    padded = pad(asked, rows, sampled)
    if padded is None:
        assert rows.cover(asked.rows) is None or sampled.cover(asked.sampled) is None
        return
    assert padded.covers(asked) and (padded.sampling, padded.reason) == (asked.sampling, asked.reason)
    assert padded.rows in rows.rows and padded.sampled in (0, *sampled.rows)
    assert pad(padded, rows, sampled) == padded


def test_impossible_shapes_are_refused() -> None:
    for rows, sampled, sampling, reason in [
        (4, 0, "greedy", ""),
        (4, 1, "none", ""),
        (-1, 0, "none", ""),
        (4, 1, "apart", ""),
        (4, 1, "greedy", "why"),
    ]:
        with pytest.raises(ValueError, match="sampl"):
            Shape(rows, sampled, sampling, reason)  # type: ignore[arg-type]


def test_a_graph_is_the_same_whatever_put_its_sampling_apart() -> None:
    assert Shape(4, 1, "apart", "log-probabilities") == Shape(4, 1, "apart", "penalties")
    assert Shape(4, 1, "greedy") != Shape(4, 1, "random")
    assert not Shape(4, 1, "greedy").covers(Shape(4, 1, "random"))


def lines(registry: Registry) -> dict[Shape, ShapeStats]:
    return {line.shape: line for line in registry.snapshot()}


def test_what_a_step_asked_for_and_how_it_ran_is_counted() -> None:
    registry = Registry()
    asked, shape = Shape(5, 3, "greedy"), Shape(8, 4, "greedy")
    registry.captured(shape, 1000)
    registry.replayed(asked, shape, hit=False)
    registry.replayed(asked, shape)
    registry.eager(Shape(6, 4, "greedy"), shape, "no memory for a capture")
    registry.eager(Shape(700, 0, "none"), None, "above the largest bucket")
    registry.replayed(Shape(8, 1, "apart", "penalties"), Shape(8, 1, "apart", "any"))
    line = lines(registry)[shape]
    assert (line.recordings, line.captures, line.replays, line.steps) == (1, 1, 1, 3)
    assert line.eager == {"no memory for a capture": 1}
    assert (line.real_rows, line.padding_rows, line.real_logits, line.padding_logits) == (16, 8, 10, 2)
    assert (line.nbytes, line.held, line.last_step) == (1000, True, 3)
    assert line.waste == pytest.approx(1 / 3)
    assert lines(registry)[OTHERS].eager == {"above the largest bucket": 1}
    assert lines(registry)[Shape(8, 1, "apart", "-")].apart == {"penalties": 1}
    totals = registry.totals()
    assert (totals.steps, totals.captures, totals.replays, totals.eager) == (5, 1, 2, 2)
    assert (totals.graphs, totals.nbytes, totals.hit_rate) == (1, 1000, 2 / 5)
    registry.evicted(shape)
    assert (lines(registry)[shape].nbytes, lines(registry)[shape].evictions, registry.totals().nbytes) == (0, 1, 0)
    assert registry.demand()[asked] == 2 and registry.demanded_rows() == {5: 2, 6: 1, 8: 1, 700: 1}
    assert registry.recent()[-1].rows == 8 and registry.recent()[0] == asked


@given(
    st.lists(st.tuples(steps(), st.sampled_from(("replay", "capture", "eager", "behind"))), max_size=60),
    st.integers(1, 5),
)
def test_each_step_is_a_capture_a_replay_or_eager_and_counted_once(ran: list[tuple[Shape, str]], kept: int) -> None:
    """In each line, in the sums, and in the counters that the vitals read. A graph recorded behind an eager step is no step of its own."""
    registry = Registry(lines=kept)
    for shape, how in ran:
        if how in ("capture", "behind"):
            registry.captured(shape, 1)
        if how in ("eager", "behind"):
            registry.eager(shape, shape, "asked for")
        else:
            registry.replayed(shape, shape, hit=how == "replay")
    told, totals = [how for _, how in ran], registry.totals()
    assert (totals.captures, totals.replays) == (told.count("capture"), told.count("replay"))
    assert totals.eager == told.count("eager") + told.count("behind")
    assert totals.captures + totals.replays + totals.eager == totals.steps == registry.steps == len(ran)
    assert (registry.captures, registry.replays) == (totals.captures, totals.replays)
    assert totals.recordings == registry.recordings == told.count("capture") + told.count("behind")
    assert sum(line.steps for line in registry.snapshot()) == len(ran)
    assert totals.captures == sum(one.how == "capture" for one in registry.ran)


def test_a_shape_that_does_not_cover_its_step_changes_nothing() -> None:
    registry = Registry()
    with pytest.raises(ValueError, match="does not cover"):
        registry.replayed(Shape(9, 1, "greedy"), Shape(8, 1, "greedy"))
    assert registry.snapshot() == () and registry.steps == 0 and registry.demand() == {}


def test_steady_decoding_is_a_hit_in_every_step_of_the_window() -> None:
    registry = Registry(window=10)
    assert registry.totals().hit_rate is None
    shape = Shape(1, 1, "greedy")
    registry.captured(shape, 1)
    registry.replayed(shape, shape, hit=False)
    for _ in range(10):
        registry.replayed(shape, shape)
    assert registry.totals().hit_rate == 1.0


@given(st.lists(st.tuples(steps(), st.booleans(), st.booleans()), max_size=60), st.integers(1, 5))
def test_sums_survive_however_few_lines_are_kept(ran: list[tuple[Shape, bool, bool]], kept: int) -> None:
    """Lines that are forgotten are added up: totals do not depend on how many are kept; graphs keep their line."""
    small, large = Registry(lines=kept), Registry()
    coverage = Coverage.standard(32)
    held, peak = set(), 0
    for asked, eager, evict in ran:
        shape = pad(asked, coverage, coverage)
        for registry in (small, large):
            if shape is None or eager:
                registry.eager(asked, shape, "asked for")
                continue
            registry.captured(shape, 10)
            registry.replayed(asked, shape)
            if evict:
                registry.evicted(shape)
        if shape is not None and not eager:
            peak = max(peak, len(held | {shape}))
            (held.discard if evict else held.add)(shape)
    assert small.totals() == large.totals()
    assert small.totals().nbytes == 10 * len(held)
    assert {line.shape for line in small.snapshot() if line.held} == held
    assert len(lines(small).keys() - {OTHERS}) <= kept + peak, "graphs on top"
    assert sum(small.demand().values()) + small.unrecorded == len(ran) and len(small.demand()) <= kept
    assert sum(large.demanded_rows().values()) == len(ran)


def test_reasons_with_numbers_in_them_do_not_pile_up() -> None:
    registry = Registry()
    shape = Shape(1, 1, "greedy")
    for number in range(500):
        registry.eager(shape, shape, f"out of memory by {number} bytes")
    reasons = lines(registry)[shape].eager
    assert len(reasons) == 33 and sum(reasons.values()) == 500 and reasons["other reasons"] == 468


def test_snapshots_are_sorted_stay_as_they_are_and_cross_the_socket() -> None:
    registry = Registry()
    for rows in (8, 2, 4):
        shape = Shape(rows, 1, "apart", "penalties")
        registry.replayed(shape, shape)
    before = registry.snapshot()
    assert [line.shape.rows for line in before] == [2, 4, 8]
    registry.eager(Shape(2, 1, "apart", "bias"), Shape(2, 1, "apart", "bias"), "asked for")
    assert before[0].eager == {} and before[0].apart == {"penalties": 1}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=tuple[ShapeStats, ...]) == before


def test_snapshots_are_taken_while_steps_are_counted() -> None:
    registry, done, taken = Registry(lines=50), threading.Event(), []

    def count() -> None:
        for step in range(20_000):
            shape = Shape(1 + step * 7 % 97, 1, "greedy")
            registry.captured(shape, 1)
            registry.replayed(shape, shape)
            registry.evicted(shape)
        done.set()

    engine = threading.Thread(target=count)
    engine.start()
    while not done.is_set():
        taken.append(len(registry.snapshot()) + len(registry.demand()) + len(registry.demanded_rows()))
        registry.totals()
    engine.join()
    assert taken and registry.totals().replays == 20_000
