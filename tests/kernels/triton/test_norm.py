"""Normalisation and soft-capping through Triton's interpreter, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.triton import norm

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 24, 64, 576])
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("out_type", [torch.float32, torch.bfloat16])
def test_norm(width: int, post: bool, out_type: torch.dtype) -> None:
    x, delta, weight, before = normal(3, width), normal(3, width, seed=1), normal(width, seed=2), normal(width, seed=3)
    out = torch.full((4, width), torch.nan, dtype=out_type)
    added = reference.rms_norm(delta, before, 1e-6) if post else delta.double()
    summed = x.double() + added
    kept = delta.clone()
    norm.norm(x, delta, before if post else None, weight, 1e-5 if not post else 1e-6, out[:3])
    want = reference.rms_norm(summed, weight, 1e-5 if not post else 1e-6)
    np.testing.assert_allclose(x.numpy(), summed.numpy(), rtol=1e-5, atol=1e-6)
    loose = out_type == torch.bfloat16  # the interpreter truncates where the GPU rounds
    np.testing.assert_allclose(out[:3].double().numpy(), want.numpy(), rtol=1e-2 if loose else 1e-5, atol=1e-6)
    assert out[3].isnan().all() and torch.equal(delta, kept)


def test_parts_are_left_out() -> None:
    x, weight, out = normal(2, 40), normal(40, seed=1), torch.full((2, 40), torch.nan)
    before = x.clone()
    norm.norm(x, None, None, weight, 1e-5, out)
    assert torch.equal(x, before)
    np.testing.assert_allclose(out.numpy(), reference.rms_norm(x, weight, 1e-5).numpy(), rtol=1e-5, atol=1e-6)
    out.fill_(torch.nan)
    norm.norm(x, before, None, None, 1e-5, out)
    assert torch.equal(x, 2 * before) and out.isnan().all()


@pytest.mark.parametrize("post", [False, True])
def test_rows_that_are_gathered_have_their_own_bits(post: bool) -> None:
    x, delta, weight, before = normal(5, 40), normal(5, 40, seed=1), normal(40, seed=2), normal(40, seed=3)
    rows, out, every = torch.tensor([4, 0, 4], dtype=torch.int32), torch.full((4, 40), torch.nan), torch.empty(5, 40)
    kept = x.clone()
    norm.norm(x, delta, before if post else None, weight, 1e-5, out[:3], rows)
    assert torch.equal(x, kept) and out[3].isnan().all()
    norm.norm(x, delta, before if post else None, weight, 1e-5, every)
    assert torch.equal(out[:3], every[rows])
    norm.norm(x, delta, None, weight, 1e-5, out[:0], rows[:0])


def test_softcap() -> None:
    x = normal(5, 437) * 40
    x[0, :3] = torch.tensor([0.0, 1e3, -1e3])
    want = reference.softcap(x, 30.0)
    norm.softcap(x, 30.0)
    np.testing.assert_allclose(x.numpy(), want.numpy(), rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_sums_alone_of_rows_of_any_width(rows: int) -> None:
    x, delta = normal(rows + 1, 1500), normal(rows, 1500, seed=1)
    want = torch.cat([x[:rows] + delta, x[rows:]])
    norm.norm(x[:rows], delta, None, None, 0.0, None)
    assert torch.equal(x, want)
