"""DFlash2: a DFlash trunk whose sublayers are filtered along the block, and a walk over each row's best candidates.

A filter's coefficients come from the sublayer's normed input: one half filters that input, the other one what the sublayer makes of it. The
context's rows are not filtered. The walk weighs pairs of neighbouring tokens: score[c] = unary[c] + sum_r A[before][r] (S h)[r] B[c][r].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from power_lab.engine.models.decoder import Decoder, Workspace
from power_lab.engine.models.spec import ModelSpec, ModelWeights
from power_lab.engine.speculation.drafters import Draft
from power_lab.engine.speculation.drafters.neural.artifact import Artifact, Binder, Target, refused
from power_lab.engine.speculation.drafters.neural.dflash import DFlash, DFlashConfig
from power_lab.engine.speculation.drafters.neural.inputs import Block
from power_lab.engine.speculation.drafters.neural.noise import choose
from power_lab.engine.speculation.drafters.neural.stairs import Stairs
from power_lab.engine.speculation.drafters.neural.steps import SILENT, BlockSteps, Drawing, Head
from power_lab.kernels.ops import Array, Batch, Draw, KVCache, Ops, Weight

Rank = Annotated[int, Meta(ge=1, le=4096)]


class DFlash2Config(DFlashConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `DFlashConfig`.

    Attributes:
        conv_taps: rows that a filter reads, the row's own first; conv_group: neighbouring values that share a coefficient.
        selector_rank, selector_top_k: of the walk's weights; candidates of each row.
    """

    conv_taps: Annotated[int, Meta(ge=1, le=16)]
    conv_group: Annotated[int, Meta(ge=1, le=1 << 16)]
    selector_rank: Rank
    selector_top_k: Annotated[int, Meta(ge=1, le=20)] = 16


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """Of one sublayer: base f32 [2, taps, D], projection [2 * taps * groups, D]."""

    base: Array
    proj: Weight


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FilteredWorkspace(Workspace):
    """With coefficients f32 [R, 2 * taps * groups], a filtered input and an unfiltered output [R, D], and the rows before."""

    coef: Array
    filtered: Array
    raw: Array
    previous: Array | None = None

    @property
    def nbytes(self) -> int:
        names = (*Workspace.__slots__, "coef", "filtered", "raw")
        return sum(getattr(self, name).nbytes for name in names)


