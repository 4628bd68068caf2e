"""The tour: executed through the real kernel and the real engine, and saved with its outputs."""

from __future__ import annotations

import nbformat
import pytest

from tests.notebooks import ROOT, code_cells, execute

TOUR = ROOT / "tour.ipynb"


def test_it_is_saved_as_it_was_run():
    notebook = nbformat.read(TOUR, as_version=4)
    assert notebook.metadata["kernelspec"]["name"] == "power_lab"
    cells = code_cells(TOUR)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(output.output_type != "error" for cell in cells for output in cell.outputs)
    assert TOUR.stat().st_size <= 300_000, "a notebook that people read should stay small"
    assert "_esm" not in TOUR.read_text(encoding="utf-8"), "scripts of widgets, which no page needs without a kernel"


@pytest.fixture(scope="module")
def executed(tmp_path_factory, notebook_home):
    return execute(TOUR, tmp_path_factory.mktemp("out"), notebook_home)


@pytest.mark.timeout(600)
def test_every_cell_runs(executed):
    result, _ = executed
    assert result["ok"]
    assert result["executed"] == result["cells"] == len(code_cells(TOUR))


@pytest.mark.timeout(600)
def test_the_texts_are_those_that_were_saved(executed):
    """Greedy and seeded texts repeat where the arithmetic is the same; elsewhere they may differ, and the digests say so."""
    _, output = executed
    saved, fresh = texts(TOUR), texts(output)
    assert len(saved) == len(fresh) > 5
    if digests(TOUR) == digests(output):
        assert saved == fresh


def receipts(path):
    """The receipts in the outputs, but for runs that were stopped on the way."""
    mime = "application/vnd.power-lab.evidence+json"
    found = [
        output.data[mime] for cell in code_cells(path) for output in cell.outputs if mime in output.get("data", {})
    ]
    return [receipt for receipt in found if receipt["claim"]["output"]["finish"] != "cancelled"]


def texts(path):
    return [receipt["claim"]["output"]["sha256"] for receipt in receipts(path)]


def digests(path):
    return {receipt["claim"]["engine"]["digest"] for receipt in receipts(path)}
