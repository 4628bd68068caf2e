"""The step timeline: one clock for engines and runs, pictures and data that hold all steps, a trace that Chrome's viewers open."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from power_lab.engine.inspection import StepRecord
from power_lab.errors import ConfigError, EngineClosed
from power_lab.run import Run
from power_lab.widgets.chrome_trace import chrome_trace
from power_lab.widgets.lanes import lanes
from power_lab.widgets.moments import Axis, gaps, of_engine, of_run
from power_lab.widgets.timeline import Timeline
from tests.factories import run_record, run_records

NUMBER = {"type": "number", "minimum": 0}
EVENT = {
    "type": "object",
    "required": ["name", "ph", "pid", "tid", "ts"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "ph": {"enum": ["X", "M", "C", "i"]},
        "pid": {"type": "integer"},
        "tid": {"type": "integer"},
        "ts": NUMBER,
        "dur": NUMBER,
        "args": {"type": "object"},
        "s": {"enum": ["g", "p", "t"]},
    },
    "allOf": [
        {"if": {"properties": {"ph": {"const": "X"}}}, "then": {"required": ["dur"]}},
        {"if": {"properties": {"ph": {"const": "i"}}}, "then": {"required": ["s"]}},
        {
            "if": {"properties": {"ph": {"const": "C"}}},
            "then": {"properties": {"args": {"additionalProperties": {"type": "number"}, "minProperties": 1}}},
        },
        {
            "if": {"properties": {"ph": {"const": "M"}}},
            "then": {
                "properties": {
                    "name": {"enum": ["process_name", "thread_name"]},
                    "args": {"required": ["name"], "properties": {"name": {"type": "string"}}},
                }
            },
        },
    ],
}
TRACE = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {"traceEvents": {"type": "array", "items": EVENT}, "displayTimeUnit": {"enum": ["ms", "ns"]}},
}
"""JSON Object Format of the Trace Event Format (Google, 2016), as far as it is used."""


def step(number: int, begin: float, end: float, **changes: object) -> StepRecord:
    usual: dict[str, object] = {
        "prefill_rows": 0,
        "decode_rows": 2,
        "verify_rows": 0,
        "running": 2,
        "waiting": 0,
        "preempted": 0,
        "shape": (2, 2),
        "how": "replay",
        "why": "",
        "padded_rows": 0,
        "busy_s": (end - begin) / 2,
        "free_blocks": 90,
        "cached_blocks": 6,
        "used_blocks": 4,
        "tokens": 2,
    }
    return StepRecord(number=number, begin=begin, end=end, **{**usual, **changes})  # type: ignore[arg-type]


@st.composite
def step_records(draw: st.DrawFn) -> tuple[StepRecord, ...]:
    """Any ring: overlapping steps, pauses of hours, steps of no time at all."""
    at, found = draw(st.floats(0, 1e6)), []
    for number in range(draw(st.integers(0, 40))):
        at += draw(st.one_of(st.just(0.0), st.floats(-0.004, 0.05), st.floats(0, 1e4)))
        took = draw(st.one_of(st.just(0.0), st.floats(0, 0.3)))
        rows = st.integers(0, 5000)
        found.append(
            step(
                number,
                at,
                at + took,
                prefill_rows=draw(rows),
                decode_rows=draw(rows),
                verify_rows=draw(rows),
                running=draw(st.integers(0, 64)),
                waiting=draw(st.integers(0, 1000)),
                preempted=draw(st.integers(0, 3)),
                busy_s=draw(st.none() | st.floats(0, 1)),
                how=draw(st.sampled_from(["", "replay", "capture", "eager"])),
            )
        )
    return tuple(found)


STEPS = (
    step(7, 100.0, 100.1, prefill_rows=300, decode_rows=0, how="eager", why="longer than the largest shape"),
    step(8, 100.11, 100.12),
    step(9, 100.115, 100.13, verify_rows=8, waiting=3, preempted=1),
    step(10, 160.13, 160.15, how="capture"),
)


def test_times_count_from_the_first_step_and_pauses_are_found() -> None:
    moments = of_engine(STEPS[::-1])
    assert [one.number for one in moments] == [7, 8, 9, 10]
    assert moments[0].begin == 0
    assert [round(high - low, 6) for low, high in gaps(moments)] == [0.01, 60.0]  # 8 and 9 overlap


def test_long_pauses_are_cut_and_short_ones_keep_their_length() -> None:
    axis = Axis.of(of_engine(STEPS))
    assert [(round(low, 3), round(high, 3)) for low, high in axis.cuts] == [(0.13, 60.13)]
    assert axis.place(60.13) - axis.place(0.13) < 0.05
    scale = axis.place(0.1) / 0.1
    assert axis.place(0.13) - axis.place(0.12) == pytest.approx(0.01 * scale)
    assert axis.place(-1) == 0 and axis.place(1e9) == 1


@settings(max_examples=30, deadline=None)
@given(step_records())
@example((step(0, 3600.0, 3600.0), step(1, 4096.0, 4096.00001)))  # rounding led beyond the axis
def test_any_ring_can_be_drawn_saved_and_traced(records: tuple[StepRecord, ...]) -> None:
    moments = of_engine(records)
    axis = Axis.of(moments)
    times = sorted({0.0, *(one.begin for one in moments), *(one.end for one in moments)})
    places = [axis.place(at) for at in times]
    assert all(0 <= place <= 1 for place in places)
    assert places == sorted(places)
    view = Timeline(lambda: records)
    html = view.to_html()
    assert "nan" not in html.split("</style>")[1].lower()
    assert ("No steps yet" in html) == (not records)
    assert view.dataset.sizes["step"] == len(records)
    jsonschema.validate(json.loads(view.export("trace")), TRACE)
    view.close()


@settings(max_examples=30, deadline=None)
@given(run_records())
def test_any_run_has_a_timeline(record: object) -> None:
    view = Timeline(run=Run(record))  # type: ignore[arg-type]
    assert view.to_html()
    assert view.summary()
    jsonschema.validate(json.loads(view.export("trace")), TRACE)
    view.close()


def test_the_trace_nests_as_its_viewers_want() -> None:
    """On one track complete events may not overlap, but for what lies within another."""
    events = json.loads(chrome_trace(of_engine(STEPS), "test"))["traceEvents"]
    steps = [event for event in events if event["ph"] == "X" and event["tid"] < 90]
    assert [event["args"]["step"] for event in steps] == [7, 8, 9, 10]
    for track in {event["tid"] for event in steps}:
        own = [event for event in steps if event["tid"] == track]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(own))
    assert steps[0]["args"]["why_eager"] == "longer than the largest shape"
    assert steps[0]["dur"] == pytest.approx(1e5)
    assert sum(event["ph"] == "i" for event in events) == 1
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"steps", "device work"} <= named


def test_data_of_an_engine_and_of_a_run() -> None:
    data = Timeline(lambda: STEPS).dataset
    assert data.attrs["schema"] == "power-lab.timeline/1"
    assert data.prefill_rows.values.tolist() == [300, 0, 0, 0]
    assert all(variable.attrs["units"] for variable in data.variables.values())
    record = run_record(50)
    of = Timeline(run=Run(record)).dataset
    assert of.sizes["step"] == len(record.steps)
    assert of.tokens.sum() == len(record.tokens)
    assert np.nansum(of.model_s) == pytest.approx(sum(entry.forward_s for entry in record.rounds))
    assert (of.end_s >= of.begin_s).all()


def test_lanes_say_what_they_show_and_only_what_is_there() -> None:
    moments = of_engine(STEPS)
    found = {lane.label: lane for lane in lanes(moments, Axis.of(moments))}
    assert found["prefill"].words == "prefill: 300 rows in 1 step, at most 300 in one"
    assert found["preempted"].detail == "1 time"
    assert found["device"].detail == "busy 50% of steps"
    assert "1 replay" not in found["graphs"].words and "2 replayed" in found["graphs"].words
    assert "round" not in found  # an engine's ring does not tell what a round spent
    own = of_run(run_record(40, drafter="off"))
    labels = [lane.label for lane in lanes(own, Axis.of(own))]
    assert "verify" not in labels and "round" in labels and "device" not in labels


def test_pictures_of_full_rings_are_bounded() -> None:
    full = tuple(step(at, at * 0.01, at * 0.01 + 0.009, verify_rows=at % 7, waiting=at % 3) for at in range(4096))
    view = Timeline(lambda: full)
    assert len(view.to_html()) < 100_000
    assert len(view.export("svg")) < 80_000
    assert "Each bar stands for 12 steps" in view.to_html()
    assert Timeline(lambda: full, last=10).dataset.step.values.tolist() == list(range(4086, 4096))


def test_a_refresh_reads_again_and_a_gone_engine_keeps_the_last_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = [STEPS[:1], STEPS]

    def read() -> tuple[StepRecord, ...]:
        if not told:
            raise EngineClosed("The engine was closed.", "Load it again.")
        return told.pop(0)  # type: ignore[return-value]

    view = Timeline(read)
    sent: list[dict[str, object]] = []
    monkeypatch.setattr(view, "send", lambda message, buffers=None: sent.append(message))
    view._answer(view, {"kind": "refresh"}, [])
    view._answer(view, {"kind": "refresh"}, [])
    assert [message["kind"] for message in sent] == ["body", "gone"]
    assert len(view.moments) == 4
    assert not Timeline(run=Run(run_record(5))).refreshable
    view.close()


def test_lanes_that_are_drawn_anew_say_where_their_axis_lies_on_the_engines_clock() -> None:
    told = re.search(r'data-knots="([^"]+)"', Timeline(lambda: STEPS).body())
    assert told is not None
    knots = json.loads(told[1])
    assert knots[0] == [100, 0] and knots[-1] == [160.15, 1] and [knot[0] for knot in knots[1:3]] == [100.13, 160.13]
    assert "data-knots" not in Timeline(run=Run(run_record(20))).body()


def test_a_runs_timeline_says_that_it_is_a_finished_record() -> None:
    record = run_record(20)
    told = f"Record of run {record.id}, which has finished ({record.finish})"
    assert told in Timeline(run=Run(record)).to_html()
    assert "Record of run" not in Timeline(lambda: STEPS).to_html()
    unbegun = msgspec.structs.replace(record, steps=(), rounds=(), finish="cancelled")
    html = Timeline(run=Run(unbegun)).to_html()
    assert "which has finished (cancelled)" in html and "took part in no step" in html and "refresh" not in html


def test_the_longest_steps_are_listed() -> None:
    html = Timeline(lambda: STEPS).to_html()
    table = html[html.index("The longest steps") :]
    assert table.index("longer than the largest shape") < table.index("capture")
    assert "no such kind" not in table


def test_bokeh_draws_every_step() -> None:
    layout = Timeline(lambda: STEPS).explore()
    plots = [child[0] if isinstance(child, tuple) else child for child in layout.children]
    assert len({id(plot.x_range) for plot in plots}) == 1  # they zoom and pan together
    source = plots[0].renderers[0].data_source
    assert source.data["number"] == [7, 8, 9, 10]
    assert math.isclose(source.data["end"][0], 100.0)


def test_kinds_that_a_view_has_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="trace"):
        Timeline(lambda: STEPS).export("pdf")
    with pytest.raises(ConfigError, match="nothing to draw"):
        Timeline(lambda: ()).export("svg")
