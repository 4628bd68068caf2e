"""Another base URL, and Notebook 7 below it: one server with both, and an engine host of its own."""

from __future__ import annotations

import re

import pytest

from tests.browser import lab
from tests.browser.conftest import PICTURES
from tests.browser.lab import OUTPUT, visit, write_notebook
from tests.homes import own_home

BASE = "/users/ada/"
_BUNDLE = r"\s+at [^\n]*/static/notebook/notebook_core\."
OF_NOTEBOOK_7 = (
    # Its shortcuts ask for their own settings' schema as soon as any other settings, such as ours, are loaded.
    re.compile(r"uncaught: TypeError: Cannot read properties of undefined \(reading 'schema'\)" + _BUNDLE),
    # Its file browser opens the notebook's folder by a command that the page of a single notebook has not.
    re.compile(r"uncaught: Error: Command 'filebrowser:open-path' not registered\." + _BUNDLE),
)
"""What Notebook 7.6 throws in its own bundle, word by word: anything else is ours."""
CELLS = ('lab.load("smollm2")', "lab.inspect.blocks()", "lab.watch()")


@pytest.fixture(scope="module")
def server(tmp_path_factory, smollm2_path):
    root, private = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("jupyter")
    write_notebook(root / "notes.ipynb", CELLS)
    options = f"--ServerApp.base_url={BASE}", "--JupyterNotebookApp.expose_app_in_browser=True"
    with own_home(tmp_path_factory.mktemp("home")) as home, lab.serve(root, private, home, *options) as server:
        yield server


def test_jupyterlab_below_another_base_url(server, browser):
    with visit(browser, server, PICTURES) as page:
        asked: list[str] = []
        page.page.on("websocket", lambda socket: asked.append(socket.url))
        page.open("notes.ipynb")
        page.command("power-lab:open-panel")
        page.run_all()
        page.page.locator("#power-lab-panel .jp-PowerLab-state", has_text="idle").wait_for()
        page.show("lab.inspect.blocks")
        page.page.locator(OUTPUT).get_by_role("button", name="Refresh").wait_for()
        live = [url for url in asked if "/power-lab/api/live" in url]
        assert live and all(f"{BASE}power-lab/api/live" in url for url in live)


def test_notebook_7_has_the_panel_the_views_and_the_dashboard(server, browser):
    with visit(browser, server, PICTURES) as page:
        page.page.goto(f"{server.url}notebooks/notes.ipynb?token={server.token}")
        page.wait_idle()
        assert page.state()["kernel"] == "power_lab"
        page.command("power-lab:open-panel")
        page.run_all()
        page.page.locator("#power-lab-panel .jp-PowerLab-state", has_text="idle").wait_for()
        found = page.accessibility("#power-lab-panel")
        # Our headings are of the third level, as JupyterLab's side panels have them; Notebook 7 has none of the second.
        assert [one for one in found if not one.startswith("heading-order")] == []
        page.page.get_by_role("button", name="Refresh").first.wait_for()
        page.page.locator(".pl-watching .pl-status", has_text="Live").wait_for()
        page.snap("notebook7")
        page.errors[:] = [error for error in page.errors if not any(known.match(error) for known in OF_NOTEBOOK_7)]
