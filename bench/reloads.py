"""Reloads of a page while a cell runs: how soon panel and widgets are live again, and what reloads leave behind.

    python bench/reloads.py [--reloads 20] [--output FILE]

JupyterLab with the panel open and a notebook that shows `lab.watch()` and `lab.inspect.blocks()`; its last cell sleeps. Times are the
page's own, from the moment that JupyterLab's application is restored (`restored`: since navigation). Threads, files and comms are
counted after each reload: `held` has them after the reloads of its number. Those of the kernel grow until it has the subshells that
it has at most (`jupyter/_routing.py`), about two a reload.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.notebook_page import arguments, notebook_page, report  # noqa: E402
from tests.browser.held import held  # noqa: E402
from tests.browser.lab import LabPage  # noqa: E402

SHOWN = ('lab.load("smollm2")', "lab.watch()", "lab.inspect.blocks()")
CELLS = (*SHOWN, "import time\ntime.sleep(100_000)")
NOTEBOOK = "reloads.ipynb"
PARTS = ("status", "panel", "dashboard", "blocks")
# Looks at each frame. A panel is live with a state of an engine, a dashboard by its own word, another view once its script has found it.
CLOCK = """
window.seen = {};
const look = () => {
  const there = {
    restored: window.restoredApp,
    panel: document.querySelector('#power-lab-panel .jp-PowerLab-state'),
    status: /idle|tok/.test(document.querySelector('.jp-PowerLab-statusButton')?.textContent ?? ''),
    dashboard: /^Live/.test(document.querySelector('.pl-watching .pl-status')?.textContent ?? ''),
    blocks: document.querySelector('.pl-live'),
  };
  for (const name in there) if (there[name]) window.seen[name] ??= performance.now();
  if (window.jupyterapp && !window.waiting) {
    window.waiting = true;
    window.jupyterapp.restored.then(() => { window.restoredApp = true; });
  }
  requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""


def main() -> None:
    args = arguments(__doc__ or "", "reloads", 20)
    with notebook_page(NOTEBOOK, CELLS, CLOCK) as page:
        result = measure(page, args.reloads)
    report(args, result)


def measure(page: LabPage, reloads: int) -> dict[str, Any]:
    """Times of `reloads` reloads, and what there is more at their end."""
    from playwright.sync_api import TimeoutError

    page.open(NOTEBOOK)
    page.keep_panel_open()
    for source in SHOWN:
        page.show(source)
        page.command("notebook:run-cell")
    page.wait_idle()
    page.command("docmanager:save")
    page.show(CELLS[-1])
    page.page.evaluate("() => void window.jupyterapp.commands.execute('notebook:run-cell')")
    seen, incomplete, counts = [], [], {0: held(page)}
    for number in range(reloads):
        page.page.goto(page.server.page(NOTEBOOK).removesuffix("&reset"))
        with contextlib.suppress(TimeoutError):
            page.page.wait_for_function("() => Object.keys(window.seen).length === 5", timeout=20_000)
        found = page.page.evaluate("() => window.seen")
        if missing := sorted({"restored", *PARTS} - set(found)):
            incomplete.append({"reload": number, "missing": missing})
        else:
            seen.append(found)
        counts[number + 1] = held(page)
    return {
        "reloads": reloads,
        "not_live_within_20_s": incomplete,
        "s_restored_since_navigation": spread([one["restored"] for one in seen]),
        **{f"s_{part}_since_restored": spread([one[part] - one["restored"] for one in seen]) for part in PARTS},
        "held": changes(counts),
        "console_errors": list(page.errors),
    }


def spread(times: list[float]) -> dict[str, float]:
    """Milliseconds as seconds."""
    seconds = sorted(time / 1000 for time in times)
    return {"median": round(statistics.median(seconds), 3), "longest": round(seconds[-1], 3)}


def changes(counts: dict[int, Any]) -> dict[str, dict[str, dict[int, int]]]:
    """process -> what -> reloads -> how many: the first count, each one that differs from that before it, and the last."""
    last = max(counts)
    return {
        process: {
            what: {
                number: counts[number][process][what]
                for number in counts
                if number in (0, last) or counts[number][process][what] != counts[number - 1][process][what]
            }
            for what in counts[0][process]
        }
        for process in counts[0]
    }


if __name__ == "__main__":
    main()
