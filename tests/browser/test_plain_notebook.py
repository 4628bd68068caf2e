"""The ground the other browser tests stand on: JupyterLab as `power-lab lab` starts it, with a plain notebook."""

from __future__ import annotations

import nbformat
from nbformat.v4 import new_code_cell, new_notebook


def write_plain(folder, kernel):
    notebook = new_notebook(cells=[new_code_cell("print('hello')"), new_code_cell("21 * 2")])
    notebook.metadata["kernelspec"] = {"name": kernel, "display_name": kernel, "language": "python"}
    nbformat.write(notebook, folder / "plain.ipynb")


def test_cells_run_and_no_news_pop_up_asks_for_anything(lab_server, lab_page):
    write_plain(lab_server.root, "python3")
    lab_page.open("plain.ipynb")
    lab_page.run_all()
    cells = lab_page.state()["cells"]
    assert cells[0]["outputs"][0]["text"] == "hello\n"
    assert cells[1]["outputs"][0]["data"]["text/plain"] == "42"
    assert lab_page.page.locator(".Toastify__toast").count() == 0
    lab_page.picture("plain")
