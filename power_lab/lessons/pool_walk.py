"""Requests and blocks along the steps of an engine: who computes what, and how the pool fills and empties."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from power_lab.kernels.ops import BLOCK
from power_lab.lessons.stepwise import Frame
from power_lab.lessons.walk import Walk, drawing
from power_lab.widgets.figure import sideways, table
from power_lab.widgets.palette import BLOCKS, STEPS, legend
from power_lab.widgets.picture import FAINT, INK, bars, line, path, svg, text
from power_lab.widgets.text import count

if TYPE_CHECKING:
    import xarray

SCHEMA = "power-lab.lesson-pool/1"
_LEFT, _LANE, _GAP, _WIDE = 104, 18, 20, 780  # px: names, a lane, between the panels, all steps
_LABELLED = 12  # px of a stretch that a letter fits into


class PoolWalk(Walk):
    """The film of a `Stepwise`.

    Args:
        frames: of it. at: the step that is shown first, by its place in `frames`.

    Raises ConfigError for no frames, and for a step that is not there.
    """

    rows = "step"

    def __init__(self, frames: Sequence[Frame], at: int = -1) -> None:
        self._frames = tuple(frames)
        self._names = _names(self._frames)
        self._owners = _owners(self._frames)
        super().__init__(len(self._frames), at)

    def events(self) -> Sequence[int]:
        return [place for place in range(len(self._frames)) if self._told(place)]

    @property
    def dataset(self) -> xarray.Dataset:
        """Dimensions `step`, `request` (rows computed, tokens kept) and `block` (state, owner's name, tokens)."""
        import xarray

        frames, names = self._frames, self._names
        rows = np.zeros((len(frames), len(names)), np.int64)
        for at, frame in enumerate(frames):
            for part in frame.parts:
                rows[at, names.index(part.name)] += part.rows
        columns: dict[str, Any] = {"rows": (("step", "request"), rows, _told("row", "token rows computed"))}
        for name, words in {"state": "what the block is", "tokens": "tokens in it"}.items():
            kind = object if name == "state" else np.int64
            values = np.array([[getattr(block, name) for block in frame.blocks] for frame in frames], kind)
            columns[name] = ("step", "block"), values, _told("token" if name == "tokens" else "1", words)
        owners = np.array([[self._owned(block.owners) for block in frame.blocks] for frame in frames], object)
        columns["owners"] = ("step", "block"), owners, _told("1", "requests that hold it")
        coordinates: dict[str, Any] = {
            "step": ("step", [frame.number for frame in frames], _told("1", "step of the engine")),
            "request": ("request", np.array(names, object), _told("1", "request")),
            "block": ("block", [block.id for block in frames[0].blocks], _told("1", "block of the pool")),
        }
        return xarray.Dataset(columns, coordinates, {"schema": SCHEMA})

    def summary(self) -> str:
        frames = self._frames
        rows = sum(frame.rows for frame in frames)
        return (
            f"{count(len(frames), 'step')}, {count(len(self._names), 'request')}, {count(rows, 'row')}; "
            f"most blocks in use at once: {max(_used(frame) for frame in frames)} of {len(frames[0].blocks) - 1}"
        )

    def picture(self) -> str:
        lanes, blocks = len(self._names), len(self._frames[0].blocks) - 1
        top = _GAP + lanes * _LANE + _GAP
        height = top + blocks * _LANE + 22
        parts = [self._requests(_GAP), self._blocks(top), self._axis(height - 8)]
        x = _LEFT + (self._at + 0.5) * self._pitch
        cursor = line([(x, 4), (x, height - 20)], f"stroke='{INK}' stroke-width='1.5' stroke-dasharray='3 2'")
        return svg(_LEFT + self._pitch * len(self._frames) + 12, height, "".join(parts) + cursor)

    def body(self) -> str:
        frame = self._frames[self._at]
        kinds = [part.phase or "preempted" for one in self._frames for part in one.parts]
        steps = {kind: kinds.count(kind) for kind in set(kinds)} | {"waiting": sum(len(f.waiting) for f in self._frames)}
        here = {state: sum(block.state == state for block in frame.blocks) for state in BLOCKS}
        told = " ".join(self._told(self._at)) or "Nothing comes or goes."
        words = f"<b>Step {frame.number}</b>, {count(frame.rows, 'row')}. {escape(told)}"
        return (
            legend(STEPS, steps)
            + drawing(self.picture(), f"Requests and blocks along steps. {self.summary()}")
            + f'<p class="pl-note">{words}</p>{self._table(frame)}'
            + f'<div style="margin-top:12px">{legend(BLOCKS, here | {"dummy": 0})}{self._grid(frame)}</div>'
        )

    # --- parts of the picture -----------------------------------------------------------------------------------------------------

    @property
    def _pitch(self) -> float:
        return min(16.0, _WIDE / len(self._frames))

    def _requests(self, top: float) -> str:
        """A lane for each request: what it computed in each step, when it waited, when it lost its blocks."""
        drawn = [text(0, top - 6, "requests", "font-weight='600'")]
        for lane, name in enumerate(self._names):
            y = top + lane * _LANE
            drawn.append(text(0, y + 13, name))
            for kind, mark in STEPS.items():
                boxes = [
                    (_LEFT + at * self._pitch, y + (7 if kind == "waiting" else 2), self._pitch - 0.6, 4 if kind == "waiting" else 14)
                    for at, frame in enumerate(self._frames)
                    if kind == _kind(frame, name)
                ]
                drawn.append(path(bars(boxes), f"fill='{mark.light}' fill-opacity='{0.45 if kind == 'waiting' else 0.8}'"))
        return "".join(drawn)

    def _blocks(self, top: float) -> str:
        """A lane for each block: as full as it is, in the colour of its state, with its owner's name where that begins."""
        drawn = [text(0, top - 6, "blocks", "font-weight='600'")]
        for lane, first in enumerate(self._frames[0].blocks[1:]):
            y = top + lane * _LANE
            drawn.append(text(0, y + 13, f"block {first.id}"))
            drawn.append(line([(_LEFT, y + 16), (_LEFT + len(self._frames) * self._pitch, y + 16)], f"stroke='{FAINT}'"))
            for state in ("used", "shared", "cached"):
                boxes = []
                for at, frame in enumerate(self._frames):
                    block = frame.blocks[lane + 1]
                    if block.state == state:
                        tall = 2 + 12 * block.tokens / BLOCK
                        boxes.append((_LEFT + at * self._pitch, y + 16 - tall, self._pitch, tall))
                look = f"fill='{BLOCKS[state].light}' fill-opacity='{0.25 if state == 'cached' else 0.45}'"
                drawn.append(path(bars(boxes), look))
            drawn += self._held(lane + 1, y)
        return "".join(drawn)

    def _held(self, block: int, y: float) -> Iterator[str]:
        """Names over the stretches of a block."""
        begins = 0
        owners = [self._owned(frame.blocks[block].owners) for frame in self._frames]
        for at in range(1, len(owners) + 1):
            if at == len(owners) or owners[at] != owners[begins]:
                if owners[begins] and (at - begins) * self._pitch >= _LABELLED:
                    yield text(_LEFT + begins * self._pitch + 3, y + 12, owners[begins])
                begins = at

    def _axis(self, y: float) -> str:
        every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 500, 5000) if step * self._pitch >= 34)
        numbers = range(0, len(self._frames), every)
        return "".join(text(_LEFT + at * self._pitch, y, str(self._frames[at].number)) for at in numbers) + text(0, y, "step")

    # --- one step -----------------------------------------------------------------------------------------------------------------

    def _table(self, frame: Frame) -> str:
        head = ("request", "does", "rows", "positions", "block table")
        rows = []
        for part in frame.parts:
            kind = part.phase or "preempted"
            mark = STEPS[kind]
            does = f'<span style="{mark.inline()}">{mark.glyph} {mark.label}</span>'
            reach = f"{part.start} to {part.start + part.rows - 1}" if part.rows > 1 else str(part.start)
            rows.append((escape(part.name), does, str(part.rows), reach if part.rows else "–", _listed(part.table)))
        idle = [name for name in frame.waiting if frame.part(name) is None]
        rows += [(escape(name), f"{STEPS['waiting'].glyph} waiting", "0", "–", "none") for name in idle]
        return sideways(table(head, rows, left=(0, 1, 3, 4)), "Requests")

    def _grid(self, frame: Frame) -> str:
        cells = []
        for block in frame.blocks[1:]:
            mark = BLOCKS[block.state]
            owner = self._owned(block.owners)
            title = f"block {block.id}: {mark.label}, {count(block.tokens, 'token')}" + (f", {owner}" if owner else "")
            cells.append(
                f'<span class="pl-c pl-gap pl-{mark.name}" style="{mark.inline()}" title="{escape(title)}">'
                f"{block.id} {mark.glyph} {escape(owner)} {block.tokens or ''}</span>"
            )
        return f'<div class="pl-scroll" tabindex="0" aria-label="Blocks"><div class="pl-grid">{" ".join(cells)}</div></div>'

    def _told(self, place: int) -> list[str]:
        """What comes and goes in a step, as sentences."""
        frame, before = self._frames[place], self._frames[place - 1] if place else None
        held = {} if before is None else {part.name: part for part in before.parts if part.rows}
        told = []
        for part in frame.parts:
            known = held.get(part.name)
            if part.preempted:
                told.append(f"{part.name} is preempted: its blocks go to the others, and it waits to compute again.")
            elif known is None and part.start:
                told.append(f"{part.name} starts, and finds {part.start} tokens of its prompt in the cache.")
            elif known is None:
                told.append(f"{part.name} starts.")
            elif len(part.table) > len(known.table):
                told.append(f"{part.name} gets block {part.table[-1]}.")
        told += [f"{name} ends." for name in frame.ended]
        return told

    def _owned(self, owners: Sequence[int]) -> str:
        return "+".join(self._owners.get(owner, "?") for owner in owners)


def _kind(frame: Frame, name: str) -> str:
    if name in frame.waiting and (frame.part(name) is None):
        return "waiting"
    part = frame.part(name)
    return "" if part is None else part.phase or "preempted"


def _names(frames: Sequence[Frame]) -> list[str]:
    found = [name for frame in frames for name in (*(part.name for part in frame.parts), *frame.waiting)]
    return list(dict.fromkeys(found))


def _owners(frames: Sequence[Frame]) -> dict[int, str]:
    """Number of a request -> its name, from the steps that it took part in."""
    return {request: name for frame in frames for request, name in frame.names.items()}


def _used(frame: Frame) -> int:
    return sum(block.state in ("used", "shared") for block in frame.blocks)


def _listed(blocks: Sequence[int]) -> str:
    return ", ".join(map(str, blocks)) or "none"


def _told(units: str, long_name: str) -> dict[str, str]:
    return {"units": units, "long_name": long_name}
