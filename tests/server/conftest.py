from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hosting
from tests.server.serving import Server, serve


@pytest.fixture
def home(tmp_path: Path) -> Iterator[hosting.Home]:
    with hosting.home(tmp_path / "h") as made:
        yield made


@pytest.fixture
def server(home: hosting.Home, tmp_path: Path) -> Iterator[Server]:
    """A Jupyter server with our extension, on the host of `home`, with a token and under a base URL of its own."""
    with serve(home.root, tmp_path / "jupyter") as made:
        yield made
