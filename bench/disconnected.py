"""How long after the death of an engine host a page says so: side panel, status bar and `lab.watch()`.

    python bench/disconnected.py [--kills 15] [--output FILE]

JupyterLab with the panel open and a notebook that shows `lab.watch()`. The host is killed at rest, killed while it generates, and
halted at rest (SIGSTOP: its connections stay open, only nothing comes), in turn; the page looks at each of its frames. Seconds by the
clock of the machine, which both sides read.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.notebook_page import arguments, notebook_page, report  # noqa: E402
from tests.browser.lab import LabPage  # noqa: E402
from tests.browser.test_engines import PANEL, STATE, STATUS, STORY, host_of  # noqa: E402

NOTEBOOK = "killed.ipynb"
CELLS = ('lab.load("smollm2")', "lab.watch()", STORY)
STATES = ("idle", "running", "halted")
PARTS = ("panel", "status", "dashboard")
CLOCK = f"""() => {{
  window.said = {{}};
  const where = {{panel: '{PANEL}', status: '{STATUS}', dashboard: '.pl-watching .pl-status'}};
  const look = () => {{
    for (const name in where)
      if (/disconnected/i.test(document.querySelector(where[name]).textContent)) window.said[name] ??= Date.now() / 1000;
    if (Object.keys(window.said).length < 3) requestAnimationFrame(look);
  }};
  look();
}}"""


def main() -> None:
    args = arguments(__doc__ or "", "kills", 15)
    with notebook_page(NOTEBOOK, CELLS) as page:
        result = measure(page, args.kills)
    report(args, result)


def measure(page: LabPage, kills: int) -> dict[str, Any]:
    """Seconds from the kill to the word, by part of the page and by what the host was at."""
    page.open(NOTEBOOK)
    page.command("power-lab:open-panel")
    found: dict[str, dict[str, list[float]]] = {state: {part: [] for part in PARTS} for state in STATES}
    for number in range(kills):
        state = STATES[number % len(STATES)]
        page.show("lab.load")
        page.command("notebook:run-cell")
        page.wait_idle()
        if number == 0:
            page.show("lab.watch")
            page.command("notebook:run-cell")
            page.wait_idle()
        if state == "running":
            page.show(STORY)
            page.page.evaluate("() => void window.jupyterapp.commands.execute('notebook:run-cell')")
        page.show("lab.watch")
        page.page.locator(STATE, has_text="running" if state == "running" else "idle").wait_for(timeout=60_000)
        page.page.locator(".pl-watching .pl-status", has_text="Live").wait_for(timeout=60_000)
        host = host_of(page.server)
        page.page.evaluate(CLOCK)
        began = time.time()
        os.kill(host, signal.SIGSTOP if state == "halted" else signal.SIGKILL)
        page.page.wait_for_function("() => Object.keys(window.said).length === 3")
        said = page.page.evaluate("() => window.said")
        for part in PARTS:
            found[state][part].append(said[part] - began)
        if state == "halted":
            os.kill(host, signal.SIGKILL)
        page.wait_idle()
    return {
        "kills": kills,
        **{
            f"s_{part}_{state}": {"median": round(statistics.median(times), 3), "longest": round(max(times), 3)}
            for state, parts in found.items()
            for part, times in parts.items()
        },
        "console_errors": list(page.errors),
    }


if __name__ == "__main__":
    main()
