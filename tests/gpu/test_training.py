"""Training on the GPU: the kernels' values on real shapes, and steps that are recorded and replayed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from power_lab.engine.weights.source import MemorySource
from power_lab.training import rows
from power_lab.training.corpus import Corpus
from power_lab.training.rows import Rows
from power_lab.training.target import Target
from power_lab.training.train import Trainer
from tests import tiny
from tests.training.conftest import RECIPE, SHAPE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICE = "cuda"


def on_the_device(compared: Rows) -> Rows:
    return Rows(*(part.to(DEVICE) for part in (compared.table, compared.index, compared.tokens, compared.weight)))


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_kernels_are_the_torch_form(softcap: float) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(64, 16384)).bfloat16()
    table = (torch.softmax(3 * torch.randn(40, 16384), -1) * 0.9).bfloat16()
    compared = Rows(table, torch.randint(0, 40, (64,)), torch.randint(-1, 16384, (64,)), torch.rand(64))
    want, got = logits.clone(), logits.to(DEVICE)
    losses = rows.imitate(want, compared, 0.3, softcap)
    found = rows.imitate(got, on_the_device(compared), 0.3, softcap)
    for one, other in zip(found, losses, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.cpu().float(), want.float(), rtol=1e-2, atol=1e-6)
    whole, ids = (4 * torch.randn(16, 49152)).bfloat16(), torch.randperm(49152)[:16384].sort().values
    said = rows.probabilities(whole.to(DEVICE), ids.to(DEVICE), softcap)
    torch.testing.assert_close(
        said.cpu().float(), rows.probabilities(whole, ids, softcap).float(), rtol=1e-2, atol=1e-7
    )


def corpus(texts: int = 96) -> Corpus:
    rng = np.random.default_rng(0)
    said = [rng.integers(0, 64, rng.integers(20, 100)).tolist() for _ in range(texts)]
    return Corpus.of(said, [5] * texts, list(range(texts)), [0.0, 0.8] * (texts // 2), {})


@pytest.mark.filterwarnings("default")  # of optimisers whose first steps are not recorded
def test_recorded_steps_learn_what_unrecorded_ones_do() -> None:
    spec = tiny.spec(SHAPE)
    recipe = msgspec.structs.replace(RECIPE, inherit=True, from_anchor=True, longest=128, rate=1e-3).fitted(spec)
    made = []
    for recorded in (False, True):
        trainer = Trainer(Target(spec, MemorySource(tiny.tensors(SHAPE)), DEVICE), corpus(), recipe)
        trainer.graphs.enabled = trainer.graphs.enabled and recorded
        batches = trainer.texts()
        losses = []
        for step in range(24):
            trainer.train(next(batches), step / 24)
            losses.append(list(trainer.losses().values()))
        made.append((trainer, np.array(losses)))
    (_, plain), (trainer, replayed) = made
    assert trainer.graphs.enabled
    assert trainer.graphs.recorded >= 2
    np.testing.assert_allclose(replayed, plain, rtol=3e-2)
    assert (replayed[-4:].mean(0) < replayed[:4].mean(0)).all()
    assert trainer.held()
