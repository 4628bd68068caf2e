"""The extension in another language: a small language pack, as JupyterLab installs them, reaches menus, settings, panel and dialogs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo

from tests.browser import lab
from tests.browser.conftest import PICTURES
from tests.browser.lab import visit
from tests.browser.test_labextension import PANEL, Played, busy

LOCALE, DOMAIN = "de_DE", "power_lab"
PACK = f"jupyterlab_language_pack_{LOCALE}"
WORDS = {
    ("menu", "Power Lab"): "Kraftlabor",
    ("schema", "Power Lab Status Bar"): "Statusleiste des Kraftlabors",
    ("settings", "Show in the status bar"): "In der Statusleiste zeigen",
    ("schema", "Power Lab"): "Kraftlabor",
    ("settings", "Updates a second"): "Erneuerungen je Sekunde",
    ("", "Stop an Engine…"): "Eine Maschine anhalten …",
    ("", "No engine is running"): "Keine Maschine läuft",
    ("", "Stop %1?"): "%1 anhalten?",
    ("", "Stop %1"): "%1 anhalten",
    ("", "Cancel"): "Abbrechen",
}
"""(context, English) -> German, its verbs behind what they act on."""


def write_pack(folder: Path) -> None:
    """A language pack: an entry point, JSON for the page, and a compiled catalogue for the schemas, which the server translates."""
    messages = folder / PACK / "locale" / LOCALE / "LC_MESSAGES"
    messages.mkdir(parents=True)
    (folder / PACK / "__init__.py").touch()
    (described := folder / f"{PACK}-1.0.dist-info").mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACK}\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[jupyterlab.languagepack]\n{LOCALE} = {PACK}\n")
    catalog = Catalog(locale=LOCALE, domain=DOMAIN)
    told = {
        "": {"domain": DOMAIN, "language": LOCALE.replace("_", "-"), "plural_forms": "nplurals=2; plural=(n != 1);"}
    }
    for (context, english), german in WORDS.items():
        catalog.add(english, german, context=context or None)
        told[f"{context}\x04{english}" if context else english] = [german]
    (messages / f"{DOMAIN}.json").write_text(json.dumps(told))
    with (messages / f"{DOMAIN}.mo").open("wb") as sink:
        write_mo(sink, catalog)


@pytest.fixture
def server(tmp_path, monkeypatch):
    write_pack(tmp_path / "packs")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packs"), os.environ.get("PYTHONPATH", "")]))
    chosen = tmp_path / "private" / "settings" / "@jupyterlab" / "translation-extension" / "plugin.jupyterlab-settings"
    chosen.parent.mkdir(parents=True)
    chosen.write_text(json.dumps({"locale": LOCALE}))
    (tmp_path / "root").mkdir()
    with lab.serve(tmp_path / "root", tmp_path / "private", tmp_path / "home") as server:
        yield server


def test_menu_settings_panel_and_dialog_speak_the_chosen_language(server, browser):
    with visit(browser, server, PICTURES) as lab_page:
        page, played = lab_page.page, Played(lab_page.page)
        lab_page.start_lab()
        lab_page.command("power-lab:open-panel")
        page.locator(".lm-MenuBar-itemLabel", has_text="Kraftlabor").click()
        page.locator(".lm-Menu-itemLabel", has_text="Eine Maschine anhalten …").wait_for()
        page.keyboard.press("Escape")
        played.say("nohost", at=1.0)
        page.locator(PANEL).get_by_text("Keine Maschine läuft").wait_for()
        played.vitals(busy(5))
        page.get_by_role("button", name="smollm2 anhalten").click()
        dialog = page.locator(".jp-Dialog")
        dialog.get_by_text("smollm2 anhalten?").wait_for()
        dialog.get_by_role("button", name="Abbrechen").click()
        schema = server.ask("GET", "lab/api/settings/power-lab:status")["schema"]
        assert schema["title"] == "Statusleiste des Kraftlabors"


def test_the_settings_editor_speaks_the_chosen_language(server, browser):
    with visit(browser, server, PICTURES) as lab_page:
        page = lab_page.page
        lab_page.start_lab()
        for title, setting in (
            ("Kraftlabor", "Erneuerungen je Sekunde"),
            ("Statusleiste des Kraftlabors", "In der Statusleiste zeigen"),
        ):
            lab_page.command("settingeditor:open", query=title)
            page.locator(".jp-PluginList-entry", has_text=title).first.click()
            page.locator(".jp-SettingsForm").get_by_text(setting, exact=True).wait_for()
            lab_page.snap(f"settings-{LOCALE}-{title.split()[0].lower()}")
        assert page.locator(".jp-PluginList-entry", has_text="Power Lab").count() == 0
