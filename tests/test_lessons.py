"""The lessons: executed through the real kernel and the real engine, saved with their outputs, and right in what they claim."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

from tests.homes import own_home

FOLDER = Path(__file__).parents[1] / "notebooks" / "lessons"
LESSONS = sorted(FOLDER.glob("*.ipynb"))
SPECULATION = FOLDER / "speculation.ipynb"


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def said(path, source):
    """All text that the cell whose source holds `source` has put out."""
    (cell,) = [cell for cell in code_cells(path) if source in cell.source]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)


def table_of(path, source):
    """Rows of the HTML table that a cell has put out, its head first."""
    (cell,) = [cell for cell in code_cells(path) if source in cell.source]
    (page,) = [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]
    rows = re.findall(r"<tr.*?</tr>", page, re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_it_is_saved_as_it_was_run(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata["kernelspec"]["name"] == "power_lab"
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(output.output_type != "error" for cell in cells for output in cell.outputs)
    assert path.stat().st_size < 600_000, "a notebook that people read should stay small"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_figure_stands_without_script_network_or_kernel(path):
    found = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.append((tag, dict(attrs)))

    for cell in code_cells(path):
        for output in cell.outputs:
            data = output.get("data", {})
            assert "application/vnd.jupyter.widget-view+json" not in data
            if "text/html" in data:
                assert data["text/plain"].strip(), "each figure has a text form"
                Reader().feed(data["text/html"])
    assert found
    assert not [tag for tag, attrs in found if tag in ("script", "link", "iframe", "img", "svg") or "src" in attrs]
    assert not [attrs for _, attrs in found if any(name.startswith("on") for name in attrs)]


@pytest.fixture(scope="module")
def executed(tmp_path_factory, smollm2_path):
    """The lesson on speculation, run from top to bottom by `power-lab run` with an engine host of its own."""
    output = tmp_path_factory.mktemp("out") / "speculation.ipynb"
    line = [sys.executable, "-m", "power_lab", "run", str(SPECULATION), "--output", str(output)]
    with own_home(tmp_path_factory.mktemp("home")) as home:
        environment = {**os.environ, "POWER_LAB_HOME": str(home)}
        done = subprocess.run(
            [*line, "--timeout", "400", "--json"], env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), output


@pytest.mark.timeout(900)
def test_every_cell_runs(executed):
    result, _ = executed
    assert result["ok"]
    assert result["executed"] == result["cells"] == len(code_cells(SPECULATION))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["saved", "executed"])
def test_what_it_claims_is_in_its_outputs(which, request):
    path = SPECULATION if which == "saved" else request.getfixturevalue("executed")[1]
    assert re.search(r"(\d+) passes without, (\d+) with, the same", said(path, "assert plain.tokens == lucky.tokens"))
    exact, fast, ordinary = table_of(path, "compare(name, scope)")[1:]
    assert exact[0] == "exact"
    assert exact[2] == "0", "no logit moves"
    assert re.fullmatch(r"(\d+) of \1", exact[1]), "every bit of every row"
    assert re.fullmatch(r"(\d+) of \1", exact[3]), "every output"
    for arithmetic in (fast, ordinary):
        kept, of = arithmetic[1].split(" of ")
        assert int(kept) < int(of), "a library's bits depend on the number of rows"
        assert float(arithmetic[2]) > 0
    undone = said(path, "scope.interrupt_next()")
    assert "nothing has moved" in undone
    assert "without speculation and without interrupt" in undone
    foreseen = re.findall(r"(\d+) rounds foreseen, (\d+) made", said(path, "rounds foreseen"))
    assert len(foreseen) == 7
    assert all(a == b for a, b in foreseen)
    assert "the target says" in said(path, "scope.next_draw(tokens)")


@pytest.mark.timeout(900)
def test_exercises_are_left_to_the_reader(executed):
    for path in (SPECULATION, executed[1]):
        checked = [
            said(path, cell.source) for cell in code_cells(path) if re.search(r"^check\(", cell.source, re.MULTILINE)
        ]
        assert len(checked) == 3
        assert all("Not answered yet" in words for words in checked)
