"""The way to the device, as far as it needs none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from power_lab.kernels.triton import host
from power_lab.kernels.triton.host import carry, tensor_of


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float16, np.float32])
def test_memory_that_is_only_read_becomes_a_tensor_without_a_copy_and_without_a_warning(
    dtype: type, tmp_path: Path
) -> None:
    path = tmp_path / "weights"
    np.arange(24, dtype=dtype).tofile(path)
    mapped = np.memmap(path, dtype, "r").reshape(4, 6)
    made = tensor_of(mapped)
    assert made.data_ptr() == mapped.ctypes.data and made.numpy().tobytes() == mapped.tobytes()
    own = np.ones((2, 3), dtype)
    assert tensor_of(own).data_ptr() == own.ctypes.data


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize("most", [host.MOST, 0])
@pytest.mark.parametrize("count", [0, 1, 1024, 2500])
def test_what_is_carried_ends_where_it_is_said(most: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel, and by a copy where it is too much for one."""
    monkeypatch.setattr(host, "MOST", most)
    source, to = torch.arange(3000, dtype=torch.int32), torch.full((50, 60), -1, dtype=torch.int32)
    carry(source, to, count)
    assert to.view(-1)[:count].equal(source[:count]) and (to.view(-1)[count:] == -1).all()
