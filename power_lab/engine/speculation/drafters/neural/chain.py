"""Drafting one token after another: a small network whose every row reads the token that the row before has drawn.

All steps of all requests are one launch. Where the device draws by itself, the whole chain is one captured graph, and the host waits once,
at its end; elsewhere each step's network is recorded, and its draws come between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from power_lab.engine.batch import Inputs, Layout, slots_of
from power_lab.engine.graphs import Graphs
from power_lab.engine.speculation.drafters import Draft, DraftAsk
from power_lab.engine.speculation.drafters.neural import Drafting, Room
from power_lab.engine.speculation.drafters.neural.artifact import Artifact, Binder, Target, refused
from power_lab.engine.speculation.drafters.neural.inputs import (
    GREEDY,
    Biases,
    Block,
    Filled,
    fill_draws,
    fill_marks,
    fill_tables,
)
from power_lab.engine.speculation.drafters.neural.stairs import BlockShape, Stairs
from power_lab.engine.speculation.drafters.neural.steps import (
    APART,
    PLACES,
    by_width,
    cut,
    drafts_of,
    draw_of,
    in_parts,
    rows_of_drafts,
)
from power_lab.kernels.ops import BLOCK, Array, Batch, Draw, Fetched, Ops, SampleRows, Weight

LONGEST = 15  # drafts of a chain; what comes behind these is seldom right
BEHIND = "the request's last tokens are not computed yet"


@dataclass(frozen=True, slots=True, eq=False)
class Saying:
    """How a drafter's hidden states become logits.

    Attributes:
        head: [N, width]; softcap: of its logits, 0 is off; vocab: V of the target.
        ids: int32 [N] on the device, the tokens that its rows mean; None where N is V. subset: the same on the host.
    """

    head: Weight
    softcap: float
    vocab: int
    ids: Array | None
    subset: frozenset[int] | None

    @classmethod
    def of(cls, artifact: Artifact, target: Target, binder: Binder, width: int) -> tuple[Saying, int]:
        """By `head.weight` where the artifact has one, else by the target's head, of which `draft_ids` may name rows; see `Target.said`.

        Returns it, and the bytes that it takes beside the target's and the binder's. Raises ConfigError for key `draft`.
        """
        spec, stored = target.spec, artifact.ids("draft_ids", target.spec.vocab)
        ids, kept = target.said(stored)
        listed = None if ids is None else target.ops.asarray(ids)
        subset = None if ids is None else frozenset(ids.tolist())
        if artifact.has("head.weight"):
            rows = spec.vocab if stored is None else len(stored)
            head = binder.matrix("head.weight", rows, width, kept)
            return cls(head, 0.0, spec.vocab, listed, subset), 0
        if width != spec.width:
            raise refused(artifact.path, f"tensor 'head.weight' is missing, and the target's has {spec.width} columns")
        head = binder.multiplied(target.head(ids))
        return cls(head, spec.final_softcap, spec.vocab, listed, subset), 0 if ids is None else head.data.nbytes


class Chain(Protocol):
    """A drafter's network.

    Attributes:
        ops: the device; saying: its output.
        moves: whether its rows are at the positions of the tokens that they read; otherwise all are at the anchor's.
        first: the least position of an anchor that it can draft behind.
        attentions: (query heads, KV heads, head_dim) of its layers.
    """

    ops: Ops
    saying: Saying
    moves: bool
    first: int
    attentions: list[tuple[int, int, int]]

    def advance(self, step: int, batch: Batch, seen: Batch, drawn: Array) -> Array:
        """Compute draft number `step` of some requests, one row each; returns hidden states [R, width] for the output head.

        seen: the batch with the positions up to which rows attend. drawn: int32, earlier draws, for ids below 0 as in `Ops.embed`.
        """
        ...


class ChainInputs(Inputs):
    """The rows of a chain, step by step: those of one step are a slice, and begin with the requests that go on.

    Args:
        rows, places: most rows and requests of a launch, padding included. pages: most pages of a sequence.
        moves: see `Chain`.
    """

    def __init__(self, ops: Ops, rows: int, places: int, pages: int, *, moves: bool) -> None:
        super().__init__(ops, rows, rows, places, pages + 1, before=True, resumes=ops.asynchronous)
        self.scratch = 0
        self._moves = moves

    def _shapes(self, rows: int, sampled: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"last": ((rows,), "int32"), **super()._shapes(rows, sampled)}

    def fill_chain(self, layout: Layout, stairs: Stairs, blocks: Sequence[Block], biases: Biases | None) -> None:
        """Write a launch's values and send them. Places beyond the requests compute on the dummy page."""
        steady = Filled.of(blocks, stairs)
        if self._holds(steady):
            return
        memory = self._staging.open()
        host = layout.host(memory)
        tables = host["tables"]
        fill_tables(tables, stairs.places, blocks, self.scratch)
        places, step, ids = _rows(stairs)
        params, count = [block.params for block in blocks], len(blocks)
        shown = (stairs, params)  # what lies here of an earlier launch of the same requests is left
        if self._shown.pop(id(memory), None) != shown:
            host["ids"][:] = ids
            host["table_of"][:] = places
            host["sampled"][:] = np.arange(stairs.sampled)
            fill_draws(host, params, places, biases)
        self._shown[id(memory)] = shown
        host["ids"][:count] = [block.anchor for block in blocks]
        firsts = np.ones(stairs.places, np.int64)
        firsts[:count] = [block.position for block in blocks]
        resumed = blocks[0].mark >= 0
        positions = firsts[places] + step
        before = slots_of(tables, places, np.maximum(positions - 1, 0))
        host["before"][:] = np.where(positions > 0, before, -1)
        if self._moves:
            host["row_positions"][:], host["last"][:] = positions, positions
            host["slots"][:] = slots_of(tables, places, positions)
        else:  # nothing is kept of a row: what an operation writes goes to the dummy page
            host["row_positions"][:], host["last"][:] = firsts[places], firsts[places] - 1
            host["slots"][:] = 0
            for place, block in enumerate(blocks):  # the caches that are read have no scratch pages
                tables[place, len(block.blocks)] = 0
        host["positions"][:] = positions + 1
        if resumed:
            slots = host["slots"].copy()
            fill_marks(host, blocks, places, step == 0)
            host["before"][places < count] = -2
            if not self._moves:  # nothing is kept of a row
                host["slots"][:] = slots
        self._send(layout, stairs.places, steady)


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A launch on the device: its draws, and their log-probabilities."""

    blocks: list[Block]
    stairs: Stairs
    fetched: Fetched


class ChainSteps:
    """The launches of one chain.

    Attributes:
        graphs: of its launches.
    """

    def __init__(self, chain: Chain, room: Room) -> None:
        self.chain, ops, saying = chain, chain.ops, chain.saying
        self.ops = ops
        self.graphs = Graphs(ops, room.graph_bytes, room.graphs)
        self._padded = bool(ops.row_buckets) and room.graphs
        self.places = min(room.batch, PLACES)
        most = self._cover(Stairs.of([LONGEST] * self.places))
        pages = -(-room.context // BLOCK)
        self.inputs = ChainInputs(ops, most.sampled, most.places, pages, moves=chain.moves)
        for vocabulary in {saying.vocab, saying.head.rows}:
            ops.reserve(most.places, most.places, vocabulary, chain.attentions, pages + 1)
        self._tokens = ops.empty((most.sampled,), "int32")
        self._sure = ops.empty((most.sampled, 1), "float32")  # log-probabilities of the draws
        self._logits = ops.empty((most.places, saying.head.rows), "float32")
        self._full = self._logits if saying.ids is None else ops.empty((most.places, saying.vocab), "float32")
        self.most = most

    @property
    def nbytes(self) -> int:
        full = 0 if self._full is self._logits else self._full.nbytes
        return self.inputs.nbytes + self._tokens.nbytes + self._sure.nbytes + self._logits.nbytes + full

    def release(self) -> None:
        self.graphs.clear()
        for name in ("inputs", "_tokens", "_sure", "_logits", "_full"):
            vars(self).pop(name, None)

    def draft(self, blocks: Sequence[Block]) -> list[Draft]:
        """A draft for each block, in order."""
        return in_parts(blocks, self.places, self._launch, _collect)

    def resume(self, blocks: Sequence[Block], marks: Array) -> Drafting:
        """See `Resuming`."""
        order = by_width(blocks)
        own = [blocks[at] for at in order]
        asked, draw = Stairs.of([block.width for block in own]), draw_of(own)
        stairs = self._cover(asked)
        layout = self.inputs.layout(stairs.sampled, stairs.sampled)
        self.inputs.fill_chain(layout, stairs, own, None)
        assert layout.onward is not None and layout.moved is not None, "a device whose steps go on from one another"
        onward, (to, moved), last = layout.onward, layout.moved, layout.arrays["last"]

        def forward() -> None:
            self.ops.resume(layout.batch, onward, marks, self._tokens, layout.draws.positions, to, last)
            self._whole(moved, stairs, draw, sure=False)

        return Drafting(
            _captured(stairs, draw), forward, self._tokens[: stairs.sampled], rows_of_drafts(stairs, own, order)
        )

    def _launch(self, blocks: list[Block]) -> Launched:
        ops, asked = self.ops, Stairs.of([block.width for block in blocks])
        stairs = self._cover(asked)
        biases, draw = Biases.of(blocks, stairs.places), draw_of(blocks)
        layout = self.inputs.layout(stairs.sampled, stairs.sampled)
        with ops.step():
            self.inputs.fill_chain(layout, stairs, blocks, biases)
            if biases is None and ops.asynchronous:
                shapes = (_captured(asked, draw), _captured(stairs, draw))
                self.graphs.run(*shapes, lambda: self._whole(layout, stairs, draw))
            else:
                self._apart(layout, asked, stairs, biases, draw)
            fetched = ops.fetch(self._tokens[: stairs.sampled], self._sure[: stairs.sampled])
        return Launched(blocks, stairs, fetched)

    def _cover(self, asked: Stairs) -> Stairs:
        """What such a launch is captured as. Only requests are padded: a step more would take as long as the others."""
        places = self.graphs.coverage.cover(asked.places) if self._padded else None
        return Stairs(places, (places,) * len(asked.counts)) if places else asked

    def _whole(self, layout: Layout, stairs: Stairs, draw: Draw, sure: bool = True) -> Array:
        """Every step, draws included; their log-probabilities where they are asked for."""
        for step in range(len(stairs.counts)):
            logits = self._network(layout, stairs, step)
            if sure:
                self._draw(layout, stairs, step, self._among_all(logits), None, draw)
            else:
                rows, tokens = self._drawn(layout, stairs, step)
                self.ops.sample(logits, rows, tokens, draw, self.chain.saying.ids)
        return self._tokens

    def _apart(self, layout: Layout, asked: Stairs, stairs: Stairs, biases: Biases | None, draw: Draw) -> None:
        """The same with the network of each step recorded by itself."""
        listed = None if biases is None else (self.ops.asarray(biases.ids), self.ops.asarray(biases.values))
        for step in range(len(stairs.counts)):
            shapes = (_of_step(asked, step), _of_step(stairs, step))
            logits = self.graphs.run(*shapes, lambda step=step: self._among_all(self._network(layout, stairs, step)))
            self._draw(layout, stairs, step, logits, listed, draw)

    def _network(self, layout: Layout, stairs: Stairs, step: int) -> Array:
        """Logits f32 [R, N] of one step, of the tokens that can be drafted."""
        ops, saying, first, count = self.ops, self.chain.saying, stairs.starts[step], stairs.counts[step]
        batch = rows_of(layout.batch, first, count)
        seen = replace(batch, positions=layout.arrays["last"][first : first + count])
        hidden, logits = self.chain.advance(step, batch, seen, self._tokens), self._logits[:count]
        ops.linear(hidden, (saying.head,), logits)
        if saying.softcap:
            ops.softcap(logits, saying.softcap)
        return logits

    def _among_all(self, logits: Array) -> Array:
        """f32 [R, V]."""
        ids, full = self.chain.saying.ids, self._full[: logits.shape[0]]
        if ids is not None:
            self.ops.scatter_columns(logits, ids, full)
        return full

    def _drawn(self, layout: Layout, stairs: Stairs, step: int) -> tuple[SampleRows, Array]:
        """A step's controls, and where its tokens go."""
        first, count = stairs.starts[step], stairs.counts[step]
        return cut(layout.draws, first, count), self._tokens[first : first + count]

    def _draw(
        self,
        layout: Layout,
        stairs: Stairs,
        step: int,
        logits: Array,
        listed: tuple[Array, Array] | None,
        draw: Draw,
    ) -> None:
        """Draw a step's tokens, and put their log-probabilities beside those of the other steps: the host fetches all at once."""
        first, count = stairs.starts[step], stairs.counts[step]
        rows, tokens = self._drawn(layout, stairs, step)
        if listed is not None:
            rows = replace(rows, bias_ids=listed[0], bias_values=listed[1])
        self.ops.sample(logits, rows, tokens, draw)
        found = self.ops.logprobs(logits, tokens, 0)[0]
        self.ops.tap(found.reshape(count, 1), None, None, 0.0, self._sure[first : first + count], 0, None)


