"""Accepted lengths by the text's own tokens are those of real rounds; the noise is the engine's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.kernels import reference
from power_lab.training.acceptance import Rounds, noise, walk
from power_lab.training.corpus import Corpus
from power_lab.training.measuring import Measure
from power_lab.training.modules import DFlash, DFlash2, DSpark
from power_lab.training.noise import gumbel
from power_lab.training.recipe import Recipe
from power_lab.training.train import Trainer
from tests.training.conftest import RECIPE, target


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, (1 << 63) - 1), position=st.integers(0, 1 << 40), token=st.integers(0, 1 << 20))
def test_noise_is_the_references(seed: int, position: int, token: int) -> None:
    got = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token, token + 1]))
    for value, id in zip(got[0].tolist(), (token, token + 1), strict=True):
        assert value == pytest.approx(reference.gumbel(seed, position, id), rel=1e-5, abs=1e-6)


def test_the_target_says_its_own_text(corpus: Corpus) -> None:
    """Drawing from the target's logits with the noise of the corpus' seeds gives the corpus."""
    model = target()
    whole = model.shared()
    texts = corpus.take(np.arange(16), 96)
    last = model.hidden(torch.from_numpy(texts.tokens), [2])[2]
    said = (whole.project(model.normed(last))[:, :-1] + noise(texts, whole)[:, 1:]).argmax(-1).numpy()
    for row, tokens, prompt, length in zip(said, texts.tokens, texts.prompts, texts.lengths, strict=True):
        assert np.mean(row[prompt - 1 : length - 1] == tokens[prompt:length]) > 0.97
    assert (texts.temperatures[::2] == 0).all()
    assert (texts.temperatures[1::2] > 0).all()


def test_rounds_are_walked() -> None:
    lengths = np.array([[9, 9, 2, 0, 0, 3, 0, 9, 9]])
    # Anchor 2 takes 2 drafts, and the round emits a third token: the next anchor is 5, which reaches the text's last token.
    assert walk(lengths, np.array([2]), np.array([9]), 7) == Rounds(2, 6 + 3, 2 + 3)
    assert walk(lengths, np.array([2]), np.array([9]), 1) == Rounds(4, 4, 3)
    assert walk(lengths, np.array([8]), np.array([9]), 7) == Rounds()


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "mtp"])
def test_measured_rounds_are_those_of_drafting_for_real(corpus: Corpus, kind: str) -> None:
    """The walk over proposals about the text's own tokens against drafts, round by round, of the one-request form."""
    model = target()
    trainer = Trainer(
        model, corpus, Recipe(**{**_plain(RECIPE), "kinds": (kind,), "held": 2, "longest": 44}).fitted(model.spec)
    )
    drafter = trainer.drafters[kind]
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    _, held = corpus.split(2, 44, 0)
    measure = Measure(model, trainer.whole, trainer.drafts, corpus, held, 44)
    got = measure.held({kind: drafter})[kind]
    for sampled in (False, True):
        rounds = Rounds()
        for number in held[(corpus.temperatures[held] > 0) == sampled]:
            rounds += _for_real(trainer, drafter, corpus, int(number), width=3)
        assert rounds.rounds > 10
        assert got[f"{'sampled' if sampled else 'greedy'} 3"] == pytest.approx(rounds.mean, abs=1e-3)


def _plain(recipe: Recipe) -> dict:
    return {key: getattr(recipe, key) for key in recipe.__struct_fields__}


def _for_real(trainer: Trainer, drafter, corpus: Corpus, number: int, width: int) -> Rounds:
    texts = corpus.take(np.array([number]), 44)
    tokens, seed, temperature = texts.tokens[0].tolist(), int(texts.seeds[0]), float(texts.temperatures[0])
    hidden = trainer.target.hidden(torch.from_numpy(texts.tokens), drafter.config.taps)
    features = torch.cat([hidden[layer] for layer in drafter.config.taps], -1)[0]

    def draw(logits: torch.Tensor, position: int) -> int:
        if not temperature:
            return int(logits.argmax())
        drawn = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.arange(len(logits)))[0]
        return int((logits / temperature + drawn).argmax())

    total, at, end = Rounds(), int(texts.prompts[0]), int(texts.lengths[0])
    with torch.no_grad():
        while at < end - 1:
            before = () if isinstance(drafter, (DFlash, DSpark, DFlash2)) else (tokens[:at],)
            draft = drafter.draft(trainer.drafts, *before, features[:at], tokens[at], width, draw)
            most = min(width, end - 1 - at)
            took = 0
            while took < most and draft.tokens[took] == tokens[at + 1 + took]:
                took += 1
            total += Rounds(1, most, took)
            at += took + 1
    return total
