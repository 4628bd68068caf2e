"""MTP / NextN: one layer over the token's embedding and the hidden state before it, run as a chain (DeepSeek-V3, arXiv:2412.19437)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from power_lab.training.modules.config import DrafterConfig
from power_lab.training.modules.layers import Layer, RMSNorm, Sight, attention
from power_lab.training.modules.protocol import Asked, Draft, Draw, Proposal, greedy
from power_lab.training.modules.shared import Shared


class MTP(nn.Module):
    """Row p reads token p and g at p - 1, and predicts the token at p + 1. g is the target's hidden state after its last layer, and in a
    chain, where the target has not been, the row's own output.

    Args:
        as for DFlash; config.taps names the target's last state alone.
    """

    def __init__(self, config: DrafterConfig, width: int, eps: float, vocab: int, drafts: int) -> None:
        super().__init__()
        if config.layers != 1 or len(config.taps) != 1:
            raise ValueError("an MTP chain has one layer and one tap")
        self.config, self.vocab, self.drafts = config, vocab, drafts
        self.enorm, self.hnorm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.embed_proj, self.hidden_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.layers = nn.ModuleList([Layer(width, config, eps)])
        self.norm = RMSNorm(width, eps)

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def entering(self, target: Shared, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What enters the layer: tokens [...], g of the positions before them [..., D]."""
        return self.embed_proj(self.enorm(target.embed(tokens))) + self.hidden_proj(self.hnorm(hidden))

    def observed(self, target: Shared, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, KV, d] of texts [B, T] whose states [B, T, D] the target has computed."""
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], 1)
        every = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        return self.layer.keys_values(self.layer.attn_norm(self.entering(target, tokens, before)), every)

    def steps(self, target: Shared, asked: Asked) -> Tensor:
        """Outputs [B, A, width, D] of a chain over the text's own tokens from each anchor."""
        context = self.observed(target, asked.tokens, asked.features)
        length = asked.tokens.shape[1]
        keys = torch.arange(length, device=asked.tokens.device)
        before = asked.anchors[..., None, None]
        index = (asked.anchors - 1)[..., None].expand(-1, -1, asked.features.shape[-1])
        g = asked.features.gather(1, index)
        context_seen = keys < before
        embedded = self.embed_proj(self.enorm(target.embed(asked.known(0, asked.width))))
        own: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for step in range(asked.width):
            positions = (asked.anchors + step)[..., None]
            x = (embedded[..., step, :] + self.hidden_proj(self.hnorm(g)))[:, :, None]
            h = self.layer.attn_norm(x)
            queries, last = self.layer.queries_keys_values(h, positions)
            own.append(last)
            block = torch.cat([k for k, _ in own], 2), torch.cat([v for _, v in own], 2)
            seen = torch.ones(1, step + 1, dtype=torch.bool, device=keys.device)
            attended = attention(queries, context, block, Sight(context_seen, seen))
            x = x + self.layer.o(attended)
            x = x + self.layer.feed(self.layer.ffn_norm(x))
            g = x[:, :, 0]
            outputs.append(g)
        return torch.stack(outputs, 2)

    def forward(self, target: Shared, asked: Asked) -> Proposal:
        """Drafts for many anchors at once."""
        logits = target.project(self.norm(self.steps(target, asked)))
        return Proposal(logits, logits)

    def draft(
        self, target: Shared, tokens: list[int], features: Tensor, anchor: int, width: int, draw: Draw = greedy
    ) -> Draft:
        """One request's drafts.

        Args:
            tokens: the p tokens before the anchor, at least one; features: [p, D] their g.
            anchor: the last committed token, at position p; width: chain steps.
        """
        known, rows = [*tokens, anchor], []
        for step in range(width):
            row = torch.tensor([known], device=features.device)
            padded = torch.cat([features, features.new_zeros(step + 1, features.shape[1])])
            anchors = torch.full((1, 1), len(features), device=features.device)
            last = self.steps(target, Asked(padded[None], row, anchors, step + 1))[0, 0, -1]
            rows.append(target.scatter(target.project(self.norm(last))))
            known.append(draw(rows[-1], len(known)))
        logits, drafted = torch.stack(rows), known[len(tokens) + 1 :]
        sure = torch.softmax(logits, -1)[range(width), drafted].tolist()
        return Draft(drafted, logits, sure)