class FilteredDecoder(Decoder):
    """Layers with a filter around each part: [layers] of attention and of the feed-forward."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, ops: Ops, positions: int, filters: list[tuple[Filter, Filter]]
    ) -> None:
        super().__init__(spec, weights, ops, positions)
        self._filters = filters

    def _left(self, out: Array) -> Array:
        """The filter behind a part writes it whole."""
        return out

    def _attend(
        self, index: int, batch: Batch, seen: Batch, cache: KVCache, work: Workspace, x: Array, out: Array
    ) -> None:
        filter, raw, filtered = self._before(self._filters[index][0], work, x)
        super()._attend(index, batch, seen, cache, work, filtered, raw)
        self._after(filter, work, raw, out)

    def _feed(self, index: int, work: Workspace, x: Array, out: Array) -> None:
        filter, raw, filtered = self._before(self._filters[index][1], work, x)
        super()._feed(index, work, filtered, raw)
        self._after(filter, work, raw, out)

    def _before(self, filter: Filter, work: Workspace, x: Array) -> tuple[Filter, Array, Array]:
        assert isinstance(work, FilteredWorkspace) and work.previous is not None
        rows = x.shape[0]
        coef, filtered = work.coef[:rows], work.filtered[:rows]
        self.ops.linear(x, (filter.proj,), coef)
        self.ops.dynamic_conv(x, coef, filter.base, 0, work.previous[:rows], filtered)
        return filter, work.raw[:rows], filtered

    def _after(self, filter: Filter, work: Workspace, raw: Array, out: Array) -> None:
        assert isinstance(work, FilteredWorkspace) and work.previous is not None
        rows = raw.shape[0]
        self.ops.dynamic_conv(raw, work.coef[:rows], filter.base, 1, work.previous[:rows], out)


class DFlash2(DFlash):
    """The artifact, bound to its target. See `Trained`; as a network, see `Trunk`."""

    kind = "dflash2"
    names = ("dflash2",)
    config_of = DFlash2Config

    def __init__(self, artifact: Artifact, target: Target, context: int) -> None:
        self._filters: list[tuple[Filter, Filter]] = []
        self._path = artifact.path
        super().__init__(artifact, target, context)

    def _bind_more(self, binder: Binder, config: DFlashConfig, width: int, vocab: int) -> None:
        assert isinstance(config, DFlash2Config)
        if width % config.conv_group:
            raise refused(self._path, f"'config': a width of {width} is no multiple of conv_group {config.conv_group}")
        self._coefficients = 2 * config.conv_taps * (width // config.conv_group)
        for i in range(config.layers):
            attention, feed = (
                Filter(
                    binder.tensor(f"layers.{i}.{name}.base", (2, config.conv_taps, width)),
                    binder.matrix(f"layers.{i}.{name}.proj.weight", self._coefficients, width),
                )
                for name in ("attn_conv", "ffn_conv")
            )
            self._filters.append((attention, feed))
        rank = config.selector_rank
        self.before = binder.rows("selector_predecessor.weight", vocab, rank)
        self.after = binder.rows("selector_successor.weight", vocab, rank)
        self.selector = binder.matrix("selector_hidden.weight", rank, width)
        self.top = config.selector_top_k

    def _made(self, spec: ModelSpec, weights: ModelWeights, ops: Ops, positions: int) -> Decoder:
        return FilteredDecoder(spec, weights, ops, positions, self._filters)

    def heads(self, steps: BlockSteps) -> dict[str, Head]:
        return {"dflash2": Walk(self, steps)}

    def workspace(self, rows: int, sampled: int) -> Workspace:
        plain, ops, width = super().workspace(rows, sampled), self.decoder.ops, self.decoder.spec.width
        return FilteredWorkspace(
            **{name: getattr(plain, name) for name in Workspace.__slots__},
            coef=ops.empty((rows, self._coefficients), "float32"),
            filtered=ops.empty((rows, width), self.fc.operand),
            raw=ops.empty((rows, width), "float32"),
        )

    def forward(self, batch: Batch, seen: Batch, previous: Array, caches: tuple[KVCache, ...], work: Workspace) -> None:
        assert isinstance(work, FilteredWorkspace)
        self.decoder.forward(batch, caches, replace(work, previous=previous), seen=seen)


class Walk:
    """Chooses a path through the rows' best candidates, on the host. See `Head`."""

    resumes = False

    def __init__(self, trained: DFlash2, steps: BlockSteps) -> None:
        self._trained, self._ops = trained, steps.ops
        ids = trained.draft_ids
        self._ids = np.arange(trained.vocab) if ids is None else np.asarray(self._ops.tohost(ids))
        self._none = self._ops.asarray(np.zeros(steps.sampled, np.int32))
        self._mixed = self._ops.empty((steps.sampled, trained.selector.rows), "float32")

    @property
    def nbytes(self) -> int:
        return self._none.nbytes + self._mixed.nbytes

    def draw(self, on: Drawing, draw: Draw) -> None:
        self._ops.linear(on.hidden, (self._trained.selector,), self._mixed[: on.stairs.sampled])

    def confidence(self, on: Drawing) -> tuple[Array, ...]:
        count = on.stairs.sampled
        _, candidates, unary = self._ops.logprobs(on.logits, self._none[:count], self._trained.top)
        return candidates, unary, self._mixed[:count]

    def drafts(self, fetched: Sequence[np.ndarray], stairs: Stairs, blocks: Sequence[Block]) -> list[Draft]:
        _, candidates, unary, mixed = fetched
        walks = []
        for place, block in enumerate(blocks):
            rows = [start + place for start in stairs.starts[: block.width]]
            walks.append(self._walk(block, candidates[rows], unary[rows], mixed[rows]))
        return walks

    def _walk(self, block: Block, candidates: np.ndarray, unary: np.ndarray, mixed: np.ndarray) -> Draft:
        """candidates int [W, K], of the draft vocabulary; unary f32 [W, K], up to a constant in each row; mixed f32 [W, rank]."""
        bias = block.params.logit_bias
        tokens, sure, before = [], [], block.anchor
        for row, (best, own, hidden) in enumerate(zip(candidates, unary, mixed, strict=True), start=1):
            if not np.isfinite(own[0]):
                break
            ids = self._ids[best]
            scores = own + self._trained.after[ids] @ (self._trained.before[before] * hidden)
            scores = scores + [bias.get(int(token), 0.0) for token in ids] if bias else scores
            weights = np.exp(scores - scores.max())
            at = choose(scores, ids, block.params, block.position + row)
            before = int(ids[at])
            tokens.append(before)
            sure.append(float(weights[at] / weights.sum()))
        return Draft(tuple(tokens), tuple(sure), "" if tokens else SILENT)
