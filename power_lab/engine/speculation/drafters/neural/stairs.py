"""The rows of a block drafter's launch: a block of rows for each request, and the drafts of all requests position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from power_lab.engine.shapes import Coverage, Shape
from power_lab.engine.speculation.width import HOT


@dataclass(frozen=True, slots=True)
class Stairs:
    """Whose rows are where. Requests come in order of width, the widest first, so those that want a draft number j are the first ones.

    Rows lie block by block; logit rows, and all that is drawn, position by position: what is drawn at one position of all requests is a
    slice, and begins with those that go on.

    Attributes:
        places: requests, padding included.
        counts: for each draft, from the first on, how many requests want it; descending.
        whole: rows of every block, where it must be whole; 0: as many as its drafts need.
        lead: rows of a block before the first that says a token: 1, the anchor's, or 0.
    """

    places: int
    counts: tuple[int, ...]
    whole: int = 0
    lead: int = 1

    @classmethod
    def of(cls, widths: Sequence[int], whole: int = 0, lead: int = 1) -> Stairs:
        """widths: of the requests, descending, at least 1."""
        return cls(len(widths), tuple(sum(width > j for width in widths) for j in range(widths[0])), whole, lead)

    def padded(self, rows: Coverage, most: int) -> Stairs:
        """What such a launch is captured as, where shapes are padded: every request as wide as the widest. most: drafts of a block."""
        places = rows.cover(self.places) or self.places
        width = min(most, next((width for width in HOT if width >= len(self.counts)), most))
        return Stairs(places, (places,) * width, self.whole, self.lead)

    @property
    def starts(self) -> list[int]:
        """First logit row of each draft."""
        return [0, *accumulate(self.counts)][:-1]

    @property
    def sampled(self) -> int:
        return sum(self.counts)

    @property
    def rows(self) -> int:
        return self.places * self.whole if self.whole else self.places * self.lead + self.sampled

    def blocks(self) -> np.ndarray:
        """int64 [places]: rows of each block."""
        if self.whole:
            return np.full(self.places, self.whole)
        return self.lead + (np.asarray(self.counts)[None, :] > np.arange(self.places)[:, None]).sum(1)

    def drawn(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each logit row the place, and the distance of the token that it says from the anchor."""
        places = np.concatenate([np.arange(count) for count in self.counts])
        return places, np.repeat(np.arange(1, len(self.counts) + 1), self.counts)


@dataclass(frozen=True, slots=True)
class BlockShape(Shape):
    """A launch's shape: its stairs decide what is computed, and what draws, where that is captured, too."""

    stairs: Stairs | None = None
    head: str = ""

    __hash__ = Shape.__hash__
