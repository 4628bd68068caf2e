"""The tuner's page: executed through the real kernel and the real engine, and saved with its outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.homes import own_home

PAGE = Path(__file__).parents[1] / "notebooks" / "tuning.ipynb"
REDUCED = "max_tokens = 8\nrepeats = 1\n"


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def pages(path, source):
    """HTML outputs of the cell whose source holds `source`."""
    (cell,) = [cell for cell in code_cells(path) if source in cell.source]
    return [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]


def test_it_is_saved_as_it_was_run():
    notebook = nbformat.read(PAGE, as_version=4)
    assert notebook.metadata["kernelspec"]["name"] == "power_lab"
    assert "widgets" not in notebook.metadata
    cells = code_cells(PAGE)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(output.output_type != "error" for cell in cells for output in cell.outputs)
    assert PAGE.stat().st_size < 400_000, "a notebook that people read should stay small"


@pytest.fixture(scope="module")
def executed(tmp_path_factory, smollm2_path):
    """The page with short outputs, run from top to bottom by `power-lab run` with an engine host of its own."""
    folder = tmp_path_factory.mktemp("out")
    notebook = nbformat.read(PAGE, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source += f"\n{REDUCED}"
    nbformat.write(notebook, folder / "in.ipynb")
    output = folder / "tuning.ipynb"
    line = [sys.executable, "-m", "power_lab", "run", str(folder / "in.ipynb"), "--output", str(output)]
    with own_home(tmp_path_factory.mktemp("home")) as home:
        environment = {**os.environ, "POWER_LAB_HOME": str(home)}
        done = subprocess.run(
            [*line, "--timeout", "300", "--json"], env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), output


@pytest.mark.timeout(600)
def test_every_cell_runs(executed):
    result, _ = executed
    assert result["ok"]
    assert result["executed"] == result["cells"] == len(code_cells(PAGE))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", ["saved", "executed"])
def test_what_it_shows_is_in_its_outputs(which, request):
    path = PAGE if which == "saved" else request.getfixturevalue("executed")[1]
    drafts, memory = pages(path, "drafts = lab.sweep")[-1], pages(path, "memory = lab.sweep")[-1]
    assert "✓ The same outputs at all 10 points" in drafts
    assert "✓ The same outputs at all 8 points" in memory
    assert memory.count('class="pl-reason"') == 4, "the pool that is too small"
    for source in ('heatmap("width", "speculate")', "memory.pareto()", "memory.parallel()"):
        (page,) = pages(path, source)
        assert "data:image/svg+xml" in page
        assert "<script" not in page