class ChainDrafter:
    """Drafts under one name. Everything that it keeps of a request lies in the target's pages."""

    most = LONGEST

    def __init__(self, name: str, steps: ChainSteps) -> None:
        self.name, self.subset, self.places = name, steps.chain.saying.subset, steps.places
        self._steps = steps

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None:
        """Nothing is kept but what the target's steps write."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        first = self._steps.chain.first
        ready = [ask.computed == len(ask.tokens) - 1 >= first for ask in asks]
        blocks = [_block(ask) for ask, now in zip(asks, ready, strict=True) if now]
        drafts = iter(self._steps.draft(blocks) if blocks else ())
        return [next(drafts) if now else Draft(note=BEHIND) for now in ready]

    def resume(self, blocks: Sequence[Block], marks: Array) -> Drafting:
        return self._steps.resume(blocks, marks)

    def light(self, request_id: int) -> bool:
        return False

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        """The target's next step writes what is kept of these."""

    def end(self, request_id: int) -> None:
        """Its pages go where the target's go."""


@lru_cache(maxsize=256)
def _rows(stairs: Stairs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each row of a launch its place, its step, and the id that stands for the draw that it reads; of the first step's rows 0."""
    places, distance = stairs.drawn()
    step = distance - 1
    earlier = np.asarray([0, *stairs.starts])[step] + places
    return places, step, np.where(step == 0, 0, -earlier - 1)


def rows_of(batch: Batch, first: int, count: int) -> Batch:
    """Some rows of a batch, one behind another; their tables are those of all."""
    names = ("ids", "positions", "slots", "table_of", "before")
    return replace(batch, **{name: getattr(batch, name)[first : first + count] for name in names})


def _block(ask: DraftAsk) -> Block:
    return Block(ask.tokens[-1], ask.computed, min(ask.width, LONGEST), ask.blocks, ask.params or GREEDY)


def _captured(stairs: Stairs, draw: Draw) -> BlockShape:
    return BlockShape(stairs.sampled, stairs.sampled, draw, "", stairs, "chain")


def _of_step(stairs: Stairs, step: int) -> BlockShape:
    return BlockShape(stairs.counts[step], stairs.counts[step], "apart", APART, stairs, f"step {step}")


def _collect(launched: Launched) -> list[Draft]:
    tokens, sure = launched.fetched.get()
    found = np.exp(np.minimum(sure[:, 0].astype(np.float64), 0.0))
    return drafts_of(tokens, found, launched.stairs, launched.blocks)
