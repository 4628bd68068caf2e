"""A trained drafter, and beside it what the sequence itself has said before: quotes and loops are copied, everything else is guessed.

Where the end of a sequence has occurred in it before, over `LEAST` tokens or more, what followed there is the draft, as long as there is
room; else the network drafts, `NETWORK` tokens at most. A request that lately would have come on fast by copying alone leaves the network
out, whose steps take a fifth of a round on a GPU; what copying would have brought is known of every round, as its tokens are.

On a device that draws by itself every row's token is noted at its KV slot: the search finds prompts, cached prefixes and what was emitted
alike, and a round need not come back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import cast

import numpy as np

from power_lab.engine.graphs import coverage_of
from power_lab.engine.shapes import Shape
from power_lab.engine.speculation.drafters import COPY, Draft, DraftAsk, Drafter
from power_lab.engine.speculation.drafters.copied import LEAST, NETWORK, Copied
from power_lab.engine.speculation.drafters.neural import Companion, Drafting, Resuming, Room
from power_lab.engine.speculation.drafters.neural.inputs import Block, Filled
from power_lab.engine.speculation.width import HOT
from power_lab.kernels.numba.recall import recalled
from power_lab.kernels.ops import BLOCK, Array, Batch, Ops

NAME = "hybrid"
MOST = 31
"""Drafts of a round."""


@dataclass(frozen=True, slots=True)
class CopyShape(Shape):
    """A launch that looks for matches. width: drafts of each place; network: the shape of the network's part, if there is one."""

    width: int = 0
    network: Shape | None = None

    __hash__ = Shape.__hash__


class HybridCompanion:
    """A companion that notes tokens, too. See `Companion`; everything else is that of `inner`.

    Args:
        inner: whose first drafter is `Resuming`. ops, room: the engine's.
    """

    def __init__(self, inner: Companion, ops: Ops, room: Room) -> None:
        self.inner, self._ops = inner, ops
        self.serves = (NAME, *inner.serves)
        self.taps, self.needs_before = inner.taps, inner.needs_before
        network = inner.drafter(inner.serves[0])
        self._search = Search(ops, room) if ops.asynchronous else None
        self._drafter = HybridDrafter(network, self._search)

    @property
    def page_bytes(self) -> int:
        return self.inner.page_bytes + (BLOCK * 4 if self._search is not None else 0)

    @property
    def scratch_bytes(self) -> int:
        return self.inner.scratch_bytes

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + (self._search.nbytes if self._search is not None else 0)

    @property
    def graph_nbytes(self) -> int:
        return self.inner.graph_nbytes

    def make_pool(self, pages: int, caches: tuple) -> None:
        self.inner.make_pool(pages, caches)
        if self._search is not None:
            self._search.told = self._ops.asarray(np.zeros(pages * BLOCK, np.int32))

    def tap(self, layer: int, x: Array, delta: Array | None, post: Array | None, batch: Batch) -> None:
        self.inner.tap(layer, x, delta, post, batch)

    def observe(self, batch: Batch, drawn: Array | None) -> None:
        self.inner.observe(batch, drawn)
        if self._search is not None:
            self._ops.note(batch.ids, drawn, batch.slots, self._search.told)

    def drafter(self, name: str) -> Drafter:
        return self._drafter if name == NAME else self.inner.drafter(name)

    def release(self) -> None:
        self.inner.release()
        if self._search is not None:
            self._search.release()


def beside(inner: Companion, ops: Ops, room: Room) -> Companion:
    """`inner` with a hybrid drafter, where its own can draft behind what only the device knows; else as it is."""
    return HybridCompanion(inner, ops, room) if isinstance(inner.drafter(inner.serves[0]), Resuming) else inner


class HybridDrafter:
    """Drafts under the name `hybrid`. What it proposes is a function of the tokens asked behind and of the network.

    Args:
        network: a drafter that is `Resuming`, too. search: on the device, where that draws by itself.
    """

    name = NAME
    most = MOST

    def __init__(self, network: Drafter, search: Search | None) -> None:
        self._network, self._search = network, search
        self._copied: dict[int, Copied] = {}
        self._copies: dict[int, bool] = {}

    @property
    def subset(self) -> frozenset[int] | None:
        """What its network can say, None where that is any token. Copies hold any."""
        return getattr(self._network, "subset", None)

    @property
    def places(self) -> int:
        return cast(Resuming, self._network).places

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None:
        self._network.begin(request_id, prompt, namespace)
        if self._search is not None:
            self._copied[request_id] = Copied(prompt)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        found = [recalled(np.asarray(ask.tokens), min(ask.width, MOST)) for ask in asks]
        self._copies |= {ask.request_id: length >= LEAST for ask, (_, length) in zip(asks, found, strict=True)}
        guessed = [
            replace(ask, width=min(ask.width, NETWORK))
            for ask, (_, length) in zip(asks, found, strict=True)
            if length < LEAST
        ]
        guesses = iter(self._network.propose(guessed) if guessed else ())
        return [
            replace(next(guesses), drafter=self._network.name)
            if length < LEAST
            else Draft(tuple(drafts.tolist()), drafter=COPY)
            for drafts, length in found
        ]

    def resume(self, blocks: Sequence[Block], marks: Array) -> Drafting:
        """See `Resuming`."""
        assert self._search is not None, "a device whose steps go on from one another"
        places = [place for place, block in enumerate(blocks) if not self.light(block.request_id)]
        if not places:
            return self._search.resume(blocks, marks, None, ())
        narrow = [replace(blocks[place], width=min(blocks[place].width, NETWORK)) for place in places]
        return self._search.resume(blocks, marks, cast(Resuming, self._network).resume(narrow, marks), places)

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        self._network.commit(request_id, emitted)
        if request_id in self._copied and emitted:
            self._copied[request_id].commit(emitted)
            self._copies[request_id] = self._copied[request_id].found

    def copies(self, request_id: int) -> bool:
        """Whether the request's latest drafts were copied: of a proposal, and once a round that was drafted on the device is committed."""
        return self._copies.get(request_id, False)

    def end(self, request_id: int) -> None:
        self._copied.pop(request_id, None)
        self._copies.pop(request_id, None)
        self._network.end(request_id)

    def light(self, request_id: int) -> bool:
        copied = self._copied.get(request_id)
        return copied is not None and copied.fast


