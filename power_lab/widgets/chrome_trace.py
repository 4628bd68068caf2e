"""Steps in the Trace Event Format of Chrome, which Perfetto and chrome://tracing open.

Source: "Trace Event Format", Google, 2016 (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from power_lab.widgets.moments import Moment

PROCESS, STEPS, DEVICE, PARTS = (
    1,
    1,
    90,
    91,
)  # numbers of the process and of its tracks; overlapping steps take 1, 2, 3 ...

Event = dict[str, Any]


def chrome_trace(moments: Sequence[Moment], title: str) -> bytes:
    """JSON with a track for steps (more where they overlap), one for device work, one for a run's own phases, and counters."""
    events = [_named("process_name", 0, f"Power Lab: {title}"), *_events(moments)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False).encode()


def _events(moments: Sequence[Moment]) -> Iterator[Event]:
    ends: list[float] = []  # of the last step of each track
    for one in moments:
        track = next((at for at, end in enumerate(ends) if end <= one.begin), len(ends))
        if track == len(ends):
            ends.append(0.0)
            yield _named("thread_name", STEPS + track, "steps" if not track else f"steps in flight beside them {track}")
        ends[track] = one.end
        yield _complete(STEPS + track, _title(one), one.begin, one.duration, _details(one))
        yield from _counters(one)
        if one.preempted:
            yield {**_at(STEPS + track, f"{one.preempted} preempted", one.begin), "ph": "i", "s": "p"}
    yield from _track(DEVICE, "device work", [(one, {"busy": one.busy}) for one in moments if one.busy is not None])
    yield from _track(PARTS, "this run's rounds", [(one, one.parts) for one in moments if one.parts])


def _track(number: int, name: str, found: Sequence[tuple[Moment, dict[str, float]]]) -> Iterator[Event]:
    """Phases one after the other, up to the end of their step: where within it they began was not recorded."""
    if not found:
        return
    yield _named("thread_name", number, name)
    until = 0.0
    for one, parts in found:
        at = max(until, one.end - sum(parts.values()))
        for part, took in parts.items():
            yield _complete(number, part, at, took, {"step": one.number})
            at += took
        until = at


def _counters(one: Moment) -> Iterator[Event]:
    for name, values in {
        "rows": {"prefill": one.prefill, "decode": one.decode, "verify": one.verify},
        "requests": {"running": one.running, "waiting": one.waiting},
        "blocks": {"used": one.used, "cached": one.cached, "free": one.free},
    }.items():
        yield {**_at(0, name, one.begin), "ph": "C", "args": values}


def _title(one: Moment) -> str:
    kinds = {"prefill": one.prefill, "decode": one.decode, "verify": one.verify}
    return " + ".join(f"{name} {rows}" for name, rows in kinds.items() if rows) or "no rows"


def _details(one: Moment) -> dict[str, Any]:
    told = {
        "step": one.number,
        "rows": one.rows,
        "own_rows": one.own,
        "padded_rows": one.padded or None,
        "shape": None if one.shape is None else list(one.shape),
        "graph": one.how or None,
        "why_eager": one.why or None,
        "device_ms": None if one.busy is None else one.busy * 1e3,
        "tokens": one.tokens,
        "drafted": one.drafted,
        "accepted": one.accepted,
    }
    return {name: value for name, value in told.items() if value is not None}


def _named(what: str, track: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": PROCESS, "tid": track, "ts": 0, "args": {"name": name}}


def _complete(track: int, name: str, begin: float, seconds: float, details: dict[str, Any]) -> Event:
    return {**_at(track, name, begin), "ph": "X", "dur": round(max(0.0, seconds) * 1e6, 3), "args": details}


def _at(track: int, name: str, begin: float) -> Event:
    return {"name": name, "cat": "power-lab", "pid": PROCESS, "tid": track, "ts": round(begin * 1e6, 3)}
