"""Tests that need an NVIDIA GPU. Elsewhere they are not collected: the kernels' values are tested through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from power_lab.kernels.ops import Ops


def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


collect_ignore_glob = [] if has_gpu() else ["test_*.py"]


@pytest.fixture(scope="session")
def gpu_ops() -> Ops:
    from power_lab.kernels.triton.ops import TritonOps

    return TritonOps()


@pytest.fixture(scope="session")
def numba_ops(gpu_ops: Ops) -> Callable[[int], Ops]:
    """The CPU suites' maker of operation tables, so that they run here as they are."""
    return lambda threads: gpu_ops