@dataclass(frozen=True, slots=True, eq=False)
class _Laid:
    """Arrays of a launch of the search: marks, where the network's drafts lie, tables; drafts, flat and by place.

    Attributes:
        pieces: (first byte, shape) of the first three.
    """

    pieces: list[tuple[int, tuple[int, ...]]]
    came: Array
    source: Array
    tables: Array
    tokens: Array
    out: Array


class Search:
    """The search on the device, with its index arrays.

    Attributes:
        told: int32 [slots], the token of each row that was computed.
    """

    told: Array

    def __init__(self, ops: Ops, room: Room) -> None:
        self._ops, self._pages = ops, -(-room.context // BLOCK)
        self._coverage = coverage_of(ops) if room.graphs and ops.row_buckets else None
        self._places = self._cover(room.batch)
        self._raw = ops.empty((4 * self._places * (1 + MOST + self._pages),), "uint8")
        self._staging = ops.staging(self._raw)
        self._tokens = ops.empty((self._places * MOST,), "int32")
        self._layouts: dict[tuple[int, int], _Laid] = {}
        self._filled: Filled | None = None  # what the device holds

    @property
    def nbytes(self) -> int:
        return self._raw.nbytes + self._tokens.nbytes

    def release(self) -> None:
        for name in ("told", "_raw", "_staging", "_tokens", "_layouts"):
            vars(self).pop(name, None)

    def resume(
        self, blocks: Sequence[Block], marks: Array, network: Drafting | None, guessed: Sequence[int]
    ) -> Drafting:
        """Drafts behind the marks of these blocks. network: makes drafts of the blocks `guessed`, for where nothing is found."""
        places, widest = self._cover(len(blocks)), max(block.width for block in blocks)
        width = next(hot for hot in HOT if hot >= widest)
        laid = self._laid_out(places, width)
        made = () if network is None else network.rows
        filled = Filled(blocks, (places, width, tuple(guessed), made))
        if filled != self._filled:  # else the device has it: it writes none of it
            self._write(laid, blocks, guessed, made)
            self._filled = filled
        given = self._tokens if network is None else network.tokens
        ops, told = self._ops, self.told

        def forward() -> None:
            if network is not None:
                network.forward()
            ops.recall(told, laid.tables, laid.came, marks, LEAST, laid.source, given, laid.out)

        drawn = "greedy" if network is None else network.shape.sampling
        part = None if network is None else network.shape
        shape = CopyShape(places * width, places * width, drawn, "", width, part)
        rows = tuple(tuple(range(at * width, at * width + block.width)) for at, block in enumerate(blocks))
        return Drafting(shape, forward, laid.tokens, rows, network is None)

    def _write(
        self, laid: _Laid, blocks: Sequence[Block], guessed: Sequence[int], made: Sequence[Sequence[int]]
    ) -> None:
        """Send a launch's arrays. made: where the network's drafts of the blocks `guessed` lie."""
        memory = self._staging.open()
        came, source, tables = (
            memory[first : first + 4 * prod(shape)].view(np.int32).reshape(shape) for first, shape in laid.pieces
        )
        came[:], source[:], tables[:] = -1, -1, 0
        for place, block in enumerate(blocks):
            came[place] = block.mark
            tables[place, : len(block.blocks)] = block.blocks
        for place, rows in zip(guessed, made, strict=True):
            source[place, : len(rows)] = rows
        self._staging.send(4 * sum(prod(shape) for _, shape in laid.pieces))

    def _laid_out(self, places: int, width: int) -> _Laid:
        """The arrays of launches of so many places and drafts."""
        if (places, width) not in self._layouts:
            shapes: list[tuple[int, ...]] = [(places,), (places, width), (places, self._pages)]
            pieces = [(4 * sum(map(prod, shapes[:at])), shape) for at, shape in enumerate(shapes)]
            came, source, tables = (self._ops.view(self._raw, first, shape, "int32") for first, shape in pieces)
            tokens = self._tokens[: places * width]
            self._layouts[places, width] = _Laid(pieces, came, source, tables, tokens, tokens.reshape(places, width))
        return self._layouts[places, width]

    def _cover(self, requests: int) -> int:
        return (self._coverage.cover(requests) if self._coverage is not None else None) or requests
