"""A trained drafter without weights, whose drafts are nearly always wrong and cost nothing: what is left of a round is its verification.

It is what `power_lab.engine.speculation.drafters.neural` calls trained, companion, drafter and drafting, all in one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from power_lab.engine.shapes import Shape
from power_lab.engine.speculation.drafters import Draft, DraftAsk, Drafter
from power_lab.engine.speculation.drafters.neural import Companion, Drafting, Room
from power_lab.engine.speculation.drafters.neural.inputs import Block
from power_lab.kernels.ops import Array, Batch, Ops
from power_lab.kernels.probe import Shapes


class Blind:
    """Says token 1 behind everything. ops: the target's."""

    name = kind = "blind"
    sha256 = ""
    serves: tuple[str, ...] = ("mtp",)
    taps: tuple[int, ...] = ()
    needs_before = False
    shapes = Shapes(frozenset(), frozenset())
    nbytes = page_bytes = scratch_bytes = graph_nbytes = 0
    most = places = 31

    def __init__(self, ops: Ops) -> None:
        self._tokens = ops.asarray(np.ones(self.most * self.places, np.int32))

    def companion(self, room: Room) -> Companion:
        return self

    def make_pool(self, pages: int, caches: tuple) -> None: ...

    def tap(self, layer: int, x: Array, delta: Array | None, post: Array | None, batch: Batch) -> None: ...

    def observe(self, batch: Batch, drawn: Array | None) -> None: ...

    def drafter(self, name: str) -> Drafter:
        return self

    def release(self) -> None: ...

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None: ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [Draft((1,) * ask.width) for ask in asks]

    def commit(self, request_id: int, emitted: Sequence[int]) -> None: ...

    def end(self, request_id: int) -> None: ...

    def light(self, request_id: int) -> bool:
        return False

    def resume(self, blocks: Sequence[Block], marks: Array) -> Drafting:
        widest = max(block.width for block in blocks)
        rows = tuple(tuple(range(at * widest, at * widest + block.width)) for at, block in enumerate(blocks))
        count = widest * len(blocks)
        return Drafting(Shape(count, count, "greedy"), lambda: None, self._tokens[:count], rows)
