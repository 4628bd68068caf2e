"""Power Lab homes for tests."""

from __future__ import annotations

from pathlib import Path


def own_home(folder: Path) -> Path:
    """A home with an engine host and logs of its own, and the user's models and compiled kernels, for POWER_LAB_HOME."""
    from power_lab.engine.config import Paths

    cache = Paths.default().cache
    cache.mkdir(parents=True, exist_ok=True)
    (folder / "cache").symlink_to(cache, target_is_directory=True)
    return folder
