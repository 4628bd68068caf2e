"""DFlash2: a DFlash trunk whose sublayers are filtered along the block, and a walk over each row's best candidates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from power_lab.training.modules.config import DrafterConfig
from power_lab.training.modules.dflash import DFlash
from power_lab.training.modules.layers import Layer, Sight
from power_lab.training.modules.protocol import Asked, Draft, Draw, Proposal, greedy
from power_lab.training.modules.shared import Shared, rows


class DynamicConv(nn.Module):
    """Two depthwise filters along a block, one before and one after a sublayer, with coefficients that each row's own input decides.

    out[r][c] = sum over taps t of (base[side][t][c] + coef[r][side][t][c // group]) * x[r - t][c]; rows before the block are zero.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        self.base = nn.Parameter(torch.zeros(2, taps, width))
        self.proj = nn.Linear(width, 2 * taps * (width // group), bias=False)
        with torch.no_grad():
            self.base[:, 0] = 1  # nothing is filtered at first

    def coefficients(self, x: Tensor) -> Tensor:
        """[..., S, 2, taps, D] of normed inputs [..., S, D]."""
        coef = self.proj(x).unflatten(-1, (2, self.taps, -1))
        return self.base + coef.repeat_interleave(self.group, -1)

    def forward(self, x: Tensor, coef: Tensor) -> Tensor:
        """x [..., S, D] filtered by one side's coefficients [..., S, taps, D]."""
        out = coef[..., 0, :] * x
        for t in range(1, self.taps):
            earlier = torch.cat([torch.zeros_like(x[..., :t, :]), x[..., :-t, :]], -2)[..., : x.shape[-2], :]
            out = out + coef[..., t, :] * earlier
        return out.to(x.dtype)


class FilteredLayer(Layer):
    """A layer with a filter around each part. The context's keys and values are not filtered."""

    def __init__(self, width: int, config: DrafterConfig, eps: float) -> None:
        super().__init__(width, config, eps)
        self.attn_conv = DynamicConv(width, config.conv_taps, config.conv_group)
        self.ffn_conv = DynamicConv(width, config.conv_taps, config.conv_group)

    def attend(self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], sight: Sight) -> Tensor:
        before, after = self.attn_conv.coefficients(x).unbind(-3)
        return self.attn_conv(super().attend(self.attn_conv(x, before), positions, context, sight), after)

    def feed(self, x: Tensor) -> Tensor:
        before, after = self.ffn_conv.coefficients(x).unbind(-3)
        return self.ffn_conv(super().feed(self.ffn_conv(x, before)), after)


class DFlash2(DFlash):
    """score[c] = unary[c] + sum over r of A[token before][r] * (S . h)[r] * B[c][r], over the best K of each row."""

    def __init__(self, config: DrafterConfig, width: int, eps: float, vocab: int, drafts: int) -> None:
        super().__init__(config, width, eps, vocab, drafts)
        rank = config.selector_rank
        self.selector_predecessor, self.selector_successor = nn.Embedding(vocab, rank), nn.Embedding(vocab, rank)
        self.selector_hidden = nn.Linear(width, rank, bias=False)
        nn.init.zeros_(self.selector_predecessor.weight)  # a token that is never seen says nothing about the next
        nn.init.normal_(self.selector_successor.weight, std=rank**-0.5)

    def make_layer(self, width: int, eps: float) -> Layer:
        return FilteredLayer(width, self.config, eps)

    def forward(self, target: Shared, asked: Asked) -> Proposal:
        h = self.hidden(target, asked)
        unary = target.project(h)
        _, candidates = unary.detach().topk(min(self.config.selector_top_k, unary.shape[-1]), -1)
        pairs = self.pairs(h, asked, target.ids[candidates])
        return Proposal(unary, unary, candidates, unary.gather(-1, candidates) + pairs)

    def pairs(self, h: Tensor, asked: Asked, ids: Tensor) -> Tensor:
        """[B, A, width, K]: what the text's own token before each draft adds to the scores of candidates `ids`."""
        before = rows(self.selector_predecessor, asked.known(0, asked.width)) * self.selector_hidden(h)
        return torch.einsum("...r,...kr->...k", before, rows(self.selector_successor, ids).to(before.dtype))

    def draft(self, target: Shared, features: Tensor, anchor: int, width: int, draw: Draw = greedy) -> Draft:
        """As DFlash's, by a walk from the anchor; logits are the scores of each step's candidates."""
        block = self._block(target, features, anchor, width)
        tokens, rows, sure = [anchor], [], []
        for i, (h, unary) in enumerate(zip(block, target.project(block), strict=True)):
            best, candidates = unary.topk(min(self.config.selector_top_k, len(unary)))
            ids = target.ids[candidates]
            before = self.selector_predecessor.weight[tokens[-1]] * self.selector_hidden(h)
            scores = best + self.selector_successor.weight[ids] @ before
            row = torch.full((target.vocab,), -torch.inf, device=scores.device)
            row[ids] = scores
            rows.append(row)
            tokens.append(draw(row, len(features) + 1 + i))
            sure.append(float(torch.softmax(row, -1)[tokens[-1]]))
        return Draft(tokens[1:], torch.stack(rows), sure)
