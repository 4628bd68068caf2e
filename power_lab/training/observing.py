"""What the target sees and says of a batch of texts, made once for all drafters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from power_lab.training.corpus import Texts
from power_lab.training.losses import Truth, weights
from power_lab.training.modules import Asked, Shared
from power_lab.training.rows import Rows, probabilities
from power_lab.training.target import Target

_CHUNK = 4096
"""Positions whose logits over the whole vocabulary exist at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """A batch on the device.

    Attributes:
        tokens: int64 [B, T]; lengths: int64 [B].
        hidden: layer -> states [B, T, D].
        probabilities: [B * T, N], of the draft vocabulary after each position; empty where nobody asked.
        index: int64 [V], place of each token in the draft vocabulary, -1 outside.
    """

    tokens: Tensor
    lengths: Tensor
    hidden: dict[int, Tensor]
    probabilities: Tensor
    index: Tensor

    @classmethod
    def of(
        cls,
        target: Target,
        whole: Shared,
        drafts: Shared,
        tokens: Tensor,
        lengths: Tensor,
        taps: Iterable[int],
        *,
        truth: bool,
    ) -> Self:
        """Run the target on texts. whole, drafts: what is borrowed, with all tokens and with those that are drafted."""
        last = len(target.spec.layers)
        hidden = target.hidden(tokens, {*taps, last})
        said = _probabilities(target, whole, drafts, hidden[last]) if truth else torch.empty(0)
        index = torch.full((whole.vocab,), -1, device=target.device)
        index[drafts.ids] = torch.arange(len(drafts.ids), device=target.device)
        return cls(tokens, lengths, hidden, said, index)

    def asked(self, taps: Iterable[int], anchors: Tensor, width: int) -> Asked:
        return Asked(torch.cat([self.hidden[layer] for layer in taps], -1), self.tokens, anchors, width)

    def truth(self, asked: Asked, decay: float, hard: float) -> Truth:
        """What the target says where drafts are asked for. decay: see `losses.weights`; hard: see `Truth`."""
        batch, positions = self.tokens.shape
        at = asked.anchors[..., None] + torch.arange(asked.width, device=asked.anchors.device)
        flat = (at.clamp(max=positions - 1) + torch.arange(batch, device=at.device)[:, None, None] * positions).reshape(
            -1
        )
        said = self.index[asked.known(1, asked.width)].flatten()
        weight = weights(at + 1 < self.lengths[:, None, None], decay)
        return Truth(Rows(self.probabilities, flat, said, weight), hard)


def anchors(texts: Texts, count: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [B, count], anywhere in the answers but at their last tokens."""
    first, room = texts.prompts[:, None], (texts.lengths - 1 - texts.prompts)[:, None]
    return first + (rng.random((len(first), count)) * room).astype(np.int64)


@torch.no_grad()
def _probabilities(target: Target, whole: Shared, drafts: Shared, last: Tensor) -> Tensor:
    normed = target.normed(last).flatten(0, 1)
    parts = [
        probabilities(functional.linear(part, whole.head), drafts.ids, whole.softcap) for part in normed.split(_CHUNK)
    ]
    return torch.cat(parts)
