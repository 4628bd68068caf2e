"""What a drafter borrows from its target: the embedding, the head, or the part of it that drafts are drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Tensors of the target, not trained.

    Attributes:
        embedding: [V, D], the target's factor on embeddings applied; head: [N, D], rows of the target's head.
        ids: int64 [N], ascending: the token of each of these rows.
        eps: of all RMS norms; softcap: on the logits, 0 for none.
        final_norm: [D], the target's own: where a drafter's last norm begins.
    """

    embedding: Tensor
    head: Tensor
    ids: Tensor
    eps: float
    softcap: float
    final_norm: Tensor

    @property
    def vocab(self) -> int:
        return self.embedding.shape[0]

    @property
    def width(self) -> int:
        return self.embedding.shape[1]

    def only(self, ids: Tensor) -> Shared:
        """With the head's rows of these tokens; `self` must have all of them. ids: int64 [N], ascending."""
        return Shared(self.embedding, self.head[ids], ids, self.eps, self.softcap, self.final_norm)

    def embed(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.embedding)

    def project(self, normed: Tensor) -> Tensor:
        """[..., D] -> logits [..., N]."""
        return self.capped(functional.linear(normed, self.head.to(normed.dtype)))

    def capped(self, logits: Tensor) -> Tensor:
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def scatter(self, logits: Tensor) -> Tensor:
        """[..., N] -> f32 [..., V], -inf for all other tokens."""
        full = logits.new_full((*logits.shape[:-1], self.vocab), -torch.inf, dtype=torch.float32)
        full[..., self.ids] = logits.float()
        return full


def rows(table: nn.Embedding, ids: Tensor) -> Tensor:
    """`table(ids)`; the gradient is added row by row, which a CUDA graph can hold, where an embedding's is sorted first."""
    return table.weight.index_select(0, ids.flatten()).unflatten(0, ids.shape)
