"""Trained drafters: small networks that read the target's hidden states and guess the tokens behind the last one.

What such a drafter keeps of a position (keys and values, or a hidden state) is written inside of the target's forward pass, for every row,
at that row's own KV slot, in arrays with as many pages as the target's pool and under the same block tables. So prefix hits, preemption,
chunked prompts and rollback serve it as they serve the target. It only reads what the target computes: the target's bits do not change.
A draft is a launch of its own between two steps of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from power_lab.engine.shapes import Shape
    from power_lab.engine.speculation.drafters import Drafter
    from power_lab.engine.speculation.drafters.neural.inputs import Block
    from power_lab.kernels.ops import Array, Batch
    from power_lab.kernels.probe import Shapes

SCRATCH = 1
"""Pages of each place of a batch beyond the pool's: where a block's rows go that reach past their request's own blocks."""
REACH = 64
"""Most rows of a block, so that one scratch page is enough, and positions beyond the context that they may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What an engine gives to a companion.

    Attributes:
        rows: most rows of a step of the target, padding included; batch: most requests at once; context: longest request in tokens.
        clock: monotonic seconds.
        graph_bytes: budget of captured graphs. graphs: False runs every launch operation by operation.
    """

    rows: int
    batch: int
    context: int
    clock: Callable[[], float]
    graph_bytes: int
    graphs: bool = True

    @property
    def scratch(self) -> int:
        """Pages beyond the pool's: the one of place i is page `pages + i`."""
        return self.batch * SCRATCH


@dataclass(frozen=True, slots=True, eq=False)
class Drafting:
    """Drafts in the making, as a part of the target's next step.

    Attributes:
        shape: decides what is computed. forward: launches it; may be recorded, and depends on nothing else but the content of arrays.
        tokens: int32 on the device, all that is drawn. rows: of each block, where its drafts lie in there.
        light: whether no network takes part.
    """

    shape: Shape
    forward: Callable[[], None]
    tokens: Array
    rows: tuple[tuple[int, ...], ...]
    light: bool = False


@runtime_checkable
class Resuming(Protocol):
    """A drafter that can draft behind a token of which only the device knows, and where it is.

    Attributes:
        most: drafts that it makes of a request at once. places: requests of one launch.
    """

    @property
    def most(self) -> int: ...

    @property
    def places(self) -> int: ...

    def resume(self, blocks: Sequence[Block], marks: Array) -> Drafting:
        """Prepare drafts behind the marks of these blocks, all of which have one. marks: as in `Ops.mark`."""
        ...

    def light(self, request_id: int) -> bool:
        """Whether no network takes part in this request's next drafts, so that a round of such requests costs less."""
        ...


class Companion(Protocol):
    """One engine's trained drafter, riding along in the target's forward pass.

    Attributes:
        serves: the names (`speculate=`) that it drafts under, the best one first.
        taps: layers of which it reads the residual stream that enters; the number of layers is what leaves the last one, before the final
            norm. Ascending.
        needs_before: whether it reads `Batch.before`.
    """

    serves: tuple[str, ...]
    taps: tuple[int, ...]
    needs_before: bool

    @property
    def page_bytes(self) -> int:
        """Of one page of what it keeps of `BLOCK` positions."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Of its pages beyond the pool's."""
        ...

    @property
    def nbytes(self) -> int:
        """Of workspace, index arrays and tables: neither weights nor pages nor graphs."""
        ...

    @property
    def graph_nbytes(self) -> int: ...

    def make_pool(self, pages: int, caches: tuple) -> None:
        """Allocate pages, as many as the target's pool has, and those of `Room.scratch`, before anything is captured.

        caches: the target's own KV, for drafters that read it.
        """
        ...

    def tap(self, layer: int, x: Array, delta: Array | None, post: Array | None, batch: Batch) -> None:
        """Keep what it needs of x f32 [R, D] at one of `taps`, and leave it as it is.

        delta, post: behind the last layer, what `add_rms_norm` would still add.
        """
        ...

    def observe(self, batch: Batch, drawn: Array | None) -> None:
        """After the last layer: write what is kept of every row. drawn: int32, the tokens of the step before, for ids below 0 as in
        `Ops.embed`."""
        ...

    def drafter(self, name: str) -> Drafter:
        """That drafts under one of the names in `serves`."""
        ...

    def release(self) -> None:
        """Free what lies on the device; nothing can be launched afterwards."""
        ...


class Trained(Protocol):
    """A drafter's artifact, bound to its target: weights on the device, which several engines may share.

    Attributes:
        name, kind, sha256: of the artifact; serves: see `Companion`.
        nbytes: of its weights. shapes: what it computes with, for the exactness probe.
    """

    name: str
    kind: str
    sha256: str
    serves: tuple[str, ...]
    nbytes: int
    shapes: Shapes

    def companion(self, room: Room) -> Companion:
        """For one engine."""
        ...

    def release(self) -> None: ...
