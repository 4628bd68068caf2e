"""From a step plan to flat arrays on the device: one block of bytes, filled on the host and sent with one copy a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, zip_longest
from math import prod
from typing import NamedTuple

import numpy as np

from power_lab.engine import sampler
from power_lab.engine.plan import StepPlan
from power_lab.engine.request import Request, SamplingParams
from power_lab.kernels.ops import BLOCK, Array, Batch, Moved, Onward, Ops, SampleRows

ALIGNED = 16  # kernels read 16 bytes at a time
ONWARD = ("windows", "came", "source")  # of `Onward`
MOVED = {"ids": "ids", "positions": "row_positions", "slots": "slots", "draws": "positions"}
"""Arrays of `Moved`, and those of a layout that they are made from."""
MOVED_TOO = ("before", "last", "anchors")  # the same, under their own names, where there are such
LAYOUTS = 512  # whose arrays are kept; graphs keep those that they were captured on

Place = tuple[int, tuple[int, ...], str]  # first byte, shape, dtype


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The arrays of steps of one shape.

    Attributes:
        places: where each lies in the block.
        batch, draws: on the device; `draws` names no lists. onward: beside them, where steps go on from one another on the device.
        arrays: all of them, by name.
        moved: where steps go on from one another: what `Ops.resume` writes to, and a layout of which that is a part.
        hosts: the same in pieces of staging memory, by the piece's identity; the pieces themselves.
    """

    places: Mapping[str, Place]
    batch: Batch
    draws: SampleRows
    onward: Onward | None
    arrays: Mapping[str, Array]
    moved: tuple[Moved, Layout] | None = None
    hosts: dict[int, tuple[dict[str, np.ndarray], np.ndarray]] = field(default_factory=dict)

    def host(self, memory: np.ndarray) -> dict[str, np.ndarray]:
        if id(memory) not in self.hosts:
            self.hosts[id(memory)] = {name: _view(memory, *place) for name, place in self.places.items()}, memory
        return self.hosts[id(memory)][0]


class _Shown(NamedTuple):
    """What lies in a piece of staging memory of a step that goes by its plan: block tables, and the controls of so many draws each."""

    layout: Layout
    tables: Sequence[tuple[int, ...]] = ()
    params: Sequence[SamplingParams] = ()
    counts: Sequence[int] = ()


