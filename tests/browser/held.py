"""What kernel, server and engine host of a page hold: to find what reloads leave behind."""

from __future__ import annotations

import psutil

from tests.browser.lab import LabPage

KINDS = {"kernel": "power_lab.jupyter", "host": "power_lab.engine.host", "server": "jupyterlab"}
"""Process -> what its command line has."""


def held(page: LabPage) -> dict[str, dict[str, int]]:
    """Threads and open files of kernel, server and engine host; comms of the kernel, which answers while its cell runs."""
    comms = page.page.evaluate(
        "async () => { const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;"
        " return Object.keys((await kernel.requestCommInfo({})).content.comms).length; }"
    )
    found: dict[str, dict[str, int]] = {}
    for process in psutil.process_iter():
        try:
            line, around = process.cmdline(), process.environ()
            if around.get("POWER_LAB_HOME") != str(page.server.home):
                continue
            kind = next((kind for kind, word in KINDS.items() if any(word in part for part in line)), "")
            if kind:
                found[kind] = {"threads": process.num_threads(), "files": process.num_fds()}
        except psutil.Error:
            continue
    found["kernel"]["comms"] = comms
    return found
