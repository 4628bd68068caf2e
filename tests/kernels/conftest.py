"""Fixtures of the kernel tests."""

from __future__ import annotations

import pytest

from power_lab.kernels.numba.ops import NumbaOps
from tests.kernels import data


@pytest.fixture(scope="session")
def ops() -> NumbaOps:
    """Exact operations on two threads, compiled once a session."""
    return data.two_threads()
