"""A real JupyterLab and a real page: what the browser tests stand on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from power_lab.notebook import KERNEL

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
EXTRA_OPTIONS = ["--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly"]

THEMES = ("Light", "Dark")

OUTPUT = ".jp-Notebook-cell.jp-mod-active .jp-Cell-outputArea"
"""The output of the active cell."""

OUTPUTS = ".jp-Cell-outputArea"
"""All outputs. axe on them at once finds what it finds in each, in a fifth of the time."""

_OPEN_PANEL = re.compile(r'"current":\s*"power-lab-panel"')

# The page is driven through JupyterLab's own commands and read through its own models: no guessing at markup.
_STATE = """() => {
  const notebook = window.jupyterapp?.shell.currentWidget?.context ? window.jupyterapp.shell.currentWidget : null;
  const kernel = notebook?.sessionContext?.session?.kernel;
  if (!notebook?.content?.model) return null;
  return {
    kernel: kernel?.name, status: kernel?.status, connection: kernel?.connectionStatus,
    running: notebook.content.widgets.some(cell => cell.inputArea?.promptNode?.textContent?.includes('[*]')),
    cells: [...notebook.content.model.cells].map(cell => cell.toJSON()),
  };
}"""


def chromium() -> str:
    """The browser's path; `make test` installs one where it can."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    assert found, "no Chromium found: run `make browser`, or on Debian: sudo apt-get install chromium"
    return found


@dataclass(frozen=True)
class Server:
    """A JupyterLab server on loopback.

    Attributes:
        url: base address, with a slash at the end; token: its secret; root: its folder; home: its POWER_LAB_HOME; private: all else.
    """

    url: str
    token: str
    root: Path
    home: Path
    private: Path

    def page(self, notebook: str = "") -> str:
        """The address of JupyterLab with a notebook, or with its launcher."""
        return f"{self.url}lab{'/tree/' if notebook else ''}{notebook}?token={self.token}&reset"

    def ask(self, method: str, path: str) -> Any:
        """A request to the server's own interface; the JSON of its answer."""
        asked = Request(f"{self.url}{path}", method=method, headers={"Authorization": f"token {self.token}"})
        with urlopen(asked, timeout=30) as answer:
            return json.loads(answer.read() or "null")


