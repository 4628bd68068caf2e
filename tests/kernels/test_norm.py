"""Normalisation against the reference; one row's bits in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.numba.ops import NumbaOps
from tests.kernels import data


@pytest.mark.parametrize("width", [1, 8, 24, 64, 576])
@pytest.mark.parametrize("rows", [1, 16, 17, 100])
def test_norms(ops: NumbaOps, width: int, rows: int) -> None:
    x, delta, weight = data.normal(rows, width), data.normal(rows, width, seed=1), data.normal(width, seed=2)
    out = data.poison(rows + 1, width)
    ops.rms_norm(x, weight, 1e-5, out[:rows])
    want = reference.rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-5).numpy()
    np.testing.assert_allclose(out[:rows], want, rtol=2e-6, atol=1e-7)
    summed = x + delta
    ops.add_rms_norm(x, delta, None, weight, 1e-5, out[:rows])
    assert np.array_equal(x, summed)
    want = reference.rms_norm(torch.from_numpy(summed), torch.from_numpy(weight), 1e-5).numpy()
    np.testing.assert_allclose(out[:rows], want, rtol=2e-6, atol=1e-7)
    assert np.isnan(out[rows]).all()


@pytest.mark.parametrize("rows", [1, 17])
def test_what_is_added_may_be_normalised_first(ops: NumbaOps, rows: int) -> None:
    x, delta, post, weight = (data.normal(*shape, seed=s) for s, shape in enumerate([(rows, 40)] * 2 + [(40,)] * 2))
    before, out = torch.from_numpy(x.copy()), data.poison(rows, 40)
    added = before.double() + reference.rms_norm(torch.from_numpy(delta), torch.from_numpy(post), 1e-6)
    ops.add_rms_norm(x, delta.copy(), post, None, 1e-6, out)
    np.testing.assert_allclose(x, added.numpy(), rtol=1e-5, atol=1e-6)
    assert np.isnan(out).all(), "no norm was asked for"
    x = before.numpy().copy()
    ops.add_rms_norm(x, delta.copy(), post, weight, 1e-6, out)
    want = reference.rms_norm(added, torch.from_numpy(weight), 1e-6).numpy()
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [24, 576])
def test_bits_do_not_depend_on_company(ops: NumbaOps, width: int) -> None:
    x, weight = data.normal(64, width), data.normal(width, seed=2)
    alone, together = data.poison(64, width), data.poison(64, width)
    for r in range(64):
        data.one_thread().rms_norm(x[r : r + 1], weight, 1e-5, alone[r : r + 1])
    for count in range(1, 65):
        ops.rms_norm(x[:count], weight, 1e-5, together[:count])
        assert together[:count].tobytes() == alone[:count].tobytes()
