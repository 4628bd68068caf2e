"""The arrays of a block drafter's launch: index arrays and sampling controls, sent with one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from power_lab.engine import sampler
from power_lab.engine.batch import Inputs, Layout, slots_of
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters.neural.stairs import Stairs
from power_lab.kernels.ops import Ops

_PARAMS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seeds": "seed"}
GREEDY = SamplingParams(seed=0)


@dataclass(frozen=True, slots=True)
class Block:
    """What one request wants drafted.

    Attributes:
        anchor: its last committed token; position: of that token, whose keys and values are not there yet.
        width: drafts. blocks: the request's KV blocks, which cover the positions before.
        params: how the target draws.
        mark: where its anchor is told on the device; anchor and position are then 0. -1: nowhere.
        request_id: whose, for drafters that know requests.
    """

    anchor: int
    position: int
    width: int
    blocks: Sequence[int]
    params: SamplingParams = GREEDY
    mark: int = -1
    request_id: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """What a launch's arrays hold, where all of it is relative to marks: then the next launch of the same blocks need not write it again.

    Attributes:
        blocks: theirs. beside: what else decides.
    """

    blocks: Sequence[Block]
    beside: object

    @classmethod
    def of(cls, blocks: Sequence[Block], beside: object) -> Filled | None:
        """None where the host knows where some blocks are."""
        return cls(blocks, beside) if all(block.mark >= 0 for block in blocks) else None

    def __eq__(self, other: object) -> bool:
        """Params are compared by identity: a request's never change, and to compare their fields would take longer than to write."""
        return (
            isinstance(other, Filled)
            and self.beside == other.beside
            and len(self.blocks) == len(other.blocks)
            and all(
                a.mark == b.mark and a.width == b.width and a.params is b.params and a.blocks == b.blocks
                for a, b in zip(self.blocks, other.blocks, strict=True)
            )
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, eq=False)
class Biases:
    """Logit biases of a launch's requests, as `SampleRows` reads them; the spans are by place."""

    ids: np.ndarray
    values: np.ndarray
    spans: np.ndarray

    @classmethod
    def of(cls, blocks: Sequence[Block], places: int) -> Biases | None:
        """None where nobody has any."""
        each = [sorted(block.params.logit_bias.items()) for block in blocks]
        if not any(each):
            return None
        ends = np.cumsum([len(biases) for biases in each])
        spans = np.zeros((places, 2), np.int64)
        spans[: len(each)] = np.stack([ends - [len(biases) for biases in each], ends], axis=1)
        together = [pair for biases in each for pair in biases]
        ids, values = ([pair[at] for pair in together] for at in (0, 1))
        return cls(np.asarray(ids, np.int32), np.asarray(values, np.float32), spans)


class BlockInputs(Inputs):
    """The block rows of several requests.

    Args:
        rows, sampled, places: most rows, logit rows and requests of a launch, padding included. pages: most pages of a sequence.
        scratch: the first of the pages where rows go that reach past a request's blocks; a place has one.
        mask: token id of the rows behind an anchor.
    """

    def __init__(
        self, ops: Ops, rows: int, sampled: int, places: int, pages: int, *, scratch: int = 0, mask: int
    ) -> None:
        super().__init__(ops, rows, sampled, places, pages + 1, resumes=ops.asynchronous)
        self.scratch = scratch
        self._mask = mask

    def _shapes(self, rows: int, sampled: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Beside those of a step: of each row the last position and the row before it in its block; the anchors."""
        return {**dict.fromkeys(("last", "previous", "anchors"), ((rows,), "int32")), **super()._shapes(rows, sampled)}

    def fill_blocks(self, layout: Layout, stairs: Stairs, blocks: Sequence[Block], biases: Biases | None) -> None:
        """Write a launch's values and send them. Places beyond the requests compute on the dummy page."""
        steady = Filled.of(blocks, stairs)
        if self._holds(steady):
            return
        memory = self._staging.open()
        host = layout.host(memory)
        tables, sizes = host["tables"], stairs.blocks()
        fill_tables(tables, stairs.places, blocks, self.scratch)
        anchors, firsts = np.zeros(stairs.places, np.int64), np.zeros(stairs.places, np.int64)
        anchors[: len(blocks)] = [block.anchor for block in blocks]
        firsts[: len(blocks)] = [block.position for block in blocks]
        ends = np.cumsum(sizes)
        owner = np.repeat(np.arange(stairs.places), sizes)
        row: np.ndarray = np.arange(stairs.rows) - (ends - sizes)[owner]
        positions = firsts[owner] + row
        host["ids"][:] = np.where(row == 0, anchors[owner], self._mask)
        host["row_positions"][:] = positions
        host["last"][:] = (firsts + sizes - 1)[owner]
        host["previous"][:] = np.where(row == 0, -1, np.arange(stairs.rows) - 1)
        host["table_of"][:] = owner
        host["slots"][:] = slots_of(tables, owner, positions)
        host["anchors"][: stairs.places] = anchors
        if blocks[0].mark >= 0:
            fill_marks(host, blocks, owner, row == 0)
        places, distance = stairs.drawn()
        host["sampled"][:] = (ends - sizes)[places] + distance - 1 + stairs.lead
        fill_draws(host, [block.params for block in blocks], places, biases)
        host["positions"][:] = firsts[places] + distance
        self._send(layout, stairs.places, steady)


def fill_tables(tables: np.ndarray, places: int, blocks: Sequence[Block], scratch: int) -> None:
    """Block tables of a launch: each request's own, then its place's scratch page, the first of which is `scratch`."""
    for place, block in enumerate(blocks):
        count = len(block.blocks)
        tables[place, :count] = block.blocks
        tables[place, count] = scratch + place
        tables[place, count + 1 :] = 0
    tables[len(blocks) : places] = 0


def fill_marks(host: dict[str, np.ndarray], blocks: Sequence[Block], owner: np.ndarray, first: np.ndarray) -> None:
    """Leave it to the device where the rows of these blocks are. owner: of each row its place; first: whether it is the anchor's."""
    host["windows"][:], host["came"][:] = 0, -1
    host["came"][: len(blocks)] = [block.mark for block in blocks]
    host["source"][:] = first
    host["slots"][owner < len(blocks)] = -1


def fill_draws(
    host: dict[str, np.ndarray], params: list[SamplingParams], places: np.ndarray, biases: Biases | None
) -> None:
    """Each draws as its target, but for penalties; padding draws greedily."""
    for name, (tail, dtype, padding) in sampler.COLUMNS.items():
        values = np.full((int(places.max()) + 1, *tail), padding, dtype)
        if name in _PARAMS:
            values[: len(params)] = [getattr(one, _PARAMS[name]) or 0 for one in params]
        elif name == "bias_span" and biases is not None:
            values = biases.spans
        host[name][:] = values[places]
