"""Who may import whom (.importlinter), where the environment may be read, and how long a file may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "power_lab").rglob("*.py"))


def test_import_contracts_hold():
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_only_config_reads_the_environment():
    allowed = ROOT / "power_lab" / "engine" / "config.py"
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        if path != allowed
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb")
    ]
    assert not found, f"read the environment in power_lab/engine/config.py only: {found}"


def test_no_file_holds_a_package_index_address():
    names = ("pyproject.toml", "Makefile", "constraints/cpu.txt", ".ci/run")
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in names)
    assert "index-url" not in text
    assert "://" not in text
