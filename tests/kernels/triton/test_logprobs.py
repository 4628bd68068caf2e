"""Log-probabilities through Triton's interpreter, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.triton.logprobs import Scratch, launch, logprobs

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def compute(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From poisoned scratch into poisoned results."""
    rows, vocabulary = logits.shape
    scratch = Scratch.allocate(rows, vocabulary, top, "cpu")
    scratch.largest.fill_(torch.nan), scratch.sums.fill_(torch.nan), scratch.keys.fill_(-1)
    chosen, values = torch.full((rows,), torch.inf), torch.full((rows, top), torch.inf)
    ids = torch.full((rows, top), -7, dtype=torch.int32)
    launch(logits, tokens, chosen, ids, values, scratch)
    assert not scratch.arrived.any(), "counters are 0 again"
    return chosen.numpy(), ids.numpy(), values.numpy()


@pytest.mark.parametrize(("rows", "vocabulary", "top"), [(4, 5, 5), (3, 1000, 8), (2, 5000, 3), (2, 5000, 0)])
def test_logprobs(rows: int, vocabulary: int, top: int) -> None:
    logits = np.random.default_rng(0).standard_normal((rows, vocabulary)).astype(np.float32) * 3
    logits = torch.from_numpy(np.round(logits, 1))  # with ties
    tokens = (torch.arange(rows) * 1711 % vocabulary).int()
    chosen, ids, values = compute(logits, tokens, top)
    want = reference.logprobs(logits).numpy()
    order = np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :top]
    np.testing.assert_allclose(chosen, want[np.arange(rows), tokens], atol=3e-6)
    assert np.array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(want, order, 1), atol=3e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
def test_rows_that_have_no_softmax() -> None:
    logits = torch.zeros(4, 3000)
    logits[0, 2900], logits[1] = torch.nan, -torch.inf
    logits[2, :2500] = -torch.inf
    chosen, ids, _ = compute(logits, torch.tensor([0, 0, 2999, -1], dtype=torch.int32), 2)
    assert np.isnan(chosen[[0, 1, 3]]).all()
    assert chosen[2] == pytest.approx(-np.log(500), abs=1e-6)
    again = logprobs(logits[2:3], torch.tensor([2999], dtype=torch.int32), 2)
    assert [x.tolist() for x in again] == [[chosen[2]], [[2500, 2501]], [[chosen[2]] * 2]]
    assert ids[2:].tolist() == [[2500, 2501], [0, 1]]
