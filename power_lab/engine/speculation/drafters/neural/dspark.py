"""DSpark: a Markov head on a block drafter. Each token's logits also depend on the one before it, which is drawn first.

logits_i = head h_i + W2 W1[token before], and a confidence sigmoid(w [h_i ; W1[token before]] + b): how likely it is that the target says
the draft. The tokens are drawn one after another, all requests' at one position together; nothing comes to the host in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from power_lab.engine.speculation.drafters import Draft
from power_lab.engine.speculation.drafters.neural.artifact import Binder
from power_lab.engine.speculation.drafters.neural.inputs import Block
from power_lab.engine.speculation.drafters.neural.stairs import Stairs
from power_lab.engine.speculation.drafters.neural.steps import BlockSteps, Drawing, cut, drafts_of
from power_lab.kernels.ops import Array, Draw, Weight


@dataclass(frozen=True, slots=True, eq=False)
class Markov:
    """The head's weights: W1 [V, r], W2 [N, r], of the confidence the parts [1, D] and [1, r], and its bias."""

    before: Weight
    after: Weight
    sure_hidden: Weight
    sure_before: Weight
    bias: float

    @classmethod
    def bind(cls, binder: Binder, rank: int, vocab: int, rows: int, kept: np.ndarray | None, width: int) -> Self:
        """rows: that W2 is stored with; kept: which of them are used, None is all."""
        before = binder.table("markov_w1.weight", vocab, rank)
        after = binder.matrix("markov_w2.weight", rows, rank, kept)
        sure_hidden, sure_before = binder.split("conf.weight", width, rank)
        return cls(before, after, sure_hidden, sure_before, float(binder.values("conf.bias", 1)[0]))


class MarkovHead:
    """Draws a block's tokens one after another. See `Head`."""

    resumes = True

    def __init__(self, markov: Markov, steps: BlockSteps) -> None:
        self._markov, self._ops, self._ids = markov, steps.ops, steps.trunk.draft_ids
        ops, rank, said = self._ops, markov.before.cols, markov.after.rows
        self._embedded = ops.empty((steps.sampled, rank), "float32")
        self._before = ops.empty((steps.sampled, rank), markov.after.operand)
        self._added = ops.empty((steps.padded_places, said), "float32")
        self._sure = [ops.empty((steps.sampled, 1), "float32") for _ in range(2)]
        self._draws = ops.asarray(-1 - np.arange(steps.padded_places, dtype=np.int32))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self._embedded, self._before, self._added, *self._sure, self._draws))

    def draw(self, on: Drawing, draw: Draw) -> None:
        ops, markov = self._ops, self._markov
        last = 0
        for start, count in zip(on.stairs.starts, on.stairs.counts, strict=True):
            rows = slice(start, start + count)
            embedded, before, added = self._embedded[rows], self._before[rows], self._added[:count]
            if start:
                ops.embed(markov.before, self._draws[:count], embedded, 1.0, on.tokens[last : last + count])
            else:
                ops.embed(markov.before, on.anchors[:count], embedded)
            ops.tap(embedded, None, None, 0.0, before, 0, None)
            ops.linear(before, (markov.after,), added)
            ops.add_rms_norm(on.logits[rows], added, None, None, 0.0, added)
            if self._ids is not None:
                ops.scatter_columns(on.logits[rows], self._ids, on.full[rows])
            ops.sample(on.full[rows], cut(on.rows, start, count), on.tokens[rows], draw)
            last = start
        count = on.stairs.sampled
        ops.linear(on.hidden, (markov.sure_hidden,), self._sure[0][:count])
        ops.linear(self._before[:count], (markov.sure_before,), self._sure[1][:count])

    def confidence(self, on: Drawing) -> tuple[Array, ...]:
        return self._sure[0][: on.stairs.sampled], self._sure[1][: on.stairs.sampled]

    def drafts(self, fetched: Sequence[np.ndarray], stairs: Stairs, blocks: Sequence[Block]) -> list[Draft]:
        tokens, hidden, before = fetched
        score = hidden[:, 0].astype(np.float64) + before[:, 0] + self._markov.bias
        return drafts_of(tokens, 1 / (1 + np.exp(-np.clip(score, -60.0, 60.0))), stairs, blocks)
