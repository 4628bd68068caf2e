"""The tuner's page: executed through the real kernel and the real engine, and saved with its outputs."""

from __future__ import annotations

import nbformat
import pytest

from tests.notebooks import ROOT, code_cells, execute

PAGE = ROOT / "tuning.ipynb"
SHORT = {
    "max_tokens = 32": "max_tokens = 6",
    "repeats = 2": "repeats = 1",
    "    repeats=repeats": "    warmup=0, repeats=repeats",
    "story = ": "story = 'Mira lives on the ground floor of the tall house by the river. Above her lives Jonas.' * 3\n_ = ",
}
"""Prompts stay longer than the smallest pool, and than a block, which the cache gives back."""


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
def executed(tmp_path_factory, notebook_home):
    return execute(PAGE, tmp_path_factory.mktemp("out"), notebook_home, SHORT)


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
    assert "✓ The same outputs at all 13 points" in drafts
    assert "✓ The same outputs at all 8 points" in memory
    assert memory.count('class="pl-reason"') == 4, "the pool that is too small"
    for source in ('heatmap("width", "speculate")', "memory.pareto()", "memory.parallel()"):
        (page,) = pages(path, source)
        assert "data:image/svg+xml" in page
        assert "<script" not in page
