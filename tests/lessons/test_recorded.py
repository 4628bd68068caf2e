"""Recorded figures are what their source says."""

from __future__ import annotations

import json
from pathlib import Path

from power_lab.lessons import recorded


def test_each_figure_is_in_the_record():
    path = Path(__file__).parents[2] / recorded.SOURCE.split(":")[0]
    (run,) = [run for run in json.loads(path.read_text())["runs"] if "gpu.py qwen3-8b" in run["run"]["command"]]
    assert run["run"]["commit"] in recorded.SOURCE
    found = {one["batch"]: one for one in run["records"] if one["phase"] == "decode"}
    found |= {one["rows"]: one for one in run["records"] if one["phase"] == "verify" and one["rows"] in (1, 8)}
    for name, figures in {
        "graph_ms": recorded.GRAPH_MS,
        "ms": recorded.STEP_MS,
        "launch_ms": recorded.LAUNCH_MS,
    }.items():
        assert figures == {rows: found[rows][name] for rows in figures}
    assert recorded.graph_costs()(8) == recorded.GRAPH_MS[8]
