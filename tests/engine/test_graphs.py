"""Captured steps: which shapes are kept, which run eagerly and why, and that a step's operations run once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from power_lab.engine import graphs
from power_lab.engine.graphs import Graphs
from power_lab.engine.shapes import Shape
from power_lab.errors import CapacityError


@dataclass(eq=False)
class Recorded:
    shape: Shape
    nbytes: int = 100


@dataclass
class Device:
    """Counts what is run, recorded and replayed."""

    asynchronous: bool = True
    row_buckets: tuple[int, ...] = (1, 2, 4, 8, 64, 128, 256)
    full: bool = False
    records: bool = True
    ran: list[str] = field(default_factory=list)
    recording: bool = False

    def capture(self, forward: Callable[[], Any]) -> tuple[Recorded, Any] | None:
        if self.full:
            raise CapacityError("No room for a graph.", "Lower graph_mb.")
        if not self.records:
            return None
        self.recording = True
        try:
            result = forward()
        finally:
            self.recording = False
        return Recorded(result), result

    def replay(self, graph: Recorded) -> None:
        self.ran.append("replayed")


def step(made: Graphs, device: Device, rows: int, sampled: int = 1, sampling: str = "greedy") -> str:
    """Run a step; returns what the device did."""
    asked = Shape(rows, sampled, sampling)  # type: ignore[arg-type]
    shape = made.cover(asked)

    def forward() -> Shape:
        if not device.recording:
            device.ran.append("called")
        return shape

    before = len(device.ran)
    assert made.run(asked, shape, forward) == shape
    (did,) = device.ran[before:]
    return did


def make(device: Device, budget: int = 1 << 20, enabled: bool = True) -> Graphs:
    return Graphs(device, budget, enabled)  # type: ignore[arg-type]


def reasons(made: Graphs) -> dict[str, int]:
    return {why: count for line in made.registry.snapshot() for why, count in line.eager.items()}


def test_behind_its_host_a_first_step_is_called_once_and_recorded_for_the_next() -> None:
    """Its draws would overwrite what its own embedding reads, were it run again."""
    device = Device()
    made = make(device)
    assert [step(made, device, 3) for _ in range(3)] == ["called", "replayed", "replayed"]
    assert step(made, device, 4) == "replayed", "the bucket of 3"
    assert reasons(made) == {graphs.COMPILED: 1}
    totals = made.registry.totals()
    assert (totals.recordings, totals.captures, totals.replays, totals.padding_rows) == (1, 0, 3, 3)


def test_beside_its_host_a_first_step_is_recorded_and_replayed() -> None:
    device = Device(asynchronous=False, row_buckets=())
    made = make(device)
    assert [step(made, device, 3), step(made, device, 3), step(made, device, 4)] == ["replayed"] * 3
    totals = made.registry.totals()
    assert (totals.recordings, totals.captures, totals.replays) == (2, 2, 1), "nothing is padded"
    assert step(made, device, graphs.KEPT_ROWS + 1) == "called"
    assert reasons(made) == {graphs.LONG: 1}


def test_prompts_are_captured_when_their_shape_comes_again() -> None:
    device = Device()
    made = make(device)
    assert [step(made, device, 200) for _ in range(3)] == ["called", "called", "replayed"]
    assert step(made, device, 257) == step(made, device, 257) == "called"
    assert reasons(made) == {graphs.FIRST: 1, graphs.COMPILED: 1, graphs.LONG: 2}


def test_graphs_that_do_not_fit_the_budget_go_the_oldest_first() -> None:
    device = Device()
    made = make(device, budget=250)
    for rows in (1, 2, 1, 4):
        step(made, device, rows)
        step(made, device, rows)
    assert made.nbytes == 200 and len(made) == 2
    assert step(made, device, 1) == "replayed", "used after 2 was"
    assert step(made, device, 2) == "called"
    assert made.registry.totals().evictions == 2


def test_one_graph_is_kept_whatever_the_budget() -> None:
    device = Device()
    made = make(device, budget=1)
    assert [step(made, device, 1), step(made, device, 1), step(made, device, 2), step(made, device, 2)][1::2] == [
        "replayed"
    ] * 2
    assert len(made) == 1


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_capture_without_room_leaves_the_steps_running(asynchronous: bool) -> None:
    device = Device(asynchronous=asynchronous, full=True)
    made = make(device)
    assert [step(made, device, 1) for _ in range(3)] == ["called"] * 3
    assert any("No room" in why for why in reasons(made)) and len(made) == 0
    made.clear()
    device.full = False
    assert [step(made, device, 1), step(made, device, 1)][1] == "replayed"


def test_a_device_that_cannot_record_says_so() -> None:
    device = Device(asynchronous=False, records=False)
    made = make(device)
    assert step(made, device, 1) == step(made, device, 1) == "called"
    assert reasons(made) == {graphs.CANNOT: 2}


def test_switched_off_nothing_is_padded_or_recorded() -> None:
    device = Device()
    made = make(device, enabled=False)
    assert made.cover(Shape(3, 1, "greedy")) == Shape(3, 1, "greedy")
    assert step(made, device, 3) == step(made, device, 3) == "called"
    assert reasons(made) == {graphs.OFF: 2}
