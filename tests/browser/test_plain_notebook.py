"""The ground the other browser tests stand on: JupyterLab as `power-lab lab` starts it, with a plain notebook."""

from __future__ import annotations

from tests.browser.lab import write_notebook


def test_cells_run_and_no_news_pop_up_asks_for_anything(lab_server, lab_page):
    write_notebook(lab_server.root / "plain.ipynb", ["print('hello')", "21 * 2"], kernel="python3")
    lab_page.open("plain.ipynb")
    lab_page.run_all()
    cells = lab_page.state()["cells"]
    assert cells[0]["outputs"][0]["text"] == "hello\n"
    assert cells[1]["outputs"][0]["data"]["text/plain"] == "42"
    assert lab_page.page.locator(".Toastify__toast").count() == 0
