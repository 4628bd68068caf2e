"""DFlash (arXiv:2602.06036): a block of masks is filled in one pass, over keys and values made of the target's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from power_lab.training.modules.config import DrafterConfig
from power_lab.training.modules.layers import Layer, RMSNorm, Sight
from power_lab.training.modules.protocol import Asked, Draft, Draw, Proposal, greedy
from power_lab.training.modules.shared import Shared


class DFlash(nn.Module):
    """The trunk, and the drafter that is nothing else.

    Args:
        config: sizes; width, eps: the target's hidden width and norm epsilon; vocab: tokens of the target; drafts: of the draft vocabulary.
    """

    def __init__(self, config: DrafterConfig, width: int, eps: float, vocab: int, drafts: int) -> None:
        super().__init__()
        self.config, self.vocab, self.drafts = config, vocab, drafts
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps)
        self.layers = nn.ModuleList(self.make_layer(width, eps) for _ in range(config.layers))
        self.norm = RMSNorm(width, eps)

    def make_layer(self, width: int, eps: float) -> Layer:
        return Layer(width, self.config, eps)

    def rows(self, width: int) -> int:
        """Block rows behind `width` drafts: in a causal block none needs what comes after it."""
        return width + self.config.first if self.config.causal else self.config.block_size

    def hidden(self, target: Shared, asked: Asked) -> Tensor:
        """Normed hidden states [B, A, width, D] of the block rows that drafts are made from."""
        ctx = self.hidden_norm(self.fc(asked.features))
        batch, length = asked.tokens.shape
        every = torch.arange(length, device=ctx.device).expand(batch, length)
        rows = self.rows(asked.width)
        ids = asked.known(0, rows)
        ids[..., 1:] = self.config.mask_token
        positions = asked.anchors[..., None] + torch.arange(rows, device=ctx.device)
        sight = Sight.of(positions, asked.anchors, length, causal=self.config.causal, window=self.config.window)
        x = target.embed(ids)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = layer(x, positions, layer.keys_values(ctx, every), sight)
        first = self.config.first
        return self.norm(x[..., first : first + asked.width, :])

    def forward(self, target: Shared, asked: Asked) -> Proposal:
        """Drafts for many anchors at once."""
        logits = target.project(self.hidden(target, asked))
        return Proposal(logits, logits)

    def draft(self, target: Shared, features: Tensor, anchor: int, width: int, draw: Draw = greedy) -> Draft:
        """One request's drafts.

        Args:
            features: [p, taps * D] of all positions before the anchor's.
            anchor: the last committed token, at position p; width: 1 .. `config.drafts`.
        """
        logits = target.scatter(target.project(self._block(target, features, anchor, width)))
        tokens = [draw(row, len(features) + 1 + i) for i, row in enumerate(logits)]
        return Draft(tokens, logits, _probabilities(logits, tokens))

    def _block(self, target: Shared, features: Tensor, anchor: int, width: int) -> Tensor:
        """[width, D]: `hidden` for one anchor."""
        position = len(features)
        padded = torch.cat(
            [features, features.new_zeros(1, features.shape[1])]
        )  # nothing is visible from the anchor on
        tokens = torch.zeros(1, position + 1, dtype=torch.int64, device=features.device)
        tokens[0, position] = anchor
        anchors = torch.full((1, 1), position, device=features.device)
        return self.hidden(target, Asked(padded[None], tokens, anchors, width))[0, 0]


def _probabilities(logits: Tensor, tokens: list[int]) -> list[float]:
    return torch.softmax(logits, -1)[range(len(tokens)), tokens].tolist()
