"""The launches of a block drafter, between two steps of the target: one for all requests that want drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from power_lab.engine.batch import Layout
from power_lab.engine.graphs import Graphs
from power_lab.engine.models.decoder import Decoder, Workspace
from power_lab.engine.sampler import COLUMNS
from power_lab.engine.shapes import Shape
from power_lab.engine.speculation.drafters import Draft
from power_lab.engine.speculation.drafters.neural import Drafting, Room
from power_lab.engine.speculation.drafters.neural.inputs import Biases, Block, BlockInputs
from power_lab.engine.speculation.drafters.neural.stairs import BlockShape, Stairs
from power_lab.kernels.ops import BLOCK, Array, Batch, Draw, Fetched, KVCache, SampleRows

L = TypeVar("L")
PLACES = 32  # requests of one launch; more take several
APART = "this device samples outside of the recorded operations, or logits are biased"
SILENT = "the drafter's logits hold NaN"


class Trunk(Protocol):
    """The network of a block drafter, bound to its target.

    Attributes:
        decoder: its layers, with the target's embedding, and of the target's head the rows of `draft_ids`, or all.
        draft_ids: int32 [N] on the device, the only tokens that it can say; None is all. subset: the same for those who count.
        vocab: of the target.
        block: most rows of a block, the anchor's included; mask: token id of the rows behind it.
        lead: rows of a block before the first that says a token: 1, the anchor's, or 0.
        causal: whether a row sees only those before it; otherwise blocks are always whole.
    """

    decoder: Decoder
    draft_ids: Array | None
    subset: frozenset[int] | None
    vocab: int
    block: int
    mask: int
    lead: int
    causal: bool

    def workspace(self, rows: int, sampled: int) -> Workspace: ...

    def forward(self, batch: Batch, seen: Batch, previous: Array, caches: tuple[KVCache, ...], work: Workspace) -> None:
        """Fill `work.gathered` and `work.logits` of the sampled rows.

        seen: the batch with the positions up to which rows attend. previous: int32 [R], the row before each in its block, or -1.
        """
        ...


class Head(Protocol):
    """Draws the tokens of a launch from its logits.

    Attributes:
        resumes: whether they are drawn on the device, so that the target's step can go on from them there.
    """

    resumes: bool

    @property
    def nbytes(self) -> int:
        """Of arrays of its own."""
        ...

    def draw(self, on: Drawing, draw: Draw) -> None:
        """Fill `on.tokens`."""
        ...

    def confidence(self, on: Drawing) -> tuple[Array, ...]:
        """Arrays to fetch beside the tokens."""
        ...

    def drafts(self, fetched: Sequence[np.ndarray], stairs: Stairs, blocks: Sequence[Block]) -> list[Draft]:
        """Of each block, from the tokens and these arrays."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """What a head draws from: logits f32 [Q, N], hidden states [Q, D] behind the final norm, anchors int32 [places]."""

    stairs: Stairs
    logits: Array
    hidden: Array
    anchors: Array
    rows: SampleRows
    tokens: Array
    full: Array  # f32 [Q, V]; the logits themselves where every token can be said


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A launch on the device."""

    blocks: list[Block]
    stairs: Stairs
    fetched: Fetched


