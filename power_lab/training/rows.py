"""Rows of logits: the target's as probabilities, a drafter's against those, with every number read twice and written once.

The same in torch (any device) and as Triton kernels (GPU): the logits' device decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What a chunk of rows is compared with.

    Attributes:
        table: [P, N], probabilities of the draft vocabulary at positions of texts; they sum to less than 1 by what lies outside.
        index: int64 [R], each row's place in the table; tokens: int64 [R], what was said, as an index into the
            draft vocabulary, -1 outside.
        weight: f32 [R], of each row in the sum of all, 0 for rows past a text's end.
    """

    table: Tensor
    index: Tensor
    tokens: Tensor
    weight: Tensor

    def split(self, size: int) -> list[Rows]:
        parts = zip(self.index.split(size), self.tokens.split(size), self.weight.split(size), strict=True)
        return [Rows(self.table, *part) for part in parts]


def imitate(logits: Tensor, rows: Rows, hard: float, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Cross-entropies, (1 - hard) of them to the target's distribution and `hard` to the token said.

    Args:
        logits: [R, N] before the softcap (0: none); overwritten by the weighted losses' gradient.

    Returns:
        weighted losses f32 [R]; agreement f32 [R], 1 - total variation of both distributions.
    """
    if logits.is_cuda:
        from power_lab.training import kernels  # Triton is not everywhere

        return kernels.imitate(logits, rows.table, rows.index, rows.tokens, rows.weight, hard, softcap)
    z = logits.float()
    capped = softcap * torch.tanh(z / softcap) if softcap else z
    p = rows.table[rows.index].float()
    logs = torch.log_softmax(capped, -1)
    q = logs.exp()
    inside = (rows.tokens >= 0).float()
    at = rows.tokens.clamp(min=0)[:, None]
    mass = p.sum(-1)
    loss = -(1 - hard) * (p * logs).sum(-1) - hard * inside * logs.gather(-1, at)[:, 0]
    agreed = torch.minimum(q, p).sum(-1).clamp(0, 1)
    gradient = q * ((1 - hard) * mass + hard * inside)[:, None] - (1 - hard) * p
    gradient.scatter_add_(-1, at, (-hard * inside)[:, None])
    if softcap:
        gradient *= 1 - (capped / softcap).square()
    logits.copy_(gradient * rows.weight[:, None])
    return loss * rows.weight, agreed


def probabilities(logits: Tensor, ids: Tensor, softcap: float = 0.0) -> Tensor:
    """[R, N] of the tokens `ids` int64 [N], of the target's logits [R, V] over its whole vocabulary before the softcap; of their dtype."""
    if logits.is_cuda:
        from power_lab.training import kernels

        return kernels.probabilities(logits, ids, softcap)
    z = logits.float()
    z = softcap * torch.tanh(z / softcap) if softcap else z
    return torch.softmax(z, -1)[:, ids].to(logits.dtype)
