"""The losses of `power_lab.training.losses` written out over a whole proposal, gradients left to autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from power_lab.training.modules.protocol import Proposal


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """What the target says at each row of a proposal.

    Attributes:
        probabilities: [B, A, W, N] of the draft vocabulary; they sum to less than 1 by what lies outside of it.
        tokens: int64 [B, A, W], indices into the draft vocabulary, -1 outside; valid: bool [B, A, W], rows before the text's end.
    """

    probabilities: Tensor
    tokens: Tensor
    valid: Tensor


def loss(proposal: Proposal, truth: Truth, decay: float, hard: float) -> Tensor:
    """A scalar.

    Args:
        decay: row k of a block weighs exp(-k / decay).
        hard: share of the cross-entropy to the token said, against that to the target's distribution.
    """
    weight = truth.valid * torch.exp(-torch.arange(truth.valid.shape[-1], device=truth.valid.device) / decay)
    weight = weight / weight.sum().clamp(min=1e-9)
    total = _imitation(proposal.base, truth, hard)
    if proposal.logits is not proposal.base:
        total = total + _imitation(proposal.logits, truth, hard)
    if proposal.candidates is not None and proposal.scores is not None:
        total = total + _choice(proposal.candidates, proposal.scores, truth, hard)
    if proposal.confidence is not None:
        agreed = overlap(proposal.logits.detach(), truth.probabilities)
        total = total + functional.binary_cross_entropy_with_logits(
            proposal.confidence.float(), agreed, reduction="none"
        )
    return (total * weight).sum()


def overlap(logits: Tensor, probabilities: Tensor) -> Tensor:
    """1 - total variation [...] between softmax of `logits` [..., N] and the target: how often both can draw the same token."""
    return torch.minimum(torch.softmax(logits.float(), -1), probabilities.float()).sum(-1).clamp(0, 1)


def _imitation(logits: Tensor, truth: Truth, hard: float) -> Tensor:
    """[B, A, W]: cross-entropies. A constant, the target's entropy, away from the Kullback-Leibler divergence."""
    logits = logits.float()
    norm = torch.logsumexp(logits, -1)
    p = truth.probabilities
    soft = norm * p.sum(-1, dtype=torch.float32) - torch.linalg.vecdot(p.float(), logits)
    said = norm - logits.gather(-1, truth.tokens.clamp(min=0)[..., None])[..., 0]
    return (1 - hard) * soft + hard * torch.where(truth.tokens >= 0, said, 0.0)


def _choice(candidates: Tensor, scores: Tensor, truth: Truth, hard: float) -> Tensor:
    """[B, A, W]: the same among a row's candidates."""
    choice = torch.log_softmax(scores.float(), -1)
    soft = -(truth.probabilities.gather(-1, candidates).float() * choice).sum(-1)
    said = -((candidates == truth.tokens[..., None]) * choice).sum(-1)
    return (1 - hard) * soft + hard * said
