"""One query over its keys, tile by tile: what the online softmax knows after each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from power_lab.errors import ConfigError
from power_lab.kernels.ops import BLOCK
from power_lab.lessons.stepwise import Attended
from power_lab.lessons.walk import Walk, drawing
from power_lab.widgets.figure import meter, table
from power_lab.widgets.palette import MARKS
from power_lab.widgets.picture import FAINT, INK, bars, line, path, svg, text
from power_lab.widgets.text import count

if TYPE_CHECKING:
    import xarray

SCHEMA = "power-lab.lesson-softmax/1"
_LEFT, _TALL, _WIDE = 64, 96, 800  # px: labels, bars, all keys
_DEEP = 10  # weights below the best one divided by e to this are not drawn


@dataclass(frozen=True)
class Tile:
    """Keys that are taken together.

    Attributes:
        page: block that holds them. first, last: positions of the first one, and behind the last one.
        best: largest score here. before, after: largest score known before and behind this tile; `before` is -inf in the first.
        factor: what the sum and the values so far are multiplied by, since the largest score has changed.
        added: sum of e^(score - after) here. total: the running sum behind this tile.
        share: of the tile in the final softmax.
    """

    page: int
    first: int
    last: int
    best: float
    before: float
    after: float
    factor: float
    added: float
    total: float
    share: float


class SoftmaxWalk(Walk):
    """A row's attention in one query head, page by page.

    Args:
        row: what a kernel was given. head: the query head. at: the page that is shown first, by its place in the block table.

    Raises ConfigError for a head or a page that is not there.
    """

    rows = "tile"
    _place = "page"

    def __init__(self, row: Attended, head: int = 0, at: int = -1) -> None:
        if not 0 <= head < row.q.shape[0]:
            raise ConfigError("head", f"there is no query head {head}", f"Use 0 to {row.q.shape[0] - 1}.")
        self._row, self._head = row, head
        self._scores = scores(row, head)
        self._start = max(0, row.position + 1 - row.window) if row.window else 0
        self.tiles = tiles(self._scores, row.table, self._start)
        super().__init__(len(self.tiles), at)

    @property
    def dataset(self) -> xarray.Dataset:
        """Dimension `tile`; one column for each attribute of `Tile`."""
        import xarray

        columns = {
            name: ("tile", np.array([getattr(tile, name) for tile in self.tiles]))
            for name in Tile.__dataclass_fields__
        }
        return xarray.Dataset(columns, attrs={"schema": SCHEMA, "head": self._head, "position": self._row.position})

    def summary(self) -> str:
        row = self._row
        return (
            f"Layer {row.layer}, query head {self._head}, the row at position {row.position}: "
            f"{count(row.position + 1 - self._start, 'key')} on {count(len(self.tiles), 'page')}"
        )

    def picture(self) -> str:
        """The weight of each key on a logarithmic scale, the pages that hold them, and how far the walk has come."""
        keys = len(self._scores)
        pitch = _WIDE / keys
        behind = self._scores[self._start :].max() - self._scores  # how far below the best, in powers of e
        tall = _TALL * np.clip(1 - behind / _DEEP, 0, 1)
        tall[: self._start] = 0
        done, here = self.tiles[self._at].last, self.tiles[self._at].first
        drawn = [text(0, 14, "best"), text(0, _TALL + 2, f"best /e^{_DEEP}"), text(0, _TALL + 26, "page")]
        for first, last, mark in ((0, here, "decode"), (here, done, "prefill"), (done, keys, "waiting")):
            boxes = [
                (_LEFT + at * pitch, 4 + _TALL - tall[at], max(pitch, 0.5), float(tall[at]))
                for at in range(first, last)
            ]
            drawn.append(path(bars(boxes), f"fill='{MARKS[mark].light}' fill-opacity='0.85'"))
        for at, tile in enumerate(self.tiles):
            x = _LEFT + tile.first // BLOCK * BLOCK * pitch
            wide = min(BLOCK * pitch, _LEFT + _WIDE - x)
            drawn.append(f"<rect x='{x:.1f}' y='{_TALL + 10}' width='{wide:.1f}' height='22' fill='none' stroke='{FAINT}'/>")
            if wide > 22:
                look = "font-weight='700'" if at == self._at else ""
                drawn.append(text(x + 4, _TALL + 26, str(tile.page), look))
        current = self.tiles[self._at]
        x, to = _LEFT + current.first * pitch, _LEFT + current.last * pitch
        drawn.append(line([(x, _TALL + 33), (to, _TALL + 33)], f"stroke='{INK}' stroke-width='3'"))
        return svg(_LEFT + _WIDE + 8, _TALL + 40, "".join(drawn))

    def body(self) -> str:
        tile = self.tiles[self._at]
        if not self._at:
            told = "the first page: there is nothing to rescale."
        elif tile.after == tile.before:
            told = "no larger score: what was summed so far stays as it is."
        else:
            told = f"a larger score: what was summed so far is multiplied by e^({tile.before:.2f} − {tile.after:.2f}) = {tile.factor:.3g}."
        head = ("page", "keys", "best score here", "best so far", "factor on the old sum", "adds", "sum", "share in the end")
        cells = [self._line(at, one) for at, one in enumerate(self.tiles)]
        return (
            drawing(self.picture(), f"Weights of the keys, by page. {self.summary()}")
            + f'<p class="pl-note"><b>Page {tile.page}</b>, keys {tile.first} to {tile.last - 1}: {told}</p>'
            + f'<div class="pl-lanes" tabindex="0" role="group" aria-label="Pages">{table(head, cells, left=(7,))}</div>'
        )

    def _line(self, at: int, tile: Tile) -> tuple[str, ...]:
        place = f"<b>▸ {tile.page}</b>" if at == self._at else str(tile.page)
        keys = f"{tile.first}–{tile.last - 1}"
        if at > self._at:
            return (place, keys, *["…"] * 5, "–")
        share = meter(tile.share, "decode") + f"{tile.share:.3f}"
        factor = f"{tile.factor:.3g}" if at else "–"
        return place, keys, f"{tile.best:.2f}", f"{tile.after:.2f}", factor, f"{tile.added:.3f}", f"{tile.total:.3f}", share


def scores(row: Attended, head: int) -> np.ndarray:
    """f64 [position + 1]: scaled products of one query with every key behind which it stands."""
    keys, _ = row.dense()
    group = row.q.shape[0] // keys.shape[1]
    return row.scale * (keys[:, head // group].astype(np.float64) @ row.q[head].astype(np.float64))


def tiles(values: np.ndarray, table_: Sequence[int], start: int = 0) -> list[Tile]:
    """The online softmax over scores [n], page by page from position `start` on."""
    found: list[Tile] = []
    top, total = -np.inf, 0.0
    for page, block in enumerate(table_):
        first, last = max(start, page * BLOCK), min(len(values), (page + 1) * BLOCK)
        if first >= last:
            continue
        best = float(values[first:last].max())
        after = max(top, best)
        factor = float(np.exp(top - after)) if found else 1.0
        added = float(np.exp(values[first:last] - after).sum())
        total = total * factor + added
        found.append(Tile(block, first, last, best, top, after, factor, added, total, 0.0))
        top = after
    return [_shared(tile, top, total) for tile in found]


def _shared(tile: Tile, top: float, total: float) -> Tile:
    return replace(tile, share=tile.added * float(np.exp(tile.after - top)) / total)
