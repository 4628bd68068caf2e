"""The losses and their gradients, made chunk by chunk, are those of the formulas; the Triton kernels compute what torch does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.training import kernels, losses, rows
from power_lab.training.losses import Truth, weights
from power_lab.training.modules import MTP, Asked, DrafterConfig, Proposal
from power_lab.training.recipe import CLASSES
from power_lab.training.rows import Rows
from tests.training import plain
from tests.training.plain import overlap
from tests.training.test_modules import BLOCK, D, random, shared


def test_losses_are_their_formulas() -> None:
    torch.manual_seed(0)
    logits, p = torch.randn(1, 2, 3, 5), torch.softmax(torch.randn(1, 2, 3, 5), -1) * 0.9
    tokens = torch.tensor([[[0, 4, -1], [2, 1, 3]]])
    valid = torch.tensor([[[True, True, True], [True, False, False]]])
    total, weights = 0.0, 0.0
    for a in range(2):
        for w in range(3):
            logq = torch.log_softmax(logits[0, a, w], -1)
            said = -logq[tokens[0, a, w]] if tokens[0, a, w] >= 0 else torch.zeros(())
            row = 0.75 * -(p[0, a, w] * logq).sum() + 0.25 * said
            weight = float(valid[0, a, w]) * 2.718281828 ** (-w / 2.0)
            total, weights = total + weight * float(row), weights + weight
    got = plain.loss(Proposal(logits, logits), plain.Truth(p, tokens, valid), decay=2.0, hard=0.25)
    assert float(got) == pytest.approx(total / weights, rel=1e-5)
    q = torch.softmax(logits, -1)
    outside = 1 - p.sum(-1)
    variation = ((p - q).abs().sum(-1) + outside) / 2
    torch.testing.assert_close(overlap(logits, p), 1 - variation)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("kind", list(CLASSES))
def test_a_loss_and_its_gradient_are_the_plain_ones(kind: str, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CHUNK", 7)
    config = BLOCK if kind != "mtp" else DrafterConfig(1, 4, 2, 8, 24, (2,))
    module, target = random(CLASSES[kind], config), shared(softcap=softcap)
    features, tokens = torch.randn(2, 20, len(config.taps) * D), torch.randint(0, target.vocab, (2, 20))
    anchors, lengths = torch.tensor([[3, 9, 16], [1, 5, 14]]), torch.tensor([20, 17])
    asked = Asked(features, tokens, anchors, 4)
    table = torch.softmax(torch.randn(40, len(target.ids)), -1) * 0.9
    index = torch.full((target.vocab,), -1)
    index[target.ids] = torch.arange(len(target.ids))
    at = anchors[..., None] + torch.arange(4)
    place = at.clamp(max=19) + torch.tensor([0, 20])[:, None, None]
    said, valid = index[asked.known(1, 4)], at + 1 < lengths[:, None, None]
    want = plain.loss(module(target, asked), plain.Truth(table[place], said, valid), 6.0, 0.25)
    want.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    truth = Truth(Rows(table, place.flatten(), said.flatten(), weights(valid, 6.0)), 0.25)
    got = losses.loss(module, target, asked, truth)
    (2 * got).backward()
    torch.testing.assert_close(got, want)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, 2 * gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    assert isinstance(module, MTP) or gradients["fc.weight"].abs().sum() > 0


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 99), columns=st.sampled_from([60, 128, 5000]), softcap=st.sampled_from([0.0, 4.0]))
def test_kernels_are_the_torch_form(seed: int, columns: int, softcap: float) -> None:
    torch.manual_seed(seed)
    logits, tokens = 3 * torch.randn(4, columns), torch.tensor([columns - 1, -1, 0, 50])
    table = torch.softmax(2 * torch.randn(6, columns), -1) * 0.9
    compared = Rows(table, torch.randint(0, 6, (4,)), tokens, torch.tensor([0.4, 0.3, 0.3, 0.0]))
    torch_form, kernel = logits.clone(), logits.clone()
    want = rows.imitate(torch_form, compared, 0.3, softcap)
    got = kernels.imitate(kernel, table, compared.index, tokens, compared.weight, 0.3, softcap)
    for one, other in zip((kernel, *got), (torch_form, *want), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    ids = torch.randperm(columns)[: columns // 2].sort().values
    torch.testing.assert_close(
        kernels.probabilities(logits, ids, softcap), rows.probabilities(logits, ids, softcap), rtol=1e-5, atol=1e-7
    )
