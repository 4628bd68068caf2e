"""How many drafts the target would accept, on texts that it has said: sample and match, as the engine does, with the same noise.

Drafts are accepted up to the first that is not the text's own token, and those before it are: so a proposal about the text's own tokens
tells the accepted length of a round that begins at any anchor, and rounds can be walked through afterwards at every width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from power_lab.training.corpus import Texts
from power_lab.training.modules.protocol import Proposal
from power_lab.training.modules.shared import Shared
from power_lab.training.noise import gumbel

WIDTHS = (3, 7, 15)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Speculative rounds over texts. Attributes: rounds, drafted, accepted."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Rounds) -> Rounds:
        return Rounds(self.rounds + other.rounds, self.drafted + other.drafted, self.accepted + other.accepted)

    @property
    def mean(self) -> float:
        """Mean accepted length."""
        return self.accepted / max(self.rounds, 1)


def noise(texts: Texts, target: Shared) -> Tensor:
    """f32 [B, T, N]: the noise that decided each position's token, zero where a text is greedy."""
    device = target.ids.device
    seeds, warm = torch.from_numpy(texts.seeds).to(device), torch.from_numpy(texts.temperatures).to(device)
    positions = torch.arange(texts.tokens.shape[1], device=device)
    drawn = gumbel(seeds[:, None], positions[None], target.ids)
    return torch.where(warm[:, None, None] > 0, drawn * warm[:, None, None], 0.0)


def drafted(proposal: Proposal, target: Shared, anchors: Tensor, table: Tensor, *, base: bool = False) -> Tensor:
    """int64 [B, A, W]: the tokens that would be drafted. Gumbel-max: argmax of logits + temperature * noise.

    table: of `noise`. base: from the trunk's logits alone.
    """
    logits = (proposal.base if base else proposal.logits).float()
    width, positions = logits.shape[2], table.shape[1]
    at = (anchors[..., None] + 1 + torch.arange(width, device=anchors.device)).clamp(max=positions - 1)
    rows = torch.arange(len(table), device=anchors.device)[:, None, None]
    perturbation = table[rows, at]
    if proposal.candidates is None or proposal.scores is None or base:
        return target.ids[(logits + perturbation).argmax(-1)]
    scores = proposal.scores.float() + perturbation.gather(-1, proposal.candidates)
    return target.ids[proposal.candidates.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]]


def accepted(drafts: Tensor, known: Tensor, anchors: Tensor, lengths: Tensor) -> Tensor:
    """int64 [B, A]: leading drafts [B, A, W] that are the texts' own tokens `known` [B, A, W]."""
    inside = anchors[..., None] + 1 + torch.arange(drafts.shape[-1], device=drafts.device) < lengths[:, None, None]
    return ((drafts == known) & inside).long().cumprod(-1).sum(-1)


def walk(lengths: np.ndarray, prompts: np.ndarray, ends: np.ndarray, width: int) -> Rounds:
    """Rounds of a fixed width from each prompt's end to its text's.

    Args:
        lengths: int64 [B, T], accepted length at full width of a round whose anchor is each position.
        prompts, ends: int64 [B].
    """
    at, rows = prompts.copy(), np.arange(len(prompts))
    total = Rounds()
    while (running := at < ends - 1).any():
        r, p = rows[running], at[running]
        most = np.minimum(width, ends[running] - 1 - p)
        took = np.minimum(lengths[r, p], most)
        total += Rounds(len(r), int(most.sum()), int(took.sum()))
        at[running] = p + took + 1
    return total
