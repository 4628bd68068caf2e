"""The JupyterLab extension on a real page. The server's words are played to it where a state is hard to bring about."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from power_lab.widgets.palette import BLOCKS, TOKENS
from tests.browser.conftest import PICTURES
from tests.browser.lab import THEMES, visit
from tests.hosting import eventually

ROOT = Path(__file__).parents[2]
PANEL = "#power-lab-panel"
STATUS = ".jp-PowerLab-statusButton"
LIVE = re.compile(r"/power-lab/api/live")


def engine(**changes):
    return {
        "engine": "key-1",
        "model": "smollm2",
        "device": "cpu",
        "mode": "exact",
        "state": "ready",
        "stage": "",
        "clients": ["tour.ipynb"],
        "running": 0,
        "waiting": 0,
        "rows": 0,
        "steps": 100,
        "requests": 3,
        "tokens": 900,
        "prompt_tokens": 400,
        "cached_tokens": 128,
        "drafted": 400,
        "accepted": 290,
        "passes": 500,
        "tokens_per_s": 0.0,
        "prompt_tokens_per_s": 0.0,
        "acceptance": None,
        "tokens_per_pass": None,
        "hit_rate": None,
        "free_blocks": 96,
        "cached_blocks": 24,
        "used_blocks": 8,
        "weights_bytes": 92 << 20,
        "pool_bytes": 180 << 20,
        "graph_bytes": 1 << 20,
        "workspace_bytes": 21 << 20,
        "captures": 4,
        "replays": 93,
        "eager": 3,
        "drafter": "ngram",
        "last_step_s": 3.0,
        "ends_in_s": None,
        "runs": [],
        **changes,
    }


def run(number, client, tokens):
    return {
        "run": number,
        "client": client,
        "tokens": tokens,
        "prompt_tokens": 20,
        "drafted": 0,
        "accepted": 0,
        "age_s": tokens / 40,
    }


def busy(second, **changes):
    """An engine at work, `second` seconds after it began to."""
    tokens = int(84 * second)
    return engine(
        running=2,
        waiting=1,
        rows=9,
        steps=100 + 40 * int(second),
        replays=93 + 40 * int(second),
        tokens=900 + tokens,
        drafted=400 + tokens,
        accepted=290 + int(0.7 * tokens),
        passes=500 + tokens // 2,
        used_blocks=30,
        free_blocks=74,
        clients=["tour.ipynb", "a notebook with a rather long name, chapter 12.ipynb"],
        runs=[run(1, "tour.ipynb", tokens), run(2, "a notebook with a rather long name, chapter 12.ipynb", 40)],
        **changes,
    )


GPU = {
    "name": "NVIDIA H200",
    "memory_used": 41 << 30,
    "memory_total": 141 << 30,
    "utilisation": 0.83,
    "temperature_c": 54.0,
    "power_w": 412.0,
}
CPU = dict.fromkeys(GPU, None) | {"name": "cpu"}


class Played:
    """The server's side of the websocket, played: `say` whatever is to be seen; `heard` is what the page asked for."""

    def __init__(self, page):
        self.heard = []
        self.socket = None
        page.route_web_socket(LIVE, self._open)

    def _open(self, socket):
        self.socket = socket
        socket.on_message(lambda text: self.heard.append(json.loads(text)))
        socket.on_close(lambda code, reason: self._close(socket))

    def _close(self, socket):
        if self.socket is socket:
            self.socket = None

    def say(self, kind="vitals", **message):
        if self.socket is not None:
            self.socket.send(json.dumps({"kind": kind, **message}))

    def vitals(self, *engines, at=1000.0, device=CPU, ends_in_s=None):
        facts = {"seq": 1, "pid": 4711, "package": "0.1.0", "revision": "abcd", "uptime_s": 700.0, "resident": 1}
        self.say(at=at, clients=[], ends_in_s=ends_in_s, engines=engines, device=device, **facts)


@pytest.fixture(scope="module")
def stage(lab_server, browser):
    """One page for all tests, and what is played to it."""
    with visit(browser, lab_server, PICTURES) as page:
        played = Played(page.page)
        page.start_lab()
        yield page, played


@pytest.fixture
def lab_page(stage):
    yield stage[0]
    assert stage[0].errors == []


