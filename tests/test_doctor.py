"""The doctor: each finding on a machine that has the trouble, made by hand; never a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from power_lab import doctor
from power_lab.engine.config import ModelFolders, Paths
from power_lab.errors import HostUnavailable


@pytest.fixture
def paths(tmp_path):
    return Paths(tmp_path / "cache", tmp_path / "run", tmp_path / "state")


def test_all_checks_as_json_through_the_command(tmp_path):
    line = [sys.executable, "-m", "power_lab", "doctor", "--json"]
    home = {**os.environ, "POWER_LAB_HOME": str(tmp_path)}
    done = subprocess.run(line, env=home, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert [check["name"] for check in found["checks"]] == list(doctor.CHECKS)
    assert {check["status"] for check in found["checks"]} <= {"ok", "warn", "fail"}
    assert all(check["remedy"] for check in found["checks"] if check["status"] != "ok"), "trouble without a remedy"
    assert done.returncode == (1 if found["status"] == "fail" else 0)
    assert done.stderr == ""


def test_the_gravest_status_counts():
    def check(status):
        return doctor.Check(name="x", status=status, value="")

    assert doctor.worst([]) == "ok"
    assert doctor.worst([check("ok"), check("warn")]) == "warn"
    assert doctor.worst([check("fail"), check("warn")]) == "fail"


def test_a_check_that_breaks_becomes_a_warning(paths, monkeypatch):
    def broken(_):
        raise ZeroDivisionError("oh")

    def refused(_):
        raise HostUnavailable("no socket here", "Move it.")

    monkeypatch.setattr(doctor, "CHECKS", {"broken": broken, "refused": refused})
    broken_check, refused_check = doctor.examine(paths)
    assert (broken_check.status, broken_check.value) == ("warn", "could not be checked: ZeroDivisionError: oh")
    assert (refused_check.status, refused_check.value, refused_check.remedy) == ("fail", "no socket here", "Move it.")


@pytest.mark.parametrize(
    ("platform_name", "machine", "status", "word"),
    [
        ("linux", "x86_64", "ok", ""),
        ("linux", "aarch64", "warn", "untested"),
        ("darwin", "arm64", "warn", "untested"),
        ("win32", "AMD64", "fail", "WSL2"),
    ],
)
def test_systems(paths, monkeypatch, platform_name, machine, status, word):
    monkeypatch.setattr(sys, "platform", platform_name)
    monkeypatch.setattr(doctor.platform, "machine", lambda: machine)
    found, _, remedy = doctor.system(paths)
    assert found == status
    assert word in remedy


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "fail")]
)
def test_python_versions(paths, monkeypatch, version, status):
    monkeypatch.setattr(sys, "version_info", version)
    assert doctor.python(paths)[0] == status


@pytest.mark.parametrize(
    ("flags", "status"),
    [({"avx2", "fma"}, "ok"), ({"avx2"}, "warn"), (set(), "ok")],
    ids=["full", "no fma", "not told"],
)
def test_processors(paths, monkeypatch, flags, status):
    monkeypatch.setattr(doctor, "_cpuinfo", lambda: (flags, "A CPU"))
    assert doctor.processor(paths)[0] == status


def test_a_container_limit_counts(paths, monkeypatch):
    monkeypatch.setattr("power_lab.models.fit.container_limit", lambda: 1 << 30)
    status, value, _ = doctor.memory(paths)
    assert status == "warn"
    assert "container limit 1.0 GiB" in value


def test_little_disk(paths, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    assert doctor.disk(paths)[0] == "warn"


def test_folders_that_cannot_be_written(tmp_path):
    blocked = Path("/proc")  # not even root writes here
    status, value, remedy = doctor.folders(Paths(blocked / "power-lab", tmp_path, tmp_path))
    assert status == "fail"
    assert "/proc/power-lab" in value
    assert "POWER_LAB_HOME" in remedy


def test_packages_missing_and_outside_their_window(paths, monkeypatch):
    installed = {"numpy": "1.26.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda _: ["numpy>=2", "torch>=2.9", "tqdm>=4", "pytest; extra == 'dev'"]
    )
    monkeypatch.setattr(doctor, "_version", installed.get)
    status, value, remedy = doctor.packages(paths)
    assert (status, value) == ("fail", "numpy 1.26.0 (needs >=2); tqdm missing (needs >=4)")
    assert "pip install" in remedy


def test_running_from_a_folder_without_an_installation(paths, monkeypatch):
    def absent(_):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(doctor.metadata, "requires", absent)
    assert doctor.packages(paths)[0] == "warn"


@pytest.mark.parametrize(
    ("version", "status"), [("7.3.9", "fail"), ("7.4.0", "ok"), ("7.12.1", "ok"), ("8.0.0a1", "fail"), (None, "fail")]
)
def test_the_ipykernel_window(paths, monkeypatch, version, status):
    monkeypatch.setattr(doctor, "_version", {"ipykernel": version}.get)
    assert doctor.ipykernel(paths)[0] == status


def test_no_pip(paths, monkeypatch):
    monkeypatch.setattr(doctor.util, "find_spec", lambda _: None)
    status, _, remedy = doctor.pip(paths)
    assert status == "warn"
    assert "ensurepip" in remedy


class TestModel:
    def test_absent(self, paths):
        status, _, remedy = doctor.model(paths)
        assert status == "warn"
        assert "power-lab models add smollm2" in remedy

    def test_wrong_bytes(self, paths):
        from power_lab.models import CATALOGUE

        file = paths.models / CATALOGUE["smollm2"].file
        file.parent.mkdir(parents=True)
        file.write_bytes(b"GGUF")
        found = doctor._guarded("default model", doctor.model, paths)
        assert found.status == "fail"
        assert str(file) in found.value
        assert "power-lab models add smollm2" in found.remedy


class TestGpu:
    @pytest.fixture
    def smi(self, tmp_path, monkeypatch):
        """Put an `nvidia-smi` that prints a text on the path."""

        def put(text):
            program = tmp_path / "nvidia-smi"
            program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
            program.chmod(0o755)
            monkeypatch.setattr(doctor.shutil, "which", lambda _: str(program))

        return put

    @pytest.mark.parametrize(
        ("chosen", "why", "status", "told"),
        [("cuda", "it is there", "ok", "used by default"), ("cpu", "too old", "warn", "not used: too old")],
    )
    def test_one_is_there(self, paths, smi, monkeypatch, chosen, why, status, told):
        from power_lab.engine import device

        monkeypatch.setattr(device, "choose", lambda config: (chosen, why))
        smi("GPU 0: NVIDIA H200 (UUID: GPU-1)")
        got, value, remedy = doctor.gpu(paths)
        assert got == status and bool(remedy) == (status == "warn")
        assert value.startswith(f"GPU 0: NVIDIA H200, {told}")

    def test_the_driver_sees_none(self, paths, smi):
        smi("No devices were found")
        assert doctor.gpu(paths)[0] == "warn"


class TestKernelspec:
    @pytest.fixture
    def install(self, tmp_path, monkeypatch):
        """Make a kernelspec the only one that Jupyter finds."""
        from jupyter_client import kernelspec

        def put(argv):
            folder = tmp_path / "kernels" / "power_lab"
            folder.mkdir(parents=True)
            (folder / "kernel.json").write_text(
                json.dumps({"argv": argv, "display_name": "Power Lab", "language": "python"})
            )
            monkeypatch.setattr(kernelspec.KernelSpecManager, "_kernel_dirs_default", lambda _: [str(folder.parent)])
            return folder

        return put

    def test_missing(self, paths, monkeypatch):
        from jupyter_client import kernelspec

        monkeypatch.setattr(kernelspec.KernelSpecManager, "_kernel_dirs_default", lambda _: [])
        assert doctor.kernelspec(paths)[:2] == ("fail", "the Power Lab kernel is not installed")

    def test_of_another_python(self, paths, install):
        install(["/usr/bin/nopython", "-m", "power_lab.jupyter"])
        status, value, _ = doctor.kernelspec(paths)
        assert status == "fail"
        assert "/usr/bin/nopython" in value

    def test_shadowed_by_another_installation(self, paths, install):
        folder = install(["python", "-m", "power_lab.jupyter"])
        status, value, remedy = doctor.kernelspec(paths)
        assert status == "warn"
        assert str(folder) in value
        assert "Remove that folder" in remedy

    def test_our_own(self, paths, install, tmp_path, monkeypatch):
        install(["python", "-m", "power_lab.jupyter"])
        monkeypatch.setattr(sys, "prefix", str(tmp_path))
        assert doctor.kernelspec(paths)[0] == "ok"


class TestHost:
    def test_not_running(self, paths):
        status, value, _ = doctor.host(paths)
        assert status == "ok"
        assert "not running" in value
        assert str(paths.state) in value

    def test_running(self, paths):
        from power_lab.engine.host.place import Place, listen

        with listen(Place.of(paths)):
            assert doctor.host(paths)[1].startswith(f"running as process {os.getpid()}")

    def test_a_path_too_long_for_a_socket_moves(self, tmp_path):
        deep = tmp_path / ("d" * 100)
        status, value, _ = doctor.host(Paths(deep, deep, deep))
        assert status == "ok"
        assert "moved from" in value


class TestModelFolders:
    def test_counts_without_opening_any(self, paths, tmp_path):
        with_extra = replace(paths, others=ModelFolders(extra=(tmp_path / "extra",)))
        assert doctor.model_folders(paths) == ("ok", "no models yet", "")
        status, value, remedy = doctor.model_folders(with_extra)
        assert (status, value) == ("warn", f"{tmp_path / 'extra'}: no such folder")
        assert "POWER_LAB_MODEL_PATH" in remedy
        (tmp_path / "extra").mkdir()
        (tmp_path / "extra" / "one.gguf").write_bytes(b"never opened")
        assert doctor.model_folders(with_extra) == ("ok", f"1 in folder {tmp_path / 'extra'}", "")
