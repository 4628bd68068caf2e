"""Engines as people meet them: launcher, notebook, panel, status bar, `lab.watch()`, with a real engine host and a real model."""

from __future__ import annotations

import contextlib
import os
import re
import signal

from power_lab.engine.config import HostSettings, Paths
from power_lab.engine.host.client import HostClient
from power_lab.jupyter._routing import SUBSHELL_CAP
from tests.browser.held import held
from tests.browser.lab import OUTPUT, THEMES, write_notebook
from tests.hosting import eventually

PANEL = "#power-lab-panel"
STATUS = ".jp-PowerLab-statusButton"
STATE = f"{PANEL} .jp-PowerLab-state"
SPEED = f"{PANEL} .jp-PowerLab-big"
RELOADS = 4
STORY = 'lab.generate("Tell me a very long story.", max_tokens=6000, ignore_eos=True, stream=False)'


def test_a_first_session_from_the_launcher(no_engine, lab_page):
    page, panel, status = lab_page.page, lab_page.page.locator(PANEL), lab_page.page.locator(STATUS)

    # A notebook from our card of the launcher, the panel from the status bar.
    lab_page.start_lab()
    section = page.locator(".jp-Launcher-section", has=page.locator(".jp-Launcher-sectionTitle", has_text="Power Lab"))
    section.locator(".jp-LauncherCard", has_text="Notebook").click()
    lab_page.wait_idle()
    assert lab_page.state()["kernel"] == "power_lab"
    status.filter(has_text="no engine").click()
    panel.get_by_text("No engine is running").wait_for()

    # A first model and a first text, typed.
    page.locator(".jp-Notebook .jp-Cell .cm-content").first.click()
    page.keyboard.type('lab.load("smollm2")')
    page.keyboard.press("Shift+Enter")
    panel.get_by_role("heading", name="smollm2").wait_for(timeout=60_000)
    page.locator(STATE, has_text="idle").wait_for(timeout=60_000)
    status.filter(has_text="smollm2 idle").wait_for()
    lab_page.wait_idle()
    lab_page.run("lab.watch()")
    lab_page.show("lab.watch")
    watch = page.locator(".jp-OutputArea .power-lab")
    watch.locator(".pl-status", has_text="Live").wait_for()

    # While it generates, status bar, panel and dashboard move.
    lab_page.command("notebook:move-cursor-down")
    lab_page.begin(STORY)
    page.locator(STATE, has_text="running").wait_for(timeout=60_000)
    status.filter(has_text=re.compile(r"[1-9][\d.,]* tok/s")).wait_for()
    moves = "where => Number(document.querySelector(where)?.textContent.replace(',', '')) > 1"
    page.wait_for_function(moves, arg=SPEED)
    page.wait_for_function(moves, arg=".pl-tile[data-field=tokens_per_s] b")
    assert panel.get_by_role("list", name="Runs in flight").locator("li").count() == 1
    assert lab_page.accessibility(PANEL) == []
    lab_page.snap("session-running")

    # Stop: one confirmation; the cell says that its run was cancelled, and the model stays.
    act(lab_page, "Stop")
    lab_page.wait_idle()
    assert "RequestCancelled" in str(lab_page.state()["cells"])
    page.locator(STATE, has_text="idle").wait_for()

    # Restart: the engine comes back by itself, and the notebook, told so once, goes on with it.
    act(lab_page, "Restart")
    panel.get_by_text("Used by no notebook").wait_for(timeout=60_000)
    page.locator(STATE, has_text="idle").wait_for(timeout=60_000)
    told = lab_page.run('lab.generate("Say hello.", max_tokens=4, stream=False)')
    assert told[0]["ename"] == "EngineClosed"
    assert lab_page.run('lab.generate("Say hello.", max_tokens=5, stream=False)')[0]["output_type"] == "execute_result"
    assert panel.locator("article").count() == 1

    # Unload: its memory is free, the next call loads it again.
    act(lab_page, "Unload")
    panel.get_by_text("No engine is running").wait_for()
    status.filter(has_text="no engine").wait_for()


def act(lab_page, verb):
    """One of an engine's buttons and its confirmation."""
    lab_page.page.get_by_role("button", name=f"{verb} smollm2").click()
    dialog = lab_page.page.locator(".jp-Dialog")
    dialog.get_by_text(f"{verb} smollm2?").wait_for()
    dialog.get_by_role("button", name=verb).click()
    dialog.wait_for(state="detached")


def host_of(server) -> int:
    """The process of the server's engine host."""
    home = server.home
    client = HostClient.find(Paths(home / "cache", home / "run", home / "state"), HostSettings.default())
    assert client is not None
    with contextlib.closing(client):
        return client.pid


