"""Rows of stored tables, through Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.quants import GEOMETRY, QuantType
from power_lab.kernels.triton.embed import embed
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
