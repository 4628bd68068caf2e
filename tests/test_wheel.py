"""The wheel holds what an installed Power Lab needs: sources, assets, kernelspec, notebooks, the command."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    from hatchling.builders.wheel import WheelBuilder

    path = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"]))
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_every_file_of_the_package_is_in_it(wheel):
    package = ROOT / "power_lab"
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.parts[len(package.parts)] != "labextension"
    }
    assert wanted <= set(wheel.namelist())


def test_the_kernelspec_lands_where_jupyter_looks(wheel):
    folder = next(name for name in wheel.namelist() if name.endswith("kernels/power_lab/kernel.json")).removesuffix(
        "kernel.json"
    )
    assert folder.endswith(".data/data/share/jupyter/kernels/power_lab/")
    spec = json.loads(wheel.read(f"{folder}kernel.json"))
    assert spec["argv"][:3] == ["python", "-m", "power_lab.jupyter"]
    assert spec["language"] == "python"
    logos = {name.removeprefix(folder) for name in wheel.namelist() if name.startswith(folder)}
    assert {"logo-svg.svg", "logo-32x32.png", "logo-64x64.png"} <= logos


def test_the_jupyterlab_extension_lands_where_jupyterlab_looks(wheel):
    folder = next(name for name in wheel.namelist() if name.endswith("labextensions/power-lab/install.json"))
    folder = folder.removesuffix("install.json")
    assert folder.endswith(".data/data/share/jupyter/labextensions/power-lab/")
    package = json.loads(wheel.read(f"{folder}package.json"))
    assert f"{folder}{package['jupyterlab']['_build']['load']}" in wheel.namelist()
    assert not any(name.startswith("power_lab/labextension/") for name in wheel.namelist()), "in the wheel twice"


def test_the_notebooks_travel_along(wheel):
    for notebook in ("tour.ipynb", "lessons/speculation.ipynb"):
        assert any(name.endswith(f"share/power-lab/notebooks/{notebook}") for name in wheel.namelist())


def test_metadata_names_command_licence_and_windows_of_versions(wheel):
    info = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = wheel.read(info).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: <3.14,>=3.11" in text
    assert "Requires-Dist: ipykernel<8,>=7.4" in text
    triton = next(line for line in text.splitlines() if line.startswith("Requires-Dist: triton"))
    assert triton.removeprefix("Requires-Dist: triton").lstrip().startswith(";"), (
        "CUDA builds of torch choose their own triton"
    )
    entries = wheel.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert "power-lab = power_lab.cli:main" in entries
