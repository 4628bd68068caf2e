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
from power_lab.training.losses import Truth
from power_lab.training.modules import Asked, Shared
from power_lab.training.target import Target

_CHUNK = 4096
"""Positions whose logits over the whole vocabulary exist at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """A batch on the device.

    Attributes:
        texts: on the host; tokens, lengths: its arrays on the device.
        hidden: layer -> states [B, T, D].
        probabilities: [B, T, N], of the draft vocabulary after each position; empty where nobody asked.
        index: int64 [V], place of each token in the draft vocabulary, -1 outside.
    """

    texts: Texts
    tokens: Tensor
    lengths: Tensor
    hidden: dict[int, Tensor]
    probabilities: Tensor
    index: Tensor

    @classmethod
    def of(
        cls, target: Target, whole: Shared, drafts: Shared, texts: Texts, taps: Iterable[int], *, truth: bool
    ) -> Self:
        """Run the target. whole, drafts: what is borrowed, with all tokens and with those that are drafted."""
        tokens, lengths = (
            torch.from_numpy(part).to(target.device, non_blocking=True) for part in (texts.tokens, texts.lengths)
        )
        last = len(target.spec.layers)
        hidden = target.hidden(tokens, {*taps, last})
        said = _probabilities(target, whole, drafts, hidden[last]) if truth else torch.empty(0)
        index = torch.full((whole.vocab,), -1, device=target.device)
        index[drafts.ids] = torch.arange(len(drafts.ids), device=target.device)
        return cls(texts, tokens, lengths, hidden, said, index)

    def asked(self, taps: Iterable[int], anchors: Tensor, width: int) -> Asked:
        return Asked(torch.cat([self.hidden[layer] for layer in taps], -1), self.tokens, anchors, width)

    def anchors(self, count: int, rng: np.random.Generator) -> Tensor:
        """int64 [B, count], anywhere in the answers but at their last tokens."""
        first, room = self.texts.prompts[:, None], (self.texts.lengths - 1 - self.texts.prompts)[:, None]
        drawn = first + (rng.random((len(first), count)) * room).astype(np.int64)
        return torch.from_numpy(drawn).to(self.tokens.device, non_blocking=True)

    def truth(self, asked: Asked) -> Truth:
        """What the target says where drafts are asked for."""
        batch, positions = self.tokens.shape
        at = asked.anchors[..., None] + torch.arange(asked.width, device=asked.anchors.device)
        flat = (at.clamp(max=positions - 1) + torch.arange(batch, device=at.device)[:, None, None] * positions).reshape(
            -1
        )
        said = self.probabilities.flatten(0, 1)[flat].unflatten(0, at.shape)
        return Truth(said, self.index[asked.known(1, asked.width)], at + 1 < self.lengths[:, None, None])


@torch.no_grad()
def _probabilities(target: Target, whole: Shared, drafts: Shared, last: Tensor) -> Tensor:
    normed = target.normed(last).flatten(0, 1)
    parts = []
    for part in normed.split(_CHUNK):
        norm = torch.logsumexp(whole.project(part).float(), -1, keepdim=True)
        logits = drafts.capped(functional.linear(part, drafts.head)).float()
        parts.append((logits - norm).exp().to(target.dtype))
    return torch.cat(parts).unflatten(0, last.shape[:2])
