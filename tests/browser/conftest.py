"""Fixtures: one JupyterLab and one browser for all browser tests; a fresh page for each.

They end with this package: while Playwright's synchronous form is open, no other test may run an event loop.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from power_lab.engine.config import Paths
from power_lab.lab import Lab
from tests.browser import lab
from tests.homes import own_home

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "test-results" / "screenshots"


@pytest.fixture(scope="package")
def lab_server(tmp_path_factory, smollm2_path):
    """JupyterLab on a folder that holds a copy of the notebooks, with its own settings and its own engine host."""
    root, private = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("jupyter")
    shutil.copytree(ROOT / "notebooks", root, dirs_exist_ok=True)
    with own_home(tmp_path_factory.mktemp("home")) as home, lab.serve(root, private, home) as server:
        yield server


@pytest.fixture(scope="package")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=lab.chromium(), args=lab.FLAGS)
        yield running
        running.close()


@pytest.fixture
def lab_page(lab_server, browser):
    """A page that fails its test on a console error or on a request that leaves this machine."""
    with lab.visit(browser, lab_server, PICTURES) as page:
        yield page


@pytest.fixture
def no_engine(lab_server):
    """Neither kernels nor an engine host run, whatever the tests before left."""
    for kernel in lab_server.ask("GET", "api/kernels"):
        lab_server.ask("DELETE", f"api/kernels/{kernel['id']}")
    home = lab_server.home
    Lab(paths=Paths(home / "cache", home / "run", home / "state")).replace_host()
