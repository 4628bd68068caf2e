"""Rows of stored tables, through Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.quants import GEOMETRY, QuantType
from power_lab.kernels.triton.embed import embed, merge
from tests.kernels.triton.matrices import on_device, weight


@pytest.mark.parametrize("type", list(QuantType))
def test_rows_are_the_stored_values_bit_for_bit(type: QuantType) -> None:
    cols = 512 if GEOMETRY[type][0] == 256 else 288
    table, values = weight(type, 7, cols)
    out = torch.full((4, cols), torch.nan)
    embed(table, torch.tensor([6, 0, 3], dtype=torch.int32), out[:3])
    assert torch.equal(out[:3], values[[6, 0, 3]])
    assert out[3].isnan().all(), "a row behind the output was written"
    embed(table, torch.tensor([2], dtype=torch.int32), out[:1], 25.25)
    assert torch.equal(out[0], values[2] * 25.25)


@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.BF16])
def test_ids_that_are_not_in_the_table_give_nan(type: QuantType) -> None:
    table, values = weight(type, 7, 64)
    out = torch.zeros(5, 64)
    embed(table, torch.tensor([-1, 7, 5, 2**31 - 1, -(2**31)], dtype=torch.int32), out)
    assert torch.equal(out[2], values[5])
    assert out[[0, 1, 3, 4]].isnan().all()


@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.BF16])
def test_ids_below_zero_are_tokens_of_the_step_before(type: QuantType) -> None:
    table, values = weight(type, 7, 64)
    drawn, out = torch.tensor([6, 0, -1, 7], dtype=torch.int32), torch.zeros(8, 64)
    ids = torch.tensor([5, -2, -1, -3, -4, -5, -(2**31), 7], dtype=torch.int32)
    embed(table, ids, out, 0.5, drawn)
    assert torch.equal(out[:3], values[[5, 0, 6]] * 0.5)
    assert out[3:].isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_every_exponent_of_mxfp4() -> None:
    """Subnormal values and infinite ones too."""
    stored = np.random.default_rng(0).integers(0, 256, (256, 17), dtype=np.uint8)
    stored[:, 0] = np.arange(256)
    out = torch.zeros(256, 32)
    embed(on_device(QuantType.MXFP4, 256, 32, stored), torch.arange(256, dtype=torch.int32), out)
    assert torch.equal(out, reference.dequantize(QuantType.MXFP4, stored, 256, 32))


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.BF16])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placed", [False, True])
def test_merged_rows_are_norms_of_embeddings_and_states(type: QuantType, kind: torch.dtype, placed: bool) -> None:
    table, values = weight(type, 7, 96)
    rng = np.random.default_rng(0)
    first, second = (torch.from_numpy(rng.standard_normal(96).astype(np.float32)) for _ in range(2))
    states = torch.from_numpy(rng.standard_normal((6, 96)).astype(np.float32)).to(kind)
    ids, drawn = torch.tensor([5, -2, 0, -1], dtype=torch.int32), torch.tensor([3, 6], dtype=torch.int32)
    index = torch.tensor([4, -1, 5, 0]) if placed else None
    out = torch.full((5, 192), torch.nan)
    merge(table, ids, 1.5, drawn, first, states, index, second, 1e-5, out[:4])
    taken = states[:4] if index is None else reference.take(states, index)
    want = reference.merge(values[[5, 6, 0, 3]] * 1.5, first, taken, second, 1e-5)
    np.testing.assert_allclose(out[:4].numpy(), want.numpy(), rtol=1e-5, atol=1e-6)
    assert out[4].isnan().all()
    if index is not None:
        index[0], ids[1] = 6, 7
        merge(table, ids, 1.5, drawn, first, states, index, second, 1e-5, out[:4])
        assert out[0, 96:].isnan().all() and out[1, :96].isnan().all() and out[0, :96].isfinite().all()
    with pytest.raises(ValueError, match="4 rows of 96"):
        merge(table, ids, 1.5, drawn, first, states[:3], None, second, 1e-5, out[:4])
