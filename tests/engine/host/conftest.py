from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hosting


@pytest.fixture
def home(tmp_path: Path) -> Iterator[hosting.Home]:
    with hosting.home(tmp_path / "h") as made:
        yield made
