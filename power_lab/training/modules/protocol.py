"""What every drafter module is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Draw = Callable[[Tensor, int], int]
"""(logits f32 [V], position of the token) -> the token."""


def greedy(logits: Tensor, position: int) -> int:
    """The likeliest token, the lowest id on a tie."""
    return int((logits == logits.max()).nonzero()[0])


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """One request's drafts.

    Attributes:
        tokens: drafted ids; logits: f32 [drafts, V] that they were drawn from, -inf where nothing could be drawn.
        confidence: how likely each is accepted, given that all before it are.
    """

    tokens: list[int]
    logits: Tensor
    confidence: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Drafts wanted for many anchors at once, over texts that are known to their end.

    Attributes:
        features: [B, T, taps * D], the target's hidden states at each position.
        tokens: int64 [B, T]; behind a text's end anything that is a token.
        anchors: int64 [B, A], positions of last committed tokens, each at least 1.
        width: drafts for each anchor.
    """

    features: Tensor
    tokens: Tensor
    anchors: Tensor
    width: int

    def known(self, first: int, count: int) -> Tensor:
        """int64 [B, A, count]: the texts' own tokens at anchor + first and the positions behind it; the last one past the end."""
        batch, positions = self.tokens.shape
        rows = torch.arange(first, first + count, device=self.anchors.device)
        at = (self.anchors[..., None] + rows).clamp(max=positions - 1)
        return self.tokens.gather(1, at.reshape(batch, -1)).reshape(at.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """The answer: row k of an anchor at p is about position p + 1 + k, given that all tokens before are the text's own.

    A draft counts only where all drafts before it were right, so what a drafter says about the text's own tokens is what it would have
    drafted, up to its first error.

    Attributes:
        base: [B, A, W, N] logits over the draft vocabulary from the trunk alone.
        logits: likewise, what drafts are drawn from; `base` itself where nothing is added.
        candidates: int64 [B, A, W, K] indices into the draft vocabulary that `scores` [B, A, W, K] are of and drafts are drawn from,
            or None: from all of `logits`.
        confidence: [B, A, W] logits of being accepted, or None.
    """

    base: Tensor
    logits: Tensor
    candidates: Tensor | None = None
    scores: Tensor | None = None
    confidence: Tensor | None = None
