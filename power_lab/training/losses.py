"""What a drafter is trained on: the target's distribution and the token it said, the next ones of a block more than the far ones.

Logits over the draft vocabulary are by far the largest thing in a training step. They exist for some rows at a time, and are turned into
their own gradient where they lie; the backward pass has nothing left to do but to scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from power_lab.training.modules import MTP, Asked, DFlash, DFlash2, DSpark, Shared
from power_lab.training.rows import Rows, imitate

_CHUNK = 4096
"""Rows whose logits exist at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """What the target says at each of R = B * A * W rows of drafts.

    Attributes:
        rows: probabilities, tokens and weights, which sum to 1.
        hard: share of the cross-entropy to the token said, against that to the target's distribution.
    """

    rows: Rows
    hard: float

    def imitation(self, target: Shared, hidden: Tensor, best: int = 0) -> tuple[Tensor, Tensor]:
        """The loss of drafts made by the head from normed states [..., D], and int64 [R, best], each row's best."""
        loss, _, candidates = _Imitation.apply(hidden.flatten(0, -2), None, None, target, self, best)
        return loss, candidates

    def transition(self, target: Shared, hidden: Tensor, before: Tensor, successors: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of drafts by the head alone, and with successors [N, r] . before [..., r] added; agreement [R] of the latter."""
        loss, agreed, _ = _Imitation.apply(hidden.flatten(0, -2), before.flatten(0, -2), successors, target, self, 0)
        return loss, agreed

    def choice(self, candidates: Tensor, scores: Tensor) -> Tensor:
        """The loss among each row's candidates [R, K], indices into the draft vocabulary, by their scores [R, K]."""
        rows, choice = self.rows, torch.log_softmax(scores.float(), -1)
        p = rows.table[rows.index[:, None], candidates].float()
        soft = -(p * choice).sum(-1)
        said = -((candidates == rows.tokens[:, None]) * choice).sum(-1)
        return (((1 - self.hard) * soft + self.hard * said) * rows.weight).sum()

    def certainty(self, confidence: Tensor, agreed: Tensor) -> Tensor:
        """The loss of being sure [...]: against how often both can draw the same token [R]."""
        off = functional.binary_cross_entropy_with_logits(confidence.float().flatten(), agreed, reduction="none")
        return (off * self.rows.weight).sum()


def weights(valid: Tensor, decay: float) -> Tensor:
    """f32 [R] that sum to 1, of rows bool [B, A, W]: row k of a block weighs exp(-k / decay), those past the end nothing."""
    weight = valid * torch.exp(-torch.arange(valid.shape[-1], device=valid.device) / decay)
    return (weight / weight.sum().clamp(min=1e-9)).flatten()


def loss(drafter: DFlash | MTP, target: Shared, asked: Asked, truth: Truth) -> Tensor:
    """A scalar: the mean over rows, as they weigh, of what this kind of drafter learns from."""
    if isinstance(drafter, MTP):
        return truth.imitation(target, drafter.norm(drafter.steps(target, asked)))[0]
    h = drafter.hidden(target, asked)
    if isinstance(drafter, DSpark):
        before = drafter.before(asked)
        total, agreed = truth.transition(target, h, before, drafter.markov_w2.weight)
        return total + truth.certainty(drafter.sure(h, before), agreed)
    if isinstance(drafter, DFlash2):
        total, candidates = truth.imitation(target, h, min(drafter.config.selector_top_k, len(target.ids)))
        unary = torch.einsum("rd,rkd->rk", h.flatten(0, -2).to(target.head.dtype), target.head[candidates])
        pairs = drafter.pairs(h, asked, target.ids[candidates].view(*h.shape[:-1], -1))
        return total + truth.choice(candidates, target.capped(unary) + pairs.flatten(0, -2))
    return truth.imitation(target, h)[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Link:
    """A transition matrix, successors [N, r] . before [R, r], and its gradients."""

    before: Tensor
    successors: Tensor
    grad_before: Tensor
    grad_successors: Tensor

    @classmethod
    def of(cls, before: Tensor, successors: Tensor, dtype: torch.dtype) -> Self:
        m, w = before.to(dtype), successors.to(dtype)
        return cls(m, w, torch.empty_like(m), torch.zeros_like(w, dtype=torch.float32))

    def moved(self, logits: Tensor, rows: slice) -> Tensor:
        return torch.addmm(logits, self.before[rows], self.successors.T)

    def learn(self, gradient: Tensor, rows: slice) -> None:
        self.grad_before[rows] = gradient @ self.successors
        self.grad_successors.add_(gradient.T @ self.before[rows])


class _Imitation(torch.autograd.Function):
    """(sum of losses, agreement [R], candidates [R, best]) of normed states [R, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        before: Tensor | None,
        successors: Tensor | None,
        target: Shared,
        truth: Truth,
        best: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = target.head
        h = hidden.to(head.dtype)
        grad_hidden = torch.empty_like(h)
        link = None if before is None or successors is None else _Link.of(before, successors, head.dtype)
        losses, agreements, candidates = [], [], []
        at = 0
        for rows in truth.rows.split(_CHUNK):
            here = slice(at, at + len(rows.index))
            at = here.stop
            logits = h[here] @ head.T
            if best:
                candidates.append(logits.topk(best, -1).indices)
            own = target.capped(logits) if link else logits
            moved = link.moved(own, here) if link else None
            slope = 1 - (own / target.softcap).square() if link and target.softcap else None
            loss, agreed = imitate(logits, rows, truth.hard, target.softcap)
            losses.append(loss)
            if link and moved is not None:
                loss, agreed = imitate(moved, rows, truth.hard)
                losses.append(loss)
                link.learn(moved, here)
                logits += moved if slope is None else moved * slope
            agreements.append(agreed)
            torch.mm(logits, head, out=grad_hidden[here])
        ctx.save_for_backward(grad_hidden, *((link.grad_before, link.grad_successors) if link else ()))
        ctx.dtypes = hidden.dtype, None if before is None else before.dtype
        found = torch.cat(candidates) if candidates else torch.empty(0, dtype=torch.int64, device=h.device)
        agreed = torch.cat(agreements)
        ctx.mark_non_differentiable(agreed, found)
        return torch.cat(losses).sum(), agreed, found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_hidden, *rest = ctx.saved_tensors
        own, other = ctx.dtypes
        if not rest:
            return grad_hidden.to(own) * scale, None, None, None, None, None
        grad_before, grad_w2 = rest
        return grad_hidden.to(own) * scale, grad_before.to(other) * scale, grad_w2 * scale, None, None, None
