"""Updates a second that reach a page while the kernel is at rest and while a cell runs: `lab.watch(hz=20)`.

    python bench/busy_cell.py [--seconds 8] [--output FILE]

JupyterLab with a notebook that shows the dashboard. Each update is counted where it arrives in the page; its lag is from the sample's
own time in the engine host (both read the machine's clock) to its arrival.
"""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.notebook_page import arguments, notebook_page, report  # noqa: E402
from tests.browser.lab import LabPage  # noqa: E402

HZ = 20
NOTEBOOK = "busy.ipynb"
SHOWN = ('lab.load("smollm2")', f"lab.watch(hz={HZ})")
LOOP = "import time\nend = time.monotonic() + {seconds}\nn = 0\nwhile time.monotonic() < end:\n    n += 1"
BUSY = {
    "asleep": "import time\ntime.sleep({seconds})",
    "python loop": LOOP,
    "generating": 'run = lab.generate("Tell a long story.", max_tokens=60 * {seconds}, ignore_eos=True)',
}
COUNT = """() => {
  window.frames_ = [];
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  kernel.anyMessage.connect((_, { msg, direction }) => {
    const at = (msg.content?.data?.buffer_paths ?? []).findIndex(path => path[0] === 'frame');
    if (direction !== 'recv' || msg.header.msg_type !== 'comm_msg' || at < 0) return;
    const view = msg.buffers[at], bytes = view.buffer ? view.buffer.slice(view.byteOffset, view.byteOffset + 8) : view.slice(0, 8);
    window.frames_.push([Date.now() / 1000, new Float64Array(bytes)[0]]);
  });
}"""


def main() -> None:
    args = arguments(__doc__ or "", "seconds", 8)
    cells = (*SHOWN, *(source.format(seconds=args.seconds) for source in BUSY.values()))
    with notebook_page(NOTEBOOK, cells) as page:
        result = measure(page, args.seconds)
    report(args, result)


def measure(page: LabPage, seconds: int) -> dict[str, Any]:
    """By what the kernel is at."""
    page.open(NOTEBOOK)
    page.page.set_viewport_size({"width": 1400, "height": 2000})  # all cells and the dashboard at once
    for source in SHOWN:
        page.show(source)
        page.command("notebook:run-cell")
        page.wait_idle()
    page.page.evaluate(COUNT)
    found = {"at rest": told(page, seconds)}
    for state, source in BUSY.items():
        page.show(source.format(seconds=seconds))
        page.page.evaluate("() => void window.jupyterapp.commands.execute('notebook:run-cell')")
        page.page.wait_for_timeout(500)
        found[state] = told(page, seconds - 2)
        page.wait_idle()
    return {"hz": HZ, "seconds": seconds, **found, "console_errors": list(page.errors)}


def told(page: LabPage, seconds: float) -> dict[str, float]:
    """Of the next seconds: updates a second, the longest pause between two, and their lag in milliseconds."""
    page.page.evaluate("() => { window.frames_.length = 0; }")
    page.page.wait_for_timeout(1000 * seconds)
    frames: list[tuple[float, float]] = page.page.evaluate("() => window.frames_")
    came = [arrived for arrived, _ in frames]
    lags = sorted(1000 * (arrived - made) for arrived, made in frames)
    return {
        "updates_per_s": round((len(came) - 1) / (came[-1] - came[0]), 1),
        "longest_pause_ms": round(1000 * max(after - before for before, after in pairwise(came))),
        "lag_ms_median": round(statistics.median(lags), 1),
        "lag_ms_longest": round(lags[-1], 1),
    }


if __name__ == "__main__":
    main()
