"""DSpark: a DFlash trunk, a low-rank transition from the token before, and a head that says how sure it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from power_lab.training.modules.config import DrafterConfig
from power_lab.training.modules.dflash import DFlash
from power_lab.training.modules.protocol import Asked, Draft, Draw, Proposal, greedy
from power_lab.training.modules.shared import Shared, rows


class Confidence(nn.Module):
    """weight [D + r] . input + bias [1]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight[None], self.bias)[..., 0]


class DSpark(DFlash):
    """logits_i = head . h_i + W2 . W1[token before]. Without the two heads it is the trunk's DFlash."""

    def __init__(self, config: DrafterConfig, width: int, eps: float, vocab: int, drafts: int) -> None:
        super().__init__(config, width, eps, vocab, drafts)
        self.markov_w1 = nn.Embedding(vocab, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, drafts, bias=False)
        self.conf = Confidence(width + config.markov_rank)
        nn.init.zeros_(self.markov_w1.weight)  # a token that is never seen says nothing about the next

    def forward(self, target: Shared, asked: Asked) -> Proposal:
        h = self.hidden(target, asked)
        base = target.project(h)
        before = self.before(asked)
        return Proposal(base, base + self.markov_w2(before), confidence=self.sure(h, before))

    def before(self, asked: Asked) -> Tensor:
        """[B, A, width, r] of the text's own token before each draft."""
        return rows(self.markov_w1, asked.known(0, asked.width))

    def sure(self, h: Tensor, before: Tensor) -> Tensor:
        """Logits of being accepted. What is accepted is the trunk's doing; being sure of it does not change it."""
        return self.conf(torch.cat([h.detach(), before.detach().to(h.dtype)], -1))

    def draft(self, target: Shared, features: Tensor, anchor: int, width: int, draw: Draw = greedy) -> Draft:
        """As DFlash's, drawn one after another."""
        block = self._block(target, features, anchor, width)
        base, tokens, rows, sure = target.project(block), [anchor], [], []
        for i, h in enumerate(block):
            before = self.markov_w1.weight[tokens[-1]]
            rows.append(target.scatter(base[i] + self.markov_w2(before)))
            sure.append(float(torch.sigmoid(self.conf(torch.cat([h, before])))))
            tokens.append(draw(rows[-1], len(features) + 1 + i))
        return Draft(tokens[1:], torch.stack(rows), sure)
