"""tests/gpu/run.py on tests that need no GPU: shared out, each run once, and whatever goes wrong is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RUNNER = Path(__file__).parent / "gpu" / "run.py"
TOY = """
import os
import pytest

@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return os.open(os.environ["RECORD"], os.O_APPEND | os.O_WRONLY | os.O_CREAT)

@pytest.mark.parametrize("i", range(30))
def test_each(i, record):
    os.write(record, f"{i}\\n".encode())
    assert i != 7
    if i == 11:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if i == 13:
        pytest.skip("no such device")
"""


def run(folder: Path, text: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    (folder / "test_toy.py").write_text(text)
    command = [sys.executable, str(RUNNER), str(folder / "test_toy.py"), "--report", str(folder / "report"), *arguments]
    environment = {"RECORD": str(folder / "record"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, check=False)
    return done.returncode, done.stdout, json.loads((folder / "report").read_text())


def test_every_test_runs_once_although_a_process_is_lost(tmp_path: Path) -> None:
    status, text, report = run(tmp_path, TOY, "-j", "3")
    assert sorted(map(int, (tmp_path / "record").read_text().split())) == list(range(30))
    assert status == 1 and "27 passed, 2 failed, 1 skipped, 0 did not end" in text
    assert "assert 7 != 7" in text and "illegal memory access" in text
    assert report["missing"] == []


def test_a_process_that_dies_is_told(tmp_path: Path) -> None:
    toy = "import os, signal\ndef test_a(): os.kill(os.getpid(), signal.SIGSEGV)\ndef test_b(): pass\ndef test_c(): pass\n"
    status, text, report = run(tmp_path, toy, "-j", "2")
    assert status == 1 and [test.partition("::")[2] for test in report["missing"]] == ["test_a"]
    assert "did not end" in text and "ended with -11" in text and "Segmentation fault" in text


def test_all_good_is_all_good(tmp_path: Path) -> None:
    status, text, _ = run(tmp_path, "def test_a(): pass\n", "-j", "2")
    assert status == 0 and "1 passed, 0 failed, 0 skipped, 0 did not end" in text
