"""The list of models as people see it, and what a lab does with its names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from power_lab import cli, models
from power_lab.engine.config import ModelFolders
from power_lab.errors import LicenseNotAccepted
from power_lab.lab import Lab
from power_lab.model_table import Models
from power_lab.models.entry import Listing, ModelEntry
from power_lab.models.fit import Fit
from tests.hosting import Home
from tests.hosting import home as make_home
from tests.models.trees import gguf, repository

GIB = 1 << 30


def entry(name: str, **changes: object) -> ModelEntry:
    known = {
        "path": Path("/models") / f"{name}.gguf",
        "present": True,
        "source": "power-lab",
        "size": 5 * GIB,
        "status": "ready",
        "architecture": "qwen3",
        "parameters": 8_200_000_000,
        "quantisation": "Q4_K+",
        "bytes_by_type": {"Q4_K": 80, "Q6_K": 20},
        "context": 131_072,
        "license": "apache-2.0",
        "fit": Fit(verdict="fits", weights=5 * GIB, pool=GIB, free=20 * GIB),
    }
    return ModelEntry(name=name, **{**known, **changes})  # type: ignore[arg-type]


LISTING = Listing(
    (
        entry("smollm2", present=False, source="package x==1", status="not here", fit=None),
        entry("own-model-of-8B"),
        entry("tight", fit=Fit(verdict="tight", weights=18 * GIB, pool=GIB, free=20 * GIB)),
        entry("big", fit=Fit(verdict="too large", weights=40 * GIB, pool=GIB, free=20 * GIB)),
        entry("drafting", draft_layers=1, draft_parameters=230_000_000),
        entry("<b>&\x1b[31m", source="folder /x", status="damaged: <script>alert(1)</script>\n", fit=None),
    ),
    ("/y: no such folder",),
)


class Cells(HTMLParser):
    """The rows of a table as text, and every tag that was met."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows:
            self.rows[-1][-1] += data


def test_the_text_says_what_a_row_cannot() -> None:
    text = repr(Models(LISTING))
    lines = text.splitlines()
    assert lines[0].split() == ["name", "size", "params", "type", "family", "context", "fit"]
    assert "own store /models" in lines and "folder /x" in lines and "catalogue" in lines
    assert "      not here yet: power-lab models add smollm2" in lines
    assert "      tight: 18.0 GiB of weights and 1.0 GiB of KV pool, 20.0 GiB free" in lines
    assert "      too large: 40.0 GiB of weights and 1.0 GiB of KV pool, 20.0 GiB free" in lines
    assert "      besides, a layer for drafting (MTP): 230M parameters" in lines
    assert "      damaged: <script>alert(1)</script>\N{REPLACEMENT CHARACTER}" in lines
    assert lines[-2:] == [
        "fit: weights and a KV pool of 8,192 tokens in the 20.0 GiB that are free now.",
        "/y: no such folder",
    ]
    assert "\x1b" not in text
    assert max(map(len, lines)) <= 80


def test_the_html_escapes_names_and_reasons() -> None:
    html = Models(LISTING)._repr_html_()
    cells = Cells()
    cells.feed(html)
    assert cells.tags == {"div", "table", "thead", "tbody", "tr", "th", "td"}
    named = {row[0]: row for row in cells.rows if len(row) > 1}
    assert len({len(row) for row in named.values()}) == 1
    assert named["own-model-of-8B"][1:] == [
        "5.0 GiB",
        "8.2B",
        "Q4_K+",
        "qwen3",
        "131,072",
        "fits",
        "apache-2.0",
        "ready",
    ]
    assert 'title="Q4_K 80 %, Q6_K 20 %"' in html
    assert "<script" not in html and "\x1b" not in html


def test_an_empty_list_is_a_table_too() -> None:
    empty = Models(Listing(()))
    assert len(empty) == 0 and "name" in repr(empty) and "<table>" in empty._repr_html_()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with make_home(tmp_path / "home") as made:
        made.paths = replace(made.paths, others=ModelFolders(tmp_path / "hub", tmp_path / "llama.cpp"))
        yield made


@pytest.fixture
def lab(home: Home) -> Iterator[Lab]:
    made = Lab(paths=home.paths, settings=home.settings)
    yield made
    made.disconnect()


def test_a_lab_lists_and_loads_by_the_listed_name(home: Home, lab: Lab, tmp_path: Path) -> None:
    snapshot = repository(tmp_path / "hub", "org/q-GGUF", {"q.gguf": gguf()})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "given.gguf").write_bytes(gguf(seed=1))
    assert [model.name for model in lab.models() if model.present] == ["q"]
    assert [model.name for model in lab.models(tmp_path / "mine") if model.present] == ["q", "given"]
    lab.load("q")
    status = lab.status()
    assert status is not None
    assert [engine.config.model for engine in status.engines] == [str(snapshot / "q.gguf")], (
        "the host may list other folders"
    )


def test_terms_reach_the_notebook_and_are_accepted_there(home: Home, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        models, "ensure", lambda model, paths, progress, *, accept_license: asked.append((model, accept_license))
    )
    lab.load("gemma3-270m", accept_license=True)
    lab.load("fake", accept_license=True)
    assert asked == [("gemma3-270m", True)]
    monkeypatch.undo()
    with pytest.raises(LicenseNotAccepted, match="Gemma Terms of Use"):
        models.ensure("gemma3-270m", home.paths, False)


def test_a_loaded_model_is_not_removed(
    home: Home, lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POWER_LAB_HOME", str(home.root))
    kept = home.paths.models / "own.gguf"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(gguf())
    lab.load("own")
    assert cli.main(["models", "remove", "own", "--yes", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "EngineInUse"
    assert kept.exists()
    lab.unload()
    assert cli.main(["models", "remove", "own", "--yes"]) == 0
    assert not kept.exists()