@pytest.fixture
def played(stage, lab_page):
    """Connected, the panel open, no engine; nothing heard yet."""
    played, panel = stage[1], lab_page.page.locator(PANEL)
    lab_page.command("power-lab:open-panel")
    lab_page.page.evaluate("() => window.dispatchEvent(new Event('online'))")  # a lost connection is made again at once

    def empty():
        played.vitals(ends_in_s=1.0)  # a host that says so goes without being missed
        played.say("nohost", at=1.0)
        return panel.get_by_text("No engine is running").is_visible()

    eventually(empty)
    played.heard.clear()
    return played


def test_every_state_is_drawn_and_accessible(lab_page, played):
    panel, status = lab_page.page.locator(PANEL), lab_page.page.locator(STATUS)

    def seen(name, text):
        panel.get_by_text(text).first.wait_for()
        assert lab_page.accessibility(PANEL) == []
        panel.screenshot(path=str(lab_page.pictures / f"panel-{name}.png"))

    seen("empty", "No engine is running")
    assert status.inner_text() == "no engine"
    played.vitals(engine(state="loading", stage="compiling kernels, 4 of 9"))
    seen("loading", "compiling kernels, 4 of 9")
    for tick in range(160):
        played.vitals(
            busy(tick / 2),
            engine(engine="key-2", model="a/very-long-model-name-of-some-hub-Q4_K_M.gguf"),
            at=1000 + tick / 2,
            device=GPU,
        )
    seen("running", "tokens/s")
    assert panel.locator(".jp-PowerLab-big").first.inner_text() == "84"
    assert "84 tok/s" in status.inner_text()
    assert panel.locator("dt", has_text="graph hits").count() == 2, "steps of CPUs are recorded and replayed, too"
    assert len(panel.locator(".jp-PowerLab-sparkLine").first.get_attribute("d")) > 500
    played.say("error", message="The engine host is of another version.", remedy="Run lab.replace_host().")
    seen("error", "The engine host is of another version.")
    played.vitals(busy(90), at=1090.0)
    panel.locator(".jp-PowerLab-state.jp-mod-running").wait_for()
    silent_since = time.monotonic()
    seen("disconnected", "Disconnected")
    assert (
        time.monotonic() - silent_since < 30
    )  # two seconds by its clock (labextension/test); a busy machine is allowed more