class BlockSteps:
    """Launches of one trunk, for the heads that share it.

    Attributes:
        graphs: of its launches; caches: KV pages of its layers, the target's and the scratch pages, once they are there.
    """

    def __init__(self, trunk: Trunk, room: Room) -> None:
        self.trunk, self.ops = trunk, trunk.decoder.ops
        ops, spec = self.ops, trunk.decoder.spec
        self.graphs = Graphs(ops, room.graph_bytes, room.graphs)
        self._padded = bool(ops.row_buckets) and room.graphs
        self.places = min(room.batch, PLACES)
        most = self._cover(self._stairs([self.most] * self.places))
        pages = -(-room.context // BLOCK)
        self.workspace = trunk.workspace(most.rows, most.sampled)
        self.inputs = BlockInputs(ops, most.rows, most.sampled, most.places, pages, mask=trunk.mask)
        attention = spec.layers[0].attention
        shape = (attention.heads, attention.kv_heads, attention.head_dim)
        ops.reserve(most.rows, most.sampled, trunk.vocab, [shape], pages + 1)
        self._tokens = ops.empty((most.sampled,), "int32")
        self._full = None if trunk.draft_ids is None else ops.empty((most.sampled, trunk.vocab), "float32")
        self.sampled, self.padded_places = most.sampled, most.places
        self.caches: tuple[KVCache, ...] = ()

    @property
    def nbytes(self) -> int:
        full = 0 if self._full is None else self._full.nbytes
        return self.workspace.nbytes + self.inputs.nbytes + self._tokens.nbytes + full

    def make_pool(self, caches: tuple[KVCache, ...], scratch: int) -> None:
        """Launches read and write these pages; `scratch` is the first of those for rows without a block."""
        self.caches, self.inputs.scratch = caches, scratch

    def release(self) -> None:
        self.graphs.clear()
        self.caches = ()
        for name in ("workspace", "inputs", "_tokens", "_full"):
            vars(self).pop(name, None)

    def draft(self, blocks: Sequence[Block], head: Head) -> list[Draft]:
        """A draft for each block, in order."""
        return in_parts(
            blocks,
            self.places,
            lambda part: self._launch(part, head),
            lambda one: head.drafts(one.fetched.get(), one.stairs, one.blocks),
        )

    def _launch(self, blocks: list[Block], head: Head) -> Launched:
        ops = self.ops
        asked = self._stairs([block.width for block in blocks])
        stairs = self._cover(asked)
        biases, draw = Biases.of(blocks, stairs.places), draw_of(blocks)
        apart = biases is not None or not ops.asynchronous
        layout = self.inputs.layout(stairs.rows, stairs.sampled)
        on = self._drawing(layout, stairs)
        shapes = (_shape(asked, draw, apart, head), _shape(stairs, draw, apart, head))

        def forward() -> Array:
            self._forward(layout)
            if not apart:
                head.draw(on, draw)
            return on.tokens

        with ops.step():
            self.inputs.fill_blocks(layout, stairs, blocks, biases)
            self.graphs.run(*shapes, forward)
            if apart:
                head.draw(on if biases is None else self._biased(on, biases), draw)
            fetched = ops.fetch(on.tokens, *head.confidence(on))
        return Launched(blocks, stairs, fetched)

    def resume(self, blocks: Sequence[Block], marks: Array, head: Head) -> Drafting:
        """See `Resuming`; for a head that draws on the device."""
        order = by_width(blocks)
        own = [blocks[at] for at in order]
        stairs, draw = self._cover(self._stairs([block.width for block in own])), draw_of(own)
        layout = self.inputs.layout(stairs.rows, stairs.sampled)
        self.inputs.fill_blocks(layout, stairs, own, None)
        assert layout.onward is not None and layout.moved is not None, "a device whose steps go on from one another"
        onward, (to, moved) = layout.onward, layout.moved
        on, last, anchors = self._drawing(moved, stairs), layout.arrays["last"], layout.arrays["anchors"]

        def forward() -> None:
            self.ops.resume(layout.batch, onward, marks, on.tokens, layout.draws.positions, to, last, anchors)
            self._forward(moved)
            head.draw(on, draw)

        return Drafting(_shape(stairs, draw, False, head), forward, on.tokens, rows_of_drafts(stairs, own, order))

    @property
    def most(self) -> int:
        """Drafts of a block."""
        return self.trunk.block - self.trunk.lead

    def _stairs(self, widths: Sequence[int]) -> Stairs:
        return Stairs.of(widths, 0 if self.trunk.causal else self.trunk.block, self.trunk.lead)

    def _cover(self, asked: Stairs) -> Stairs:
        return asked.padded(self.graphs.coverage, self.most) if self._padded else asked

    def _forward(self, layout: Layout) -> None:
        batch = layout.batch
        seen = batch if self.trunk.causal else replace(batch, positions=layout.arrays["last"])
        self.trunk.forward(batch, seen, layout.arrays["previous"], self.caches, self.workspace)

    def _drawing(self, layout: Layout, stairs: Stairs) -> Drawing:
        count = stairs.sampled
        logits = self.workspace.logits[:count]
        return Drawing(
            stairs,
            logits,
            self.workspace.gathered[:count],
            layout.arrays["anchors"][: stairs.places],
            layout.draws,
            self._tokens[:count],
            logits if self._full is None else self._full[:count],
        )

    def _biased(self, on: Drawing, biases: Biases) -> Drawing:
        ids, values = self.ops.asarray(biases.ids), self.ops.asarray(biases.values)
        return replace(on, rows=replace(on.rows, bias_ids=ids, bias_values=values))


def in_parts(
    blocks: Sequence[Block],
    places: int,
    launch: Callable[[list[Block]], L],
    collect: Callable[[L], Sequence[Draft]],
) -> list[Draft]:
    """A draft for each block, in order. The widest are launched first, at most `places` at once, and all before the first is waited for."""
    order = by_width(blocks)
    parts = [order[at : at + places] for at in range(0, len(order), places)]
    launched = [launch([blocks[at] for at in part]) for part in parts]
    drafts: dict[int, Draft] = {}
    for part, one in zip(parts, launched, strict=True):
        drafts |= zip(part, collect(one), strict=True)
    return [drafts[at] for at in range(len(blocks))]


def by_width(blocks: Sequence[Block]) -> list[int]:
    """Their places in a launch: the widest first."""
    return sorted(range(len(blocks)), key=lambda at: -blocks[at].width)


def rows_of_drafts(stairs: Stairs, blocks: Sequence[Block], order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Where a launch draws for each block, those of `blocks` being the ones at `order` of the caller's."""
    rows = {
        at: tuple(start + place for start in stairs.starts[: block.width])
        for place, (at, block) in enumerate(zip(order, blocks, strict=True))
    }
    return tuple(rows[at] for at in range(len(blocks)))


def cut(rows: SampleRows, first: int, count: int) -> SampleRows:
    """The controls of some rows, one behind another."""
    return replace(rows, **{name: getattr(rows, name)[first : first + count] for name in COLUMNS})


def _shape(stairs: Stairs, draw: Draw, apart: bool, head: Head) -> Shape:
    if apart:
        return BlockShape(stairs.rows, stairs.sampled, "apart", APART, stairs)
    return BlockShape(stairs.rows, stairs.sampled, draw, "", stairs, type(head).__name__)


def draw_of(blocks: Sequence[Block]) -> Draw:
    """What no draw of a launch goes beyond."""
    drawn = [block.params for block in blocks if block.params.temperature > 0]
    return "limited" if any(p.top_k or p.top_p < 1 for p in drawn) else "random" if drawn else "greedy"


def drafts_of(tokens: np.ndarray, sure: np.ndarray, stairs: Stairs, blocks: Sequence[Block]) -> list[Draft]:
    """What a launch has drawn, by block."""
    rows = ([start + place for start in stairs.starts[: block.width]] for place, block in enumerate(blocks))
    return [draft_of(tokens, sure, own) for own in rows]


def draft_of(tokens: np.ndarray, sure: np.ndarray, rows: list[int]) -> Draft:
    """What was drawn in these rows, up to the first in which nothing could be."""
    sound = next((at for at, row in enumerate(rows) if tokens[row] < 0), len(rows))
    confidence = tuple(min(1.0, float(sure[row])) if not math.isnan(sure[row]) else 0.0 for row in rows[:sound])
    return Draft(tuple(int(tokens[row]) for row in rows[:sound]), confidence, "" if sound else SILENT)
