"""Fixtures of the engine tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest

from power_lab.kernels.ops import Ops
from tests import tiny


@pytest.fixture(scope="session")
def numba_ops() -> Callable[[int], Ops]:
    """The exact CPU operation table for a number of threads, made once."""
    from power_lab.kernels.table import select

    return lru_cache(lambda threads: select("cpu", "exact", threads, tiny.cache_dir()))


@pytest.fixture(scope="session")
def behind() -> Callable[[Ops], Ops]:
    """The same operations on a device that runs behind its host."""
    from tests.lagged import Lagged

    return Lagged  # type: ignore[return-value]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """References of this size are computed faster without threads, by far where the machine is busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