@contextmanager
def serve(root: Path, private: Path, home: Path, *options: str) -> Iterator[Server]:
    """JupyterLab on `root` as `power-lab lab` starts it, with its engine host in `home` and all else of its own below `private`."""
    from power_lab.jupyterlab import command

    environment = {
        **os.environ,
        "POWER_LAB_HOME": str(home),
        "JUPYTER_CONFIG_DIR": str(private / "config"),
        "JUPYTER_RUNTIME_DIR": str(private / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(private / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(private / "workspaces"),
        "IPYTHONDIR": str(private / "ipython"),
    }
    line = command(root, Path("none.ipynb"), 0, False)
    log = private / "server.log"
    with log.open("wb") as sink:
        server = subprocess.Popen(
            [*line, *EXTRA_OPTIONS, *options], env=environment, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        described = private / "runtime" / f"jpserver-{server.pid}.json"
        found = _read_when_there(described, server, log)
        yield Server(found["url"], found["token"], root, home, private)
    finally:
        server.terminate()
        server.wait(20)


def _read_when_there(path: Path, server: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            return json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            time.sleep(0.05)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()}")


class LabPage:
    """One page, with everything that must not happen on it written down.

    Attributes:
        errors: console errors and uncaught exceptions; strays: requests to anything but this machine.
    """

    def __init__(self, page: Any, server: Server, pictures: Path) -> None:
        self.page = page
        self.server = server
        self.pictures = pictures
        self.errors: list[str] = []
        self.strays: list[str] = []
        page.on("request", self._note_request)
        page.on("websocket", lambda socket: self._note_address(socket.url))
        page.on("console", self._note_console)
        page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error.stack or error}"))

    def open(self, notebook: str) -> None:
        """Open a notebook and wait until its kernel is ready."""
        self.page.goto(self.server.page(notebook))
        self.wait_idle(60)

    def start_lab(self) -> None:
        """Open JupyterLab on its launcher and wait until our commands are there."""
        self.page.goto(self.server.page())
        self.page.wait_for_function("() => window.jupyterapp?.commands.hasCommand('power-lab:open-panel')")

    def keep_panel_open(self) -> None:
        """Open our panel and wait until JupyterLab has saved that, for the next load of the page."""
        with self.page.expect_response(
            lambda answer: (
                "/api/workspaces" in answer.url and _OPEN_PANEL.search(answer.request.post_data or "") is not None
            )
        ):
            self.command("power-lab:open-panel")

    def wait_idle(self, timeout: float = 120) -> None:
        """Wait until the kernel of the notebook in front rests and none of its cells runs; `timeout` in seconds."""
        ready = f"() => {{ const s = ({_STATE})(); return s && s.status === 'idle' && !s.running; }}"
        self.page.wait_for_function(ready, timeout=timeout * 1000)

    def state(self) -> dict[str, Any]:
        """Kernel name and status, where there is one, and the cells as they would be saved."""
        return self.page.evaluate(_STATE)

    def command(self, name: str, **arguments: Any) -> None:
        """Execute one of JupyterLab's commands and wait for it."""
        self.page.evaluate(
            "async ([name, args]) => { await window.jupyterapp.commands.execute(name, args); }", [name, arguments]
        )

    def run_all(self, timeout: float = 120) -> None:
        """Run all cells and wait until the kernel rests."""
        self.command("notebook:run-all-cells")
        self.wait_idle(timeout)

    def begin(self, source: str) -> None:
        """Put `source` into the active cell, begin to run it, and go on to a new cell below."""
        self.page.evaluate(
            "source => { window.jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel.setSource(source);"
            " void window.jupyterapp.commands.execute('notebook:run-cell-and-insert-below'); }",
            source,
        )

    def run(self, source: str, timeout: float = 120) -> list[dict[str, Any]]:
        """Run `source` in the active cell; its outputs as they would be saved. The active cell is then the one below."""
        self.begin(source)
        self.wait_idle(timeout)
        return next(cell for cell in reversed(self.state()["cells"]) if "".join(cell["source"]) == source)["outputs"]

    def show(self, source: str) -> Any:
        """Scroll to the code cell whose source begins with `source`; returns the place of its output on the page."""
        found = self.page.wait_for_function(  # a page that has just been loaded has its cells a little later
            f"source => {{ const s = ({_STATE})(), starts = cell => [cell.source].flat().join('').startsWith(source);"
            " const at = s ? s.cells.findIndex(starts) : -1; return at >= 0 ? {at} : null; }",
            arg=source,
        )
        self.page.evaluate(
            "async i => { const n = window.jupyterapp.shell.currentWidget.content;"
            " n.activeCellIndex = i; await n.scrollToItem(i, 'start'); }",
            found.json_value()["at"],
        )
        return self.page.locator(OUTPUT)

    def accessibility(self, selector: str) -> list[str]:
        """What axe finds wrong inside `selector`: rule and markup. JupyterLab's own parts are JupyterLab's affair."""
        from axe_playwright_python.base import AXE_SCRIPT

        if not self.page.evaluate("() => 'axe' in window"):
            self.page.evaluate(AXE_SCRIPT)
        found = self.page.evaluate(
            "async where => (await axe.run(where, {resultTypes: ['violations']})).violations", selector
        )
        return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]

    def theme(self, name: str) -> None:
        """Switch to one of `THEMES` and wait for its colours.

        Also for the end of the splash: JupyterLab removes it twice, with an error, when the next switch comes within its fading.
        """
        name = f"JupyterLab {name}"
        self.command("apputils:change-theme", theme=name)
        self.page.wait_for_function(
            "name => document.body.dataset.jpThemeName === name && !document.getElementById('jupyterlab-splash')",
            arg=name,
        )

    def picture(self, name: str) -> None:
        """A screenshot in both themes, for people to look at."""
        for theme in THEMES:
            self.theme(theme)
            self.snap(f"{name}-{theme.lower()}")

    def snap(self, name: str) -> None:
        """A screenshot as it is."""
        self.page.wait_for_timeout(100)  # let fonts and transitions settle
        self.page.screenshot(path=str(self.pictures / f"{name}.png"))

    def _note_request(self, request: Any) -> None:
        self._note_address(request.url)

    def _note_address(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "about") and parts.hostname not in ("127.0.0.1", "localhost"):
            self.strays.append(url)

    def _note_console(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")


@contextmanager
def visit(browser: Any, server: Server, pictures: Path) -> Iterator[LabPage]:
    """A fresh page, closed at the end; an error on its console or a request that left this machine is a failure."""
    pictures.mkdir(parents=True, exist_ok=True)
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    page = LabPage(context.new_page(), server, pictures)
    yield page
    context.close()
    assert page.strays == [], "requests left this machine"
    assert page.errors == [], "errors on the browser's console"


@contextmanager
def ran(browser: Any, server: Server, pictures: Path, path: str, cells: Sequence[str]) -> Iterator[LabPage]:
    """A page with a notebook of these cells, run without an error."""
    write_notebook(server.root / path, cells)
    with visit(browser, server, pictures) as page:
        page.open(path)
        page.run_all()
        failed = [out for cell in page.state()["cells"] for out in cell["outputs"] if out["output_type"] == "error"]
        assert failed == []
        yield page


def write_notebook(path: Path, cells: Sequence[str], kernel: str = KERNEL) -> None:
    """A notebook of code cells."""
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": kernel, "display_name": kernel, "language": "python"}
    nbformat.write(notebook, path)
