"""Drafters as modules: one request's drafts and the batched form are the same mathematics; small formulas by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from power_lab.kernels import reference
from power_lab.training.modules import MTP, Asked, DFlash, DFlash2, DrafterConfig, DSpark, Shared
from power_lab.training.modules.dflash2 import DynamicConv
from power_lab.training.modules.layers import Sight, attention, frequencies, rope

V, D, N = 96, 32, 80
BLOCK = DrafterConfig(
    layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, taps=(1, 2), block_size=6, mask_token=95, markov_rank=8, conv_taps=2,
    conv_group=8, selector_rank=8, selector_top_k=5,
)  # fmt: skip
KINDS = {"dflash": DFlash, "dspark": DSpark, "dflash2": DFlash2}


def shared(softcap: float = 0.0) -> Shared:
    torch.manual_seed(7)
    table = torch.randn(V, D)
    ids = torch.sort(torch.randperm(V)[:N]).values
    return Shared(table, table / D**0.5, torch.arange(V), 1e-5, softcap, torch.ones(D)).only(ids)


def random(kind: type, config: DrafterConfig) -> torch.nn.Module:
    """With every parameter at a scale at which it matters."""
    torch.manual_seed(1)
    module = kind(config, D, 1e-5, V, N)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter) * (1 if parameter.ndim == 1 else D**-0.5 * 2)
    return module.eval()


def texts(config: DrafterConfig) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(2, 20, len(config.taps) * D), torch.randint(0, V, (2, 20))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False},
        {"window": 5},
        {"qk_norm": False},
        {"window": 4, "causal": False},
        {"from_anchor": True},
        {"from_anchor": True, "causal": False},
    ],
)
def test_one_draft_is_the_batched_form_along_its_own_tokens(name: str, changes: dict) -> None:
    config = replace(BLOCK, **changes)
    module, target = random(KINDS[name], config), shared(softcap=5.0)
    features, tokens = texts(config)
    for position in (1, 9):
        with torch.no_grad():
            draft = module.draft(target, features[0, :position], int(tokens[0, position]), 4)
            along = tokens[:1].clone()
            along[0, position + 1 : position + 5] = torch.tensor(draft.tokens)
            proposal = module(target, Asked(features[:1], along, torch.tensor([[3, position]]), 4))
        rows = target.scatter(proposal.logits[0, 1])
        if proposal.candidates is not None:
            rows = torch.full((4, V), -torch.inf).scatter(
                1, target.ids[proposal.candidates[0, 1]], proposal.scores[0, 1]
            )
        torch.testing.assert_close(draft.logits, rows)
        assert draft.tokens == [row.argmax().item() for row in rows]
        assert all(0 <= sure <= 1 for sure in draft.confidence)
        if proposal.confidence is not None:
            torch.testing.assert_close(torch.tensor(draft.confidence), proposal.confidence[0, 1].sigmoid())


def test_an_mtp_chain_is_the_batched_form_along_its_own_tokens() -> None:
    config = replace(BLOCK, layers=1, taps=(2,))
    module, target = random(MTP, config), shared()
    features, tokens = texts(config)
    with torch.no_grad():
        draft = module.draft(target, tokens[0, :7].tolist(), features[0, :7], int(tokens[0, 7]), 3)
        along = tokens[:1].clone()
        along[0, 8:11] = torch.tensor(draft.tokens)
        proposal = module(target, Asked(features[:1], along, torch.tensor([[2, 7]]), 3))
    torch.testing.assert_close(draft.logits, target.scatter(proposal.logits[0, 1]))


@pytest.mark.parametrize("name", KINDS)
def test_nothing_behind_the_anchor_is_seen(name: str) -> None:
    module, target = random(KINDS[name], BLOCK), shared()
    features, tokens = texts(BLOCK)
    other = features.clone()
    other[:, 8:] = torch.randn_like(other[:, 8:])
    anchors = torch.full((2, 1), 8)
    with torch.no_grad():
        first, second = (module(target, Asked(part, tokens, anchors, 5)).base for part in (features, other))
        other[:, 7] = 0
        third = module(target, Asked(other, tokens, anchors, 5)).base
    assert torch.equal(first, second)
    assert not torch.allclose(first, third)


def test_a_narrow_causal_draft_begins_the_wider_one() -> None:
    module, target = random(DFlash, BLOCK), shared()
    features, tokens = texts(BLOCK)
    with torch.no_grad():
        wide, narrow = (
            module(target, Asked(features, tokens, torch.tensor([[4], [9]]), width)).logits for width in (5, 2)
        )
    torch.testing.assert_close(narrow, wide[:, :, :2])


def test_attention_and_rope_are_the_references() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 3, 4, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
    own_k, own_v = torch.randn(1, 2, 3, 2, 8), torch.randn(1, 2, 3, 2, 8)
    anchors = torch.tensor([[4, 7]])
    positions = anchors[..., None] + torch.arange(3)
    sight = Sight.of(positions, anchors, 9, causal=True, window=0)
    out = attention(q, (k, v), (own_k, own_v), sight).unflatten(-1, (4, 8))
    for a, anchor in enumerate((4, 7)):
        for s in range(3):
            keys = torch.cat([k[0, :anchor], own_k[0, a, : s + 1]])
            values = torch.cat([v[0, :anchor], own_v[0, a, : s + 1]])
            want = reference.attention(q[0, a, s], keys, values, 8**-0.5)
            torch.testing.assert_close(out[0, a, s].double(), want, rtol=1e-4, atol=1e-5)
    turn = reference.rope_tables(50, reference.frequencies(8, 10000.0))
    at = torch.tensor([3, 11, 49])
    torch.testing.assert_close(
        rope(q[0, 0], at, frequencies(8, 10000.0)).double(), reference.rope(q[0, 0], turn[at], False), rtol=1e-4, atol=1e-5
    )


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 7), taps=st.integers(1, 4), seed=st.integers(0, 999))
def test_a_filter_is_its_formula(rows: int, taps: int, seed: int) -> None:
    torch.manual_seed(seed)
    conv = DynamicConv(16, taps, 4)
    with torch.no_grad():
        conv.base.normal_()
        x, y = torch.randn(rows, 16), torch.randn(rows, 16)
        coef = conv.proj(x)
        for side in (0, 1):
            out = conv(y, conv.coefficients(x).unbind(-3)[side])
            for r in range(rows):
                for c in range(16):
                    want = sum(
                        (conv.base[side, t, c] + coef[r, (side * taps + t) * 4 + c // 4]) * y[r - t, c]
                        for t in range(min(taps, r + 1))
                    )
                    assert abs(float(out[r, c]) - float(want)) < 1e-4
