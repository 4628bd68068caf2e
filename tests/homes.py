"""Power Lab homes for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def own_home(folder: Path) -> Iterator[Path]:
    """A folder for POWER_LAB_HOME: an engine host and logs of its own, the user's models and compiled kernels.

    The host ends with it: tests should not leave engines that wait for their idle time.
    """
    from power_lab.engine.config import Paths
    from power_lab.lab import Lab

    cache = Paths.default().cache
    cache.mkdir(parents=True, exist_ok=True)
    (folder / "cache").symlink_to(cache, target_is_directory=True)
    try:
        yield folder
    finally:
        Lab(paths=Paths(folder / "cache", folder / "run", folder / "state")).replace_host()  # of whatever version