def test_two_notebooks_share_one_engine_and_a_killed_host_is_told_at_once_and_comes_back(no_engine, lab_page):
    page, panel, status = lab_page.page, lab_page.page.locator(PANEL), lab_page.page.locator(STATUS)
    for name in ("first.ipynb", "second.ipynb"):
        write_notebook(lab_page.server.root / name, ['lab.load("smollm2")', "lab.watch()"])
    lab_page.open("first.ipynb")
    lab_page.command("power-lab:open-panel")
    lab_page.run_all()
    lab_page.command("docmanager:open", path="second.ipynb")
    page.wait_for_function("() => window.jupyterapp.shell.currentWidget?.context?.path === 'second.ipynb'")
    lab_page.wait_idle()
    lab_page.run_all()

    # One engine, two notebooks, two runs at once.
    users = panel.locator(".jp-PowerLab-users")
    users.filter(has_text="first.ipynb").filter(has_text="second.ipynb").wait_for()
    assert panel.locator("article").count() == 1
    lab_page.command("notebook:insert-cell-below")
    lab_page.begin(STORY)
    lab_page.command("docmanager:open", path="first.ipynb")
    lab_page.command("notebook:insert-cell-below")
    lab_page.begin(STORY)
    runs = panel.get_by_role("list", name="Runs in flight").locator("li")
    page.wait_for_function(
        "where => document.querySelectorAll(where).length === 2", arg=f"{PANEL} .jp-PowerLab-runs > li"
    )
    for name in ("first.ipynb", "second.ipynb"):  # in the sample of its first moment a run may have a number alone
        runs.locator(".jp-PowerLab-runName", has_text=name).wait_for()
    page.get_by_role("button", name="Unload smollm2").click()
    dialog = page.locator(".jp-Dialog")
    dialog.get_by_text("In use by first.ipynb, second.ipynb.").wait_for()
    assert "2 runs end as cancelled." in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel").click()

    # Killed: the panel, the status bar and the dashboard say so.
    lab_page.show("lab.watch")
    page.locator(f"{OUTPUT} .pl-status", has_text="Live").wait_for()
    os.kill(host_of(lab_page.server), signal.SIGKILL)
    panel.get_by_text("Disconnected").wait_for(timeout=10_000)
    status.filter(has_text="disconnected").wait_for(timeout=10_000)
    page.locator(f"{OUTPUT} .pl-status", has_text="Disconnected").wait_for(timeout=10_000)
    for theme in THEMES:
        lab_page.theme(theme)
        assert lab_page.accessibility(PANEL) == []
        assert lab_page.accessibility(OUTPUT) == []
        lab_page.snap(f"host-killed-{theme.lower()}")

    # The next call starts a new host, and all three are live again without a hand on them.
    lab_page.wait_idle()
    lab_page.command("notebook:insert-cell-below")
    lab_page.run('lab.load("smollm2")')
    page.locator(STATE, has_text="idle").wait_for(timeout=60_000)
    status.filter(has_text="smollm2 idle").wait_for()
    lab_page.show("lab.watch")
    page.locator(f"{OUTPUT} .pl-status", has_text="Live").wait_for(timeout=15_000)


def test_a_page_is_live_again_while_a_cell_runs_on(lab_page):
    """Reloaded in the middle of a long cell, which leaves nothing behind; bench/reloads.py says how long it takes."""
    page, root = lab_page.page, lab_page.server.root
    shown = ['lab.load("smollm2")', "lab.watch()", "lab.inspect.blocks()"]
    long = "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(300)\npathlib.Path('ended').touch()"
    write_notebook(root / "reloaded.ipynb", [*shown, long])
    lab_page.open("reloaded.ipynb")
    lab_page.keep_panel_open()
    for source in shown:
        lab_page.show(source)
        lab_page.command("notebook:run-cell")
    lab_page.wait_idle()
    lab_page.command("docmanager:save")
    lab_page.show(long)
    page.evaluate("() => void window.jupyterapp.commands.execute('notebook:run-cell')")
    eventually((root / "begun").exists)
    page.goto(lab_page.server.page("reloaded.ipynb").removesuffix("&reset"))
    page.locator(STATE, has_text="idle").wait_for()
    lab_page.show("lab.watch")
    page.locator(f"{OUTPUT} .pl-status", has_text="Live").wait_for()
    lab_page.show("lab.inspect.blocks")
    page.locator(OUTPUT).get_by_role("button", name="Refresh").click()
    page.locator(f"{OUTPUT} .pl-status", has_text=re.compile(r"Snapshot from \d")).wait_for()
    assert not (root / "ended").exists(), "the cell had to end first"

    # Each page asks for subshells that it never gives back. Here they are as many as there may be from the start, and each has
    # answered once: its thread opens a file then, whichever reload has it answer first.
    page.evaluate(
        "async most => { const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;"
        " for (let at = 0; at < most; at++) await kernel.requestCreateSubshell({}).done;"
        " const there = (await kernel.requestListSubshell({}).done).content.subshell_id, own = kernel.subshellId;"
        " for (const id of there) { kernel.subshellId = id; await kernel.requestCommInfo({}); }"
        " kernel.subshellId = own; }",
        SUBSHELL_CAP,
    )
    before = held(lab_page)
    for _ in range(RELOADS):
        page.reload()
        page.locator(STATE, has_text="idle").wait_for()
        page.locator(".pl-watching .pl-status", has_text="Live").wait_for()

    def left():
        """What a process has one more of for each reload."""
        after = held(lab_page)
        grown = {f"{what} of the {one}": after[one][what] - before[one][what] for one in before for what in before[one]}
        return {name: more for name, more in grown.items() if more >= RELOADS}

    with contextlib.suppress(AssertionError):
        eventually(lambda: not left())  # a page that has gone is noticed after a moment
    assert left() == {}
    assert not (root / "ended").exists()
    lab_page.command("notebook:interrupt-kernel")
