"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from power_lab import models
from power_lab.engine.config import Paths
from tests.homes import own_home

# Triton decides at its import, and other libraries import it, whether kernels run in its interpreter. Only a GPU runs them compiled.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No test times anything: a busy machine is no fault. Elsewhere as Hypothesis itself has it, here or in CI.
settings.register_profile("untimed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

DEFAULT_PATHS = Paths.default()  # before any test points POWER_LAB_HOME elsewhere


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, from the user's cache; fetched (93 MB, once) if it is not there."""
    return models.ensure("smollm2", DEFAULT_PATHS, progress=False).path


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M, the second catalogue model; fetched (242 MB, once) if it is not there. Running the tests accepts its terms."""
    return models.ensure("gemma3-270m", DEFAULT_PATHS, progress=False, accept_license=True).path


@pytest.fixture(scope="session")
def notebook_home(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Path]:
    """One engine host for all notebooks that are run: a model is loaded once, as in a day's work."""
    with own_home(tmp_path_factory.mktemp("home")) as home:
        yield home
