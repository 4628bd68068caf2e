"""The runner finds what misbehaves, names its seed, and goes on behind it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_kind_of_failure_is_found_with_its_seed(tmp_path: Path) -> None:
    output = tmp_path / "fuzz.json"
    options = [
        "--module",
        "tests.fuzz.misbehaving",
        "--mutations",
        "20",
        "--seconds",
        "2",
        "--memory",
        "256",
        "--output",
        str(output),
    ]
    done = subprocess.run(
        [sys.executable, "bench/fuzz.py", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    targets = json.loads(output.read_text())["targets"]
    said = {"raises": "KeyError", "hangs": "more than 2.0 s", "dies": "ended with -11", "eats": "MemoryError"}
    assert targets.keys() == said.keys()
    for name, error in said.items():
        assert targets[name]["outcomes"] == {"fine": 18, "FAILED": 2}
        assert [failure["seed"] for failure in targets[name]["failures"]] == [7, 17]
        assert all(error in failure["error"] for failure in targets[name]["failures"])
    assert 'lambda: {}["key"]' in targets["raises"]["failures"][0]["trace"]
