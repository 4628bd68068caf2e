"""Notebooks that are run as a user runs them: `power-lab run`, the real kernel, the real engine; long work made short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parents[1] / "notebooks"


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def shortened(path: Path, folder: Path, changes: Mapping[str, str]) -> Path:
    """A copy of a notebook with pieces of its code replaced. Each must be there, or the test would go back to doing all the work unseen."""
    notebook = nbformat.read(path, as_version=4)
    missing = set(changes)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for old, new in changes.items():
                if old in cell.source:
                    missing.discard(old)
                    cell.source = cell.source.replace(old, new)
    assert not missing, f"not in {path.name}: {missing}"
    copy = folder / f"short-{path.name}"
    nbformat.write(notebook, copy)
    return copy


def execute(
    path: Path, folder: Path, home: Path, changes: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], Path]:
    """Run a notebook from top to bottom with the engine host of `home`: what the command said, and the notebook with outputs."""
    output = folder / path.name
    source = shortened(path, folder, changes) if changes else path
    line = [
        sys.executable,
        "-m",
        "power_lab",
        "run",
        str(source),
        "--output",
        str(output),
        "--timeout",
        "400",
        "--json",
    ]
    environment = {**os.environ, "POWER_LAB_HOME": str(home)}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), output
