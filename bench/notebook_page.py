"""What is measured in a browser: a JupyterLab of its own with one notebook and one page, and the record of the result."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.cpu import about
from tests.browser.lab import FLAGS, LabPage, chromium, serve, write_notebook
from tests.homes import own_home


def arguments(doc: str, times: str, default: int) -> argparse.Namespace:
    """Of the command line; `--{times}` says how often."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{times}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="also write the result with machine and commit to this file")
    return parser.parse_args()


@contextmanager
def notebook_page(notebook: str, cells: Sequence[str], script: str = "") -> Iterator[LabPage]:
    """A page of a JupyterLab whose folder has the notebook alone, with an engine host of its own. script: runs in each document first."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, own_home(Path(folder)) as home, sync_playwright() as driver:
        (home / "notebooks").mkdir()
        (home / "jupyter").mkdir()
        write_notebook(home / "notebooks" / notebook, cells)
        browser: Any = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        with serve(home / "notebooks", home / "jupyter", home) as server:
            context = browser.new_context(viewport={"width": 1400, "height": 1000})
            context.add_init_script(script)
            yield LabPage(context.new_page(), server, home)
            context.close()  # before the server: a page without one complains
        browser.close()


def report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print a result, and keep it where that was asked for."""
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps({"run": about(args), **result}, indent=1) + "\n")
