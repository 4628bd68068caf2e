"""A Bokeh plot in a real page: drawn with the BokehJS of the installed package, with nothing from outside (the fixture watches)."""

from __future__ import annotations

from tests.browser.lab import OUTPUT, write_notebook

CELLS = [
    "from bokeh.io import output_notebook, show\nfrom bokeh.plotting import figure\noutput_notebook()",
    "plot = figure(width=300, height=200)\nplot.line([1, 2], [3, 4])\nshow(plot)",
]


def test_a_plot_is_drawn_with_our_copy_of_bokehjs(lab_page, lab_server):
    write_notebook(lab_server.root / "plot.ipynb", CELLS)
    asked: list[str] = []
    lab_page.page.on("request", lambda request: asked.append(request.url))
    lab_page.open("plot.ipynb")
    lab_page.run_all()
    lab_page.show(CELLS[1][:10])
    lab_page.page.locator(f"{OUTPUT} .bk-Figure").wait_for(timeout=30_000)
    assert any("/power-lab/bokeh/js/bokeh.min.js?v=" in url for url in asked)
    lab_page.snap("bokeh-from-our-server")
