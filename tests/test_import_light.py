"""`import power_lab` and the quick commands stay cheap: nothing heavy is loaded before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "numba", "triton", "numpy", "xarray", "bokeh", "ipywidgets", "anywidget", "jupyterlab")


@pytest.mark.parametrize(
    "statement",
    [
        "import power_lab",
        "import power_lab.cli, power_lab.notebook, power_lab.jupyterlab",
        "from power_lab.doctor import examine; from power_lab.engine.config import Paths; examine(Paths.default())",
    ],
    ids=["package", "commands", "doctor"],
)
def test_nothing_heavy_is_loaded(statement, tmp_path):
    code = f"{statement}\nimport sys, json; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    environment = {"POWER_LAB_HOME": str(tmp_path), "HOME": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert json.loads(out.stdout) == []


def test_every_public_name_says_where_it_lives():
    import power_lab

    assert set(power_lab._HOMES) <= set(power_lab.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = power_lab.nonsense
