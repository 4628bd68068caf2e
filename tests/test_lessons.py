"""The lessons: executed through the real kernel and the real engine, saved with their outputs, and right in what they claim."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import nbformat
import pytest

from tests.notebooks import ROOT, code_cells, execute

FOLDER = ROOT / "lessons"
LESSONS = sorted(FOLDER.glob("*.ipynb"))
SPECULATION = FOLDER / "speculation.ipynb"
SHORT = {
    "speculation": {
        '"a lighthouse", "a bicycle", "rain", "bread", "a violin", "the moon", "a garden", "a train"': '"rain", "bread", "a train"',
        "max_tokens=24": "max_tokens=8",
        '"max_tokens": 96': '"max_tokens": 40',
        "max_tokens=96": "max_tokens=40",
    },
    "graphs": {"steps=48": "steps=16", "range(12)": "range(8)", "max_tokens=16": "max_tokens=4"},
    "paged-kv": {"max_tokens=24": "max_tokens=6"},
}
"""Less work where a page claims the same of less."""


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
    assert not [tag for tag, _ in found if tag in ("script", "link", "iframe", "svg")]
    assert all(attrs["src"].startswith("data:image/svg+xml,") and attrs["alt"] for _, attrs in found if "src" in attrs)
    assert not [attrs for _, attrs in found if any(name.startswith("on") for name in attrs)]


@pytest.fixture(scope="module")
def run_lesson(tmp_path_factory, notebook_home):
    """Runs a lesson once."""
    folder, done = tmp_path_factory.mktemp("out"), {}

    def run(path):
        if path not in done:
            done[path] = execute(path, folder, notebook_home, SHORT.get(path.stem))
        return done[path]

    return run


@pytest.fixture
def executed(run_lesson):
    return run_lesson(SPECULATION)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_cell_runs(path, run_lesson):
    result, output = run_lesson(path)
    assert result["ok"]
    assert result["executed"] == result["cells"] == len(code_cells(path))
    for one in (path, output):
        checked = [
            said(one, cell.source) for cell in code_cells(one) if re.search(r"^check\(", cell.source, re.MULTILINE)
        ]
        assert len(checked) == 3
        assert all("Not answered yet" in words for words in checked), "exercises are left to the reader"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["saved", "executed"])
def test_paged_kv_claims_what_its_outputs_show(which, run_lesson):
    path = FOLDER / "paged-kv.ipynb"
    path = path if which == "saved" else run_lesson(path)[1]
    rows = table_of(path, "assert same == draws == answers[name]")[1:]
    assert [row[0] for row in rows] == ["A", "B", "C", "D"]
    assert [row[1] for row in rows] == ["0", "0", "0", "1"], "D is preempted"
    assert all(re.fullmatch(r"(\d+) of \1", row[2]) for row in rows)
    exact, fast = table_of(path, 'for mode in ("exact", "fast")')[1:]
    assert exact[1] == "12 of 12"
    assert fast[1] != "12 of 12"
    assert "D computes 22 tokens again; 64 are still there" in said(path, "(lost,)")
    continuous, static = map(int, re.findall(r"(\d+) steps", said(path, "wanted =")))
    assert continuous < static
    assert re.search(r"\b0 of \d+ .*\n *128 of \d+ ", said(path, "rules ="))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["saved", "executed"])
def test_attention_claims_what_its_outputs_show(which, run_lesson):
    path = FOLDER / "attention.ipynb"
    path = path if which == "saved" else run_lesson(path)[1]
    kernel, naive = table_of(path, "def naive(")[1:]
    assert kernel[1:] == ["8 of 8", "0e+00"]
    assert naive[1] != "8 of 8"
    canonical = said(path, "def canonical(")
    assert re.search(r"engine's kernel: 100%\n.*128 instead: +\d?\d%", canonical)
    assert said(path, "for beside in").count("100%") == 4
    assert re.search(r"100% of the bits are the kernel's\n.*\n +\d?\d% of", said(path, "windowed ="))
    table = re.search(r"\(([\d, ]+)\)", said(path, "print(\"block table:")).group(1).split(", ")
    assert table != sorted(table, key=int), "pages in no order"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["saved", "executed"])
def test_graphs_claims_what_its_outputs_show(which, run_lesson):
    path = FOLDER / "graphs.ipynb"
    path = path if which == "saved" else run_lesson(path)[1]
    assert re.search(r"(\d+) of \1 draws have the same bits", said(path, "draws have the same bits"))
    assert "padding" in said(path, "padded.inspect.shapes()")
    paddings = [int(row[2].split()[0]) for row in table_of(path, "for most in range(1, 9)")[1:]]
    assert paddings == sorted(paddings, reverse=True)
    assert "h200-models" in said(path, "print(recorded.SOURCE)")
    assert len(table_of(path, "costs = {")) == 3


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