class Inputs:
    """A runner's index arrays and sampling controls. Arrays stay where they are for steps of one shape, so that captured graphs find each
    step's values in them.

    Args:
        ops: the device.
        rows, sampled, spans: most rows, logit rows and spans of a step, padding included.
        pages: most pages of a sequence.
        before: whether `Batch.before` is filled. resumes: whether there is an `Onward`.
    """

    def __init__(
        self,
        ops: Ops,
        rows: int,
        sampled: int,
        spans: int,
        pages: int,
        *,
        before: bool = False,
        resumes: bool = False,
    ) -> None:
        self._ops = ops
        self._before, self._resumes = before, resumes
        self._spans, self._pages = spans, pages
        self._layouts: OrderedDict[tuple[int, int], Layout] = OrderedDict()
        self._raw = ops.empty((self._places(rows, sampled)[1],), "uint8")
        self._staging = ops.staging(self._raw)
        self._shown: dict[int, object] = {}  # by the piece of staging memory, what lies in it
        self._sent: object = None  # what the device holds of a step that goes on from marks, and nothing else
        self._beside = ops.empty(self._raw.shape, "uint8") if resumes else None  # where such steps' rows move to
        self._ints, self._floats = ops.asarray(np.zeros(1, np.int32)), ops.asarray(np.zeros(1, np.float32))

    @property
    def nbytes(self) -> int:
        return self._raw.nbytes + (0 if self._beside is None else self._beside.nbytes)

    def layout(self, rows: int, sampled: int) -> Layout:
        """The arrays of steps of so many rows and logit rows."""
        key = (rows, sampled)
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(rows, sampled)
            if len(self._layouts) > LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]

    def fill(
        self,
        layout: Layout,
        plan: StepPlan,
        requests: Mapping[int, Request],
        lists: sampler.Lists | None,
        drafts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Write a step's values and send them: one row a token, one table row a span. Rows beyond the plan's compute token 0 on the dummy
        page; logit rows beyond draw greedily.

        drafts: of each span, where those that it verifies lie on the device.
        """
        steady = _steady(layout, plan, drafts)
        if self._holds(steady):
            return
        memory = self._staging.open()
        host, tables = layout.host(memory), [span.blocks for span in plan.spans]
        shown = self._shown.pop(id(memory), None)
        if not isinstance(shown, _Shown) or shown.layout is not layout:
            shown = _Shown(layout)
        if plan.rows < len(host["ids"]):
            tables.append(())  # padding is a sequence of its own at position 0 of the dummy page
        _fill_tables(host["tables"], tables, shown.tables)
        _fill_rows(host, plan)
        if self._resumes:
            _fill_onward(host, plan, drafts)
        params, counts = sampler.params_of(plan, requests), [span.sampled for span in plan.spans if span.sampled]
        # A request's controls never change: where they lie as they did, and nothing else was written there since, they are left.
        if lists is not None or counts != shown.counts or params != shown.params:
            sampler.fill(host, params, counts, lists)
        self._shown[id(memory)] = _Shown(layout, tables, params if lists is None else [], counts)
        self._send(layout, len(tables), steady)

    def _holds(self, steady: object) -> bool:
        """Whether the device holds what follows from `steady` alone; if not, nothing is known of what it holds until the next copy."""
        if steady is not None and self._sent == steady:
            return True
        self._sent = None
        return False

    def _send(self, layout: Layout, tables: int, steady: object) -> None:
        """Send everything up to so many rows of tables, all of which follows from `steady`, if it is not None."""
        first, (_, pages), _ = layout.places["tables"]
        self._staging.send(first + tables * pages * 4)
        self._sent = steady

    def _lay_out(self, rows: int, sampled: int) -> Layout:
        places, _ = self._places(rows, sampled)
        arrays = {name: self._ops.view(self._raw, *place) for name, place in places.items()}
        batch = {name: arrays[name] for name in ("ids", "slots", "table_of", "tables", "sampled")}
        draws = {name: arrays[name] for name in sampler.COLUMNS}
        batch["before"] = arrays.get("before")
        lists = {"history": self._ints, "bias_ids": self._ints, "bias_values": self._floats}
        made = Batch(positions=arrays["row_positions"], **batch), SampleRows(**draws, **lists)
        onward = Onward(*(arrays[name] for name in ONWARD)) if self._resumes else None
        layout = Layout(places, *made, onward, arrays)
        return layout if self._beside is None else replace(layout, moved=self._moved(layout, self._beside))

    def _moved(self, layout: Layout, raw: Array) -> tuple[Moved, Layout]:
        places = layout.places
        own = {name: self._ops.view(raw, *places[of]) for name, of in MOVED.items()}
        own |= {name: self._ops.view(raw, *places[name]) for name in MOVED_TOO if name in places}
        to = Moved(**own)
        batch = replace(layout.batch, ids=to.ids, positions=to.positions, slots=to.slots, before=to.before)
        arrays = {**layout.arrays, **{MOVED.get(name, name): array for name, array in own.items()}}
        return to, replace(layout, batch=batch, draws=replace(layout.draws, positions=to.draws), arrays=arrays)

    def _shapes(self, rows: int, sampled: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Arrays by name. Tables come last: only those in use are sent."""
        tables = min(rows, self._spans + 1)
        onward = {"windows": ((tables, 3), "int32"), "came": ((tables,), "int32"), "source": ((rows,), "int32")}
        return {
            **dict.fromkeys(("ids", "row_positions", "table_of"), ((rows,), "int32")),
            **dict.fromkeys(("slots", "before") if self._before else ("slots",), ((rows,), "int64")),
            "sampled": ((sampled,), "int32"),
            **{name: ((sampled, *tail), dtype) for name, (tail, dtype, _) in sampler.COLUMNS.items()},
            **(onward if self._resumes else {}),
            "tables": ((tables, self._pages), "int32"),
        }

    def _places(self, rows: int, sampled: int) -> tuple[dict[str, Place], int]:
        """Where arrays lie, and the bytes of all."""
        shapes = self._shapes(rows, sampled)
        sizes = [prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes.values()]
        starts = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
        return {name: (start, *shapes[name]) for name, start in zip(shapes, starts, strict=False)}, starts[-1]


def _view(memory: np.ndarray, first: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return memory[first : first + prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)


def slots_of(tables: np.ndarray, owner: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int64 slots of positions, each of the sequence in row `owner` of the block tables."""
    return tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK


def _fill_tables(to: np.ndarray, tables: Sequence[tuple[int, ...]], shown: Sequence[tuple[int, ...]]) -> None:
    """Write block tables where others are shown; most steps change few."""
    for row, (blocks, before) in enumerate(zip_longest(tables, shown[: len(tables)])):
        if blocks != before:
            to[row, : len(blocks)] = blocks
            to[row, len(blocks) :] = 0


def _fill_rows(host: Mapping[str, np.ndarray], plan: StepPlan) -> None:
    """Write the index arrays of `Batch`, whose tables are there, and where draws are."""
    spans, tables = plan.spans, host["tables"]
    counts = np.array([len(span.tokens) for span in spans])
    starts = np.array([span.origin for span in spans])
    ends = np.cumsum(counts)
    total = int(ends[-1])
    owner = np.repeat(np.arange(len(spans)), counts)
    positions: np.ndarray = np.arange(total) - np.repeat(ends - counts - starts, counts)
    host["ids"][:total] = list(chain.from_iterable([span.tokens for span in spans]))
    host["row_positions"][:total] = positions
    host["table_of"][:total] = owner
    host["slots"][:total] = slots_of(tables, owner, positions)
    if "before" in host:
        host["before"][:total] = np.where(positions > 0, slots_of(tables, owner, np.maximum(positions - 1, 0)), -1)
        host["before"][total:] = -1
    draws = np.array([span.sampled for span in spans])
    drawn = np.cumsum(draws)
    rows = np.arange(drawn[-1]) + np.repeat(ends - drawn, draws)  # the last rows of each span
    host["sampled"][: len(rows)] = rows
    host["sampled"][len(rows) :] = 0
    host["positions"][: len(rows)] = positions[rows] + 1  # of the tokens that are drawn
    host["table_of"][total:] = len(spans)
    for name in ("ids", "row_positions", "slots"):
        host[name][total:] = 0


def _steady(layout: Layout, plan: StepPlan, drafts: Sequence[Sequence[int]]) -> object:
    """What a step's values follow from, where all are relative to marks; else None."""
    if any(span.resumes < 0 for span in plan.spans):
        return None
    spans = tuple((span.request_id, span.rows, span.sampled, span.resumes, span.blocks) for span in plan.spans)
    return len(layout.batch.ids), len(layout.batch.sampled), spans, tuple(drafts)


def _fill_onward(host: Mapping[str, np.ndarray], plan: StepPlan, drafts: Sequence[Sequence[int]]) -> None:
    """Write the arrays of `Onward`, and leave to the device what depends on where spans go on. drafts: as in `Inputs.fill`."""
    windows, came, source = (host[name] for name in ONWARD)
    windows[:], came[:], source[:] = 0, -1, 0
    end = draw = 0
    for at, span in enumerate(plan.spans):
        first, end = end, end + span.rows
        if span.sampled:
            windows[at] = end - span.sampled, draw, span.sampled
            draw += span.sampled
        if span.resumes >= 0:
            came[at] = span.resumes
            source[first:end] = 1, *(2 + row for row in drafts[at])
            host["slots"][first:end] = -1
            if "before" in host:
                host["before"][first:end] = -2
