"""The way to the device, as far as it needs none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from power_lab.kernels.triton.host import tensor_of


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
