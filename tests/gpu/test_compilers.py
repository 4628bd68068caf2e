"""After a load no request waits for a compiler: what the rehearsal named, Triton finds under the names that it gives on the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3"])
def test_nothing_is_compiled_after_the_compilers_have_ended(kind: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path / "kernels"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, str(Path(__file__).with_name("compiled.py")), str(tmp_path), kind]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["own"] == []
    assert len(told["said"]) == 1 and "compilers" not in told["said"][0]
    assert len(list((tmp_path / "kernels" / "power-lab").iterdir())) == 1
