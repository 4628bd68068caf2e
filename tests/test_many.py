"""Many runs in flight, with runs that end when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.errors import HostUnavailable, PowerLabError, QueueFull
from power_lab.many import as_finished

Records = list[Any]


class FakeRun:
    """Ends when told to; cancelled, it has what it had by then."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.record: str | None = None
        self.error: PowerLabError | None = None
        self.cancelled = self.settled = False
        self._told: Callable[[], None] = lambda: None

    def end(self, error: PowerLabError | None = None) -> None:
        self.record, self.error = (f"{self.name} whole", None) if error is None else (None, error)
        self._told()

    def when_over(self, told: Callable[[], None]) -> None:
        self._told = told
        if self.record is not None or self.error is not None:
            told()

    def result(self) -> str:
        if self.error is not None:
            raise self.error
        assert self.record is not None, "nobody may wait for a run that is not over"
        return self.record

    def cancel(self) -> None:
        self.cancelled = True

    def settle(self) -> None:
        self.settled = True
        if self.record is None and self.error is None:
            self.record = f"{self.name} cut"


class Runs:
    """Those that were submitted, in order; `at_once` says how each ends when it is submitted."""

    def __init__(self, at_once: Callable[[FakeRun], None] = lambda run: None) -> None:
        self.made: list[FakeRun] = []
        self._at_once = at_once

    def submit(self, index: int) -> Any:
        run = FakeRun(str(index))
        self.made.append(run)
        self._at_once(run)
        return run

    def all_over(self) -> bool:
        return all(run.record is not None or run.error is not None for run in self.made)


def test_a_long_run_holds_up_no_other():
    runs = Runs(lambda run: run.end() if run.name != "0" else None)
    records: Records = [None] * 9
    come = as_finished(runs.submit, 2, records)
    assert [next(come)[0] for _ in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]
    runs.made[0].end()
    assert list(come) == [(0, "0 whole")]
    assert records == [f"{index} whole" for index in range(9)]


@given(count=st.integers(0, 30), window=st.integers(1, 8), data=st.data())
def test_the_window_is_full_while_runs_are_left_and_each_comes_once(count: int, window: int, data: st.DataObject):
    def let_one_end(_: FakeRun | None = None) -> None:
        """Before `come` waits, since one thread does both: once the window is full, or nothing is left to submit."""
        flying = [run for run in runs.made if run.record is None]
        assert len(flying) <= window
        if flying and (len(flying) == window or len(runs.made) == count):
            data.draw(st.sampled_from(flying)).end()

    runs = Runs(let_one_end)
    records: Records = [None] * count
    order: list[int] = []
    for index, record in as_finished(runs.submit, window, records):
        assert record == records[index] == f"{index} whole"
        order.append(index)
        if len(runs.made) == count:
            let_one_end()
    assert sorted(order) == list(range(count)) == [int(run.name) for run in runs.made]


def test_a_full_queue_is_tried_again():
    refusals = iter([True, True, False])
    runs = Runs(lambda run: run.end(QueueFull("full", "wait") if next(refusals, False) else None))
    records: Records = [None] * 3
    assert sorted(cast("Any", as_finished(runs.submit, 2, records))) == [(i, f"{i} whole") for i in range(3)]
    assert [run.name for run in runs.made][:2] == ["0", "1"]
    assert len(runs.made) == 5


@pytest.mark.parametrize("error", [PowerLabError("one failed", ""), HostUnavailable("the host has gone", "")])
def test_an_error_cancels_the_rest_and_what_came_is_kept(error: PowerLabError):
    def end(run: FakeRun) -> None:
        if run.name == "1":
            run.end()
        elif run.name == "3":
            run.end(error)

    runs = Runs(end)
    records: Records = [None] * 9
    with pytest.raises(type(error)):
        list(as_finished(runs.submit, 3, records))
    assert records == ["0 cut", "1 whole", "2 cut", None, *[None] * 5]
    assert [run.cancelled for run in runs.made] == [True, False, True, True]
    assert all(run.settled for run in runs.made if run.name != "1")


def test_leaving_early_cancels_what_flies():
    runs = Runs(lambda run: run.end() if run.name == "0" else None)
    records: Records = [None] * 4
    come = as_finished(runs.submit, 3, records)
    assert next(come) == (0, "0 whole")
    come.close()  # type: ignore[attr-defined]
    assert records == ["0 whole", "1 cut", "2 cut", None]
    assert runs.all_over()
