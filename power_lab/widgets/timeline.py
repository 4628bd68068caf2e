"""The step timeline: what each engine step held, how long it took, who waited, and when nothing ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from power_lab.engine.inspection import StepRecord
from power_lab.run import Run
from power_lab.widgets.chrome_trace import chrome_trace
from power_lab.widgets.figure import sideways, table
from power_lab.widgets.lanes import MOST, lanes, lanes_html, lanes_svg
from power_lab.widgets.moments import Axis, Moment, gaps, of_engine, of_run, typical
from power_lab.widgets.palette import GRAPHS, PARTS, STEPS, legend
from power_lab.widgets.text import count, finished, percent, seconds, stat
from power_lab.widgets.view import View, script

if TYPE_CHECKING:
    import xarray
    from bokeh.models import Column

SCHEMA = "power-lab.timeline/1"
_LONGEST = 8  # steps listed
_NONE = float("nan")


class Timeline(View):
    """Steps along time.

    Args:
        read: gives the engine's steps; it raises a PowerLabError when the engine is gone. None for a run's own.
        run: whose record tells of its steps, where `read` is None.
        last: most steps shown, the latest ones.
        live: ask again every second while the view can be seen.
    """

    formats: ClassVar[tuple[str, ...]] = ("csv", "netcdf", "json", "svg", "trace")
    rows: ClassVar[str] = "step"
    _esm = script("view", "zoom", "range")

    def __init__(
        self,
        read: Callable[[], Sequence[StepRecord]] | None = None,
        *,
        run: Run | None = None,
        last: int = 4096,
        live: bool = False,
    ) -> None:
        self._read, self._run, self._last = read, run, max(1, last)
        self._moments = self._now()
        super().__init__(refreshable=read is not None, live=live and read is not None)

    def _now(self) -> tuple[Moment, ...]:
        if self._read is not None:
            steps = tuple(self._read())[-self._last :]
            self._origin = min((one.begin for one in steps), default=0.0)
            return of_engine(steps)
        self._origin = None
        return of_run(self._run.record)[-self._last :] if self._run is not None else ()

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The steps as they were read last."""
        return self._moments

    @property
    def title(self) -> str:
        return "an engine's steps" if self._run is None else f"run {self._run.record.id}"

    @property
    def dataset(self) -> xarray.Dataset:
        """The steps: dimension `step`. Times count from the first one, those of a run from its submission."""
        import xarray

        data = {
            name: (
                "step",
                np.array([value(one) for one in self._moments], dtype=kind),
                {"units": unit, "long_name": title},
            )
            for name, (kind, unit, title, value) in _COLUMNS.items()
        }
        attributes = {"schema": SCHEMA, "title": f"Timeline of {self.title}"}
        numbers = np.array([one.number for one in self._moments], dtype=np.int64)
        return xarray.Dataset(data, {"step": ("step", numbers, {"units": "1", "long_name": "engine step"})}, attributes)

    @property
    def trace(self) -> bytes:
        """The steps for Perfetto and chrome://tracing, as JSON."""
        return chrome_trace(self._moments, self.title)

    def explore(self) -> Column:
        """The same to zoom, pan and point at, with Bokeh. Shown by `bokeh.io.show`, or as a cell's last value in a notebook."""
        from power_lab.widgets.timeline_bokeh import explorer

        return explorer(self._moments)

    def summary(self) -> str:
        moments = self._moments
        if not moments:
            return "No steps yet"
        span = max(one.end for one in moments) - moments[0].begin
        return f"{count(len(moments), 'step')} in {seconds(span)}, {seconds(typical(moments))} typically"

    def picture(self) -> str:
        axis = self._axis()
        return lanes_svg(lanes(self._moments, axis), axis) if self._moments else ""

    def body(self) -> str:
        note = finished(self._run.record.id, self._run.record.finish) if self._run is not None else ""
        if not self._moments:
            return note + '<div class="pl-empty"><p><b>It took part in no step.</b></p></div>' if note else _EMPTY
        axis = self._axis()
        found = lanes(self._moments, axis)
        return (
            note
            + self._head()
            + self._legends()
            + lanes_html(found, axis, self._origin)
            + self._notes(axis)
            + _longest(self._moments)
        )

    def refresh(self) -> None:
        """Read the steps again. Raises PowerLabError when the engine is gone; the last ones stay."""
        self._moments = self._now()

    def renew(self) -> str:
        self.refresh()
        return self.body()

    def _file(self, kind: str) -> bytes:
        return self.trace if kind == "trace" else super()._file(kind)

    def _axis(self) -> Axis:
        return Axis.of(self._moments, 0.0 if self._run is not None or not self._moments else self._moments[0].begin)

    def _legends(self) -> str:
        """Of rows and requests, and of what steps ran as or rounds spent their time on, where that is told."""
        moments = self._moments
        counts = {
            name: sum(getattr(one, name) for one in moments) for name in ("prefill", "decode", "verify", "preempted")
        }
        counts |= {name: max(getattr(one, name) for one in moments) for name in ("running", "waiting")}
        hows = {how: sum(one.how == how for one in moments) for how in GRAPHS}
        parts = {part: sum(part in one.parts for one in moments) for part in PARTS}
        found = legend(STEPS, counts | {"gap": len(gaps(moments))})
        found += legend(GRAPHS, hows) if hows["replay"] or hows["capture"] else ""
        return found + (legend(PARTS, parts) if any(parts.values()) else "")

    def _head(self) -> str:
        moments = self._moments
        rows = sum(one.rows for one in moments)
        cuts = self._axis().cuts
        idle = sum(high - low for low, high in gaps(moments) if (low, high) not in cuts)
        cut = sum(high - low for low, high in cuts if low >= moments[0].begin)
        span = max(one.end for one in moments) - moments[0].begin - cut
        parts = [
            stat(f"{len(moments):,}", "steps"),
            stat(seconds(typical(moments)), "a step", "the median"),
            stat(f"{rows / len(moments):.1f}", "rows a step", "token rows, the mean"),
            stat(
                percent(round(1e6 * idle), round(1e6 * span)),
                "between steps",
                "share of the time in which no step was in flight, long pauses left out",
            ),
        ]
        known = [one for one in moments if one.busy is not None]
        if known:
            took = sum(one.duration for one in known)
            busy = min(took, sum(one.busy or 0.0 for one in known))
            parts.append(
                stat(percent(round(1e6 * busy), round(1e6 * took)), "device busy", "share of the steps' own time")
            )
        if self._run is not None:
            parts.append(stat(seconds(self._run.record.queue_s), "in the queue", "from submission to the first step"))
        return f'<div class="pl-head">{"".join(parts)}</div>'

    def _notes(self, axis: Axis) -> str:
        notes = []
        size = -(-len(self._moments) // MOST)
        if size > 1:
            notes.append(f"Each bar stands for {size} steps in a row, with their mean rows.")
        if axis.cuts:
            total = sum(high - low for low, high in axis.cuts)
            notes.append(f"Hatched: {count(len(axis.cuts), 'pause')}, {seconds(total)} in all, cut out of the axis.")
        notes.append("To point at single steps: <code>.explore()</code>.")
        return f'<p class="pl-note">{" ".join(notes)}</p>'


_COLUMNS: dict[str, tuple[Any, str, str, Callable[[Moment], Any]]] = {
    "begin_s": (np.float64, "s", "planning began", lambda one: one.begin),
    "end_s": (np.float64, "s", "committed", lambda one: one.end),
    "prefill_rows": (np.int64, "row", "prompt rows of all requests", lambda one: one.prefill),
    "decode_rows": (np.int64, "row", "decode rows of all requests", lambda one: one.decode),
    "verify_rows": (np.int64, "row", "draft rows of all requests", lambda one: one.verify),
    "own_rows": (
        np.int64,
        "row",
        "rows of the run, -1 in an engine's timeline",
        lambda one: -1 if one.own is None else one.own,
    ),
    "padded_rows": (np.int64, "row", "rows added for the graph's shape", lambda one: one.padded),
    "running": (np.int64, "request", "running after planning", lambda one: one.running),
    "waiting": (np.int64, "request", "waiting after planning", lambda one: one.waiting),
    "preempted": (np.int64, "request", "preempted by the plan", lambda one: one.preempted),
    "busy_s": (
        np.float64,
        "s",
        "device work, NaN where not known",
        lambda one: _NONE if one.busy is None else one.busy,
    ),
    "shape_rows": (
        np.int64,
        "row",
        "token rows of the shape, -1 where not known",
        lambda one: one.shape[0] if one.shape else -1,
    ),
    "shape_logits": (
        np.int64,
        "row",
        "logit rows of the shape, -1 where not known",
        lambda one: one.shape[1] if one.shape else -1,
    ),
    "how": (object, "1", "replay, capture, eager, or empty where not known", lambda one: one.how),
    "why": (object, "1", "why it ran eagerly", lambda one: one.why),
    "free_blocks": (np.int64, "block", "free after planning", lambda one: one.free),
    "cached_blocks": (np.int64, "block", "cached after planning", lambda one: one.cached),
    "used_blocks": (np.int64, "block", "used after planning", lambda one: one.used),
    "tokens": (np.int64, "token", "emitted, of a run its own", lambda one: one.tokens or 0),
    "drafted": (np.int64, "token", "drafted, of a run its own", lambda one: one.drafted or 0),
    "accepted": (np.int64, "token", "accepted drafts, of a run its own", lambda one: one.accepted or 0),
    "drafting_s": (np.float64, "s", "spent proposing, of a run its own", lambda one: one.parts.get("drafting", _NONE)),
    "model_s": (np.float64, "s", "spent in the model, of a run its own", lambda one: one.parts.get("model", _NONE)),
    "sampling_s": (np.float64, "s", "spent sampling, of a run its own", lambda one: one.parts.get("sampling", _NONE)),
    "commit_s": (np.float64, "s", "spent committing, of a run its own", lambda one: one.parts.get("commit", _NONE)),
}

_EMPTY = (
    '<div class="pl-empty"><p><b>No steps yet.</b></p><p class="pl-note">Generate something, for example '
    '<code>lab.generate("Hello")</code>, and refresh.</p></div>'
)


def _longest(moments: Sequence[Moment]) -> str:
    """The longest steps in words: what one looks for in a timeline, also without seeing it."""
    found = sorted(moments, key=lambda one: -one.duration)[:_LONGEST]
    usual = typical(moments) or 1.0
    head = ("step", "at", "took", "times the median", "prefill", "decode", "verify", "running", "waiting", "graph")
    cells = [
        (
            f"{one.number:,}",
            seconds(one.begin),
            seconds(one.duration),
            f"{one.duration / usual:.1f}",
            *(
                f"{value:,}" if value else "–"
                for value in (one.prefill, one.decode, one.verify, one.running, one.waiting)
            ),
            escape(": ".join(filter(None, (one.how, one.why)))) or "–",
        )
        for one in found
    ]
    return f"<details><summary>The longest steps</summary>{sideways(table(head, cells, left=(9,)), 'The longest steps')}</details>"
