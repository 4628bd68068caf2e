"""What kernel, server and engine host of a page hold: to find what reloads leave behind."""

from __future__ import annotations

import psutil

from tests.browser.lab import LabPage

KINDS = {"host": "power_lab.engine.host", "server": "jupyterlab"}
"""Process -> what its command line has; a kernel's has its id."""


def held(page: LabPage) -> dict[str, dict[str, int]]:
    """Threads and open files of server, engine host and the notebook's kernel; comms of the kernel, which answers while its cell runs."""
    kernel, comms = page.page.evaluate(
        "async () => { const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;"
        " return [kernel.id, Object.keys((await kernel.requestCommInfo({})).content.comms).length]; }"
    )
    found: dict[str, dict[str, int]] = {}
    for process in psutil.process_iter():
        try:
            line, around = process.cmdline(), process.environ()
            if around.get("POWER_LAB_HOME") != str(page.server.home):
                continue
            kind = next((kind for kind, word in {**KINDS, "kernel": kernel}.items() if any(word in part for part in line)), "")
            if kind:
                found[kind] = {"threads": process.num_threads(), "files": process.num_fds()}
        except psutil.Error:
            continue
    found["kernel"]["comms"] = comms
    return found
