"""Notebooks load BokehJS from the server that serves it, and hold no copy."""

from __future__ import annotations

import json

PLOT = """
from bokeh.io import output_notebook, show
from bokeh.plotting import figure
output_notebook()
plot = figure()
plot.line([1, 2], [3, 4])
show(plot)
"""


def test_a_plot_is_small_and_names_our_address(start):
    kernel = start(environment={"POWER_LAB_PAGES": "1"})
    assert kernel.run("import sys; print('bokeh' in sys.modules)").text == "False\n"
    done = kernel.run(PLOT)
    assert done.status == "ok", done
    text = json.dumps(done.outputs)
    assert "power-lab/bokeh/js/" in text
    assert "cdn.bokeh.org" not in text
    assert len(text) < 20_000
    asked = json.dumps(kernel.run("from bokeh.resources import INLINE\noutput_notebook(INLINE)").outputs)
    assert len(asked) > 1_000_000, "who asks for something else gets it"


def test_elsewhere_bokeh_is_as_it_comes(start):
    text = json.dumps(start().run(PLOT).outputs)
    assert "power-lab/bokeh/js/" not in text
