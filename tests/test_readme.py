"""What the README promises is there: its code runs as printed, its commands exist, its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from tests.homes import own_home

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_code_runs_in_the_power_lab_kernel(tmp_path, smollm2_path):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    notebook = tmp_path / "readme.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(code)]), notebook)
    home = tmp_path / "home"
    home.mkdir()
    line = [sys.executable, "-m", "power_lab", "run", str(notebook)]
    with own_home(home):
        environment = {**os.environ, "POWER_LAB_HOME": str(home)}
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_its_commands_are_the_commands_there_are():
    from power_lab.cli import _parser

    usage = _parser().format_help()
    there = set(re.findall(r"^    (\w+)  ", usage, re.MULTILINE))
    assert set(re.findall(r"^\| `power-lab (\w+)", TEXT, re.MULTILINE)) == there
    targets = set(re.findall(r"^make (\w+) ", TEXT, re.MULTILINE))
    assert targets == {"lab", "test"}


def test_its_settings_are_the_settings_there_are():
    from power_lab.engine.config import EngineConfig

    section = TEXT.split("## Settings")[1].split("## ")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| `?([\w()]*)`? \|", section, re.MULTILINE))
    open_defaults = EngineConfig(device="cuda")  # on the CPU, an open pool is a number
    defaults = {**msgspec.to_builtins(open_defaults), "device": EngineConfig().device}
    assert told == {key: str(value).lower() for key, value in defaults.items()}


def test_its_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert targets
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert missing == []