def test_the_panel_looks_well_in_both_themes(lab_page, played):
    for tick in range(240):
        wave = 10 * ((tick // 20) % 3)
        played.vitals(busy(tick / 2 + wave / 30), at=1000 + tick / 2, device=GPU)
    lab_page.page.locator(".jp-PowerLab-big").wait_for()
    for theme in THEMES:
        lab_page.theme(theme)
        played.vitals(busy(140), at=1120.0, device=GPU)
        lab_page.page.locator(".jp-PowerLab-state.jp-mod-running").wait_for()
        assert lab_page.accessibility(PANEL) == []
        lab_page.page.screenshot(path=str(lab_page.pictures / f"labextension-{theme.lower()}.png"))


def test_an_engine_is_stopped_after_one_confirmation_that_says_whom_it_hits(lab_page, played):
    page = lab_page.page
    played.vitals(busy(5))
    page.get_by_role("button", name="Stop smollm2").click()
    dialog = page.locator(".jp-Dialog")
    assert "2 runs" in dialog.inner_text() or "3 runs" in dialog.inner_text()
    assert "tour.ipynb" in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel").click()
    assert [message for message in played.heard if message["kind"] != "rate"] == []
    played.vitals(busy(6), at=1001.0)
    page.get_by_role("button", name="Unload smollm2").click()
    played.vitals(busy(7), at=1002.0)
    dialog.get_by_role("button", name="Unload").click()
    dialog.wait_for(state="detached")
    asked = [message for message in played.heard if message["kind"] != "rate"]
    assert [(message["kind"], message["engine"]) for message in asked] == [("unload", "key-1")]
    played.say("failed", id=asked[0]["id"], message="It is being loaded.", remedy="Wait for it.")
    page.get_by_text("It is being loaded. Wait for it.").first.wait_for(timeout=5000)


def test_axe_finds_nothing_in_dialogs(lab_page, played):
    page, dialog = lab_page.page, lab_page.page.locator(".jp-Dialog")
    for theme in THEMES:
        lab_page.theme(theme)
        for second, verb in enumerate(("Stop", "Restart", "Unload")):
            played.vitals(busy(5 + second), at=1000.0 + second)
            page.get_by_role("button", name=f"{verb} smollm2").click()
            dialog.get_by_text(f"{verb} smollm2?").wait_for()
            assert lab_page.accessibility(".jp-Dialog-content") == [], f"{verb} in the {theme.lower()} theme"
            lab_page.snap(f"dialog-{verb.lower()}-{theme.lower()}")
            dialog.get_by_role("button", name="Cancel").click()
            dialog.wait_for(state="detached")


def test_nothing_is_asked_for_while_nothing_shows(lab_page, played):
    def asked(hz):
        lab_page.page.wait_for_function("() => true")
        return played.heard[-1:] == [{"kind": "rate", "hz": hz}]

    lab_page.page.evaluate("() => window.jupyterapp.shell.collapseRight()")
    eventually(lambda: asked(2))  # the status bar is still there
    lab_page.command("statusbar:toggle")
    eventually(lambda: asked(0))
    lab_page.command("statusbar:toggle")
    eventually(lambda: asked(2))
    for hidden, hz in ((True, 0), (False, 2)):
        lab_page.page.evaluate(
            "hidden => { Object.defineProperty(document, 'visibilityState',"
            " {configurable: true, value: hidden ? 'hidden' : 'visible'});"
            " document.dispatchEvent(new Event('visibilitychange')); }",
            hidden,
        )
        eventually(lambda hz=hz: asked(hz))


def test_the_launcher_has_a_section_of_ours_and_the_layout_puts_the_notebook_beside_the_panel(lab_page, played):
    page = lab_page.page
    lab_page.command("launcher:create")
    section = page.locator(".jp-Launcher-section", has=page.locator(".jp-Launcher-sectionTitle", has_text="Power Lab"))
    section = section.locator("visible=true")
    section.wait_for()
    assert section.locator(".jp-LauncherCard").count() == 3
    drawn = section.locator(".jp-LauncherCard-icon").evaluate_all("icons => icons.map(icon => icon.innerHTML)")
    assert len(set(drawn)) == 3, "cards that look alike"
    section.screenshot(path=str(lab_page.pictures / "launcher-section.png"))
    section.locator(".jp-LauncherCard", has_text="Notebook").click()
    page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.name === 'power_lab'"
    )
    page.locator(".jp-Notebook:visible .jp-CodeCell", has_text="lab.load").wait_for()
    first = ["".join(cell["source"]) for cell in lab_page.state()["cells"]]
    assert first[0].startswith('lab.load("smollm2")')
    assert first[-1] == "", "a place for one's own words"
    lab_page.command("power-lab:layout")
    notebook, panel = page.locator(".jp-NotebookPanel:visible").bounding_box(), page.locator(PANEL).bounding_box()
    assert notebook["x"] + notebook["width"] <= panel["x"] + 1


def test_a_page_that_nobody_touches_asks_for_nothing_until_somebody_does(lab_server, browser):
    """A setting, here two hundredths of a minute."""
    settings = lab_server.private / "settings" / "power-lab" / "client.jupyterlab-settings"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text('{"pauseAfter": 0.02}')
    try:
        with visit(browser, lab_server, PICTURES) as lab_page:
            played = Played(lab_page.page)
            lab_page.start_lab()

            def rates():
                lab_page.page.wait_for_function("() => true")  # lets words of the page arrive
                return [message["hz"] for message in played.heard if message["kind"] == "rate"]

            eventually(lambda: rates()[-1:] == [0])
            before = len(rates())
            lab_page.page.mouse.move(300, 300)
            eventually(lambda: 2 in rates()[before:])
            eventually(lambda: rates()[-1] == 0)
    finally:
        settings.unlink()


def test_colours_are_those_of_the_palette():
    css = (ROOT / "labextension" / "style" / "base.css").read_text()
    found = dict(re.findall(r"--jp-PowerLab-(\w+): (#\w+);", css.partition("[data-jp-theme-light")[0]))
    dark = dict(re.findall(r"--jp-PowerLab-(\w+): (#\w+);", css.partition("[data-jp-theme-light")[2]))
    marks = {"blue": BLOCKS["used"], "purple": BLOCKS["cached"], "grey": BLOCKS["free"]}
    marks |= {"green": TOKENS["accepted"], "orange": TOKENS["rejected"], "yellow": TOKENS["prompt"]}
    assert found == {name: mark.light for name, mark in marks.items()}
    assert dark == {name: mark.dark for name, mark in marks.items()}
    assert "#" not in re.sub(r"--jp-PowerLab-\w+: #\w+;", "", css), "a colour that no theme can change"
