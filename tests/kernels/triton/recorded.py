"""What kernels compiled for sm_90 needed when that was last recorded: bench/results/kernels-sm90.json.

`compile_*.py` compare what they compile with the record. A kernel that takes more registers, shared memory or stack fails, and so does one
that is not recorded, until the record is renewed on purpose:

    python -m tests.kernels.triton.recorded [attention] [linear] [moves] [parts] [sample]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import triton

ROOT = Path(__file__).resolve().parents[3]
PATH = ROOT / "bench" / "results" / "kernels-sm90.json"
FAMILIES = ("attention", "linear", "moves", "parts", "sample")
COLUMNS = ("shared bytes", "registers", "stack bytes")
RENEW = "--record"

Use = tuple[int, int, int]
"""Bytes of shared memory a program, registers a thread, bytes of stack a thread, as `cubin.resources` gives them."""


class Recorded:
    """The kernels of one family as they are compiled, beside the record.

    Args:
        family: one of `FAMILIES`.
        path: the record.
        renew: put what is seen in the place of what was recorded, instead of comparing.

    Used as a context; raises AssertionError at its end with all that differs. Another Triton counts registers differently: there nothing
    is compared, and that is said.
    """

    def __init__(self, family: str, path: Path = PATH, *, renew: bool | None = None) -> None:
        self._family, self._path = family, path
        self._renew = RENEW in sys.argv if renew is None else renew
        self._seen: dict[str, Use] = {}

    def see(self, name: str, use: Use) -> None:
        """A variant's use. Several variants of one name count as one that needs the most of each."""
        most = self._seen.get(name, use)
        self._seen[name] = (max(most[0], use[0]), max(most[1], use[1]), max(most[2], use[2]))
        print(f"{name}:", ", ".join(f"{count} {what}" for count, what in zip(use, COLUMNS, strict=True)), flush=True)

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._end(_read(self._path))

    def _end(self, record: dict[str, Any]) -> None:
        same = record.get("compiler") == compiler()
        if self._renew:
            _write(self._path, (record["kernels"] if same else {}) | {self._family: self._seen})
        elif not same:
            print(f"not compared: recorded with {record.get('compiler')}, compiled with {compiler()}")
        else:
            worse = differences(record["kernels"].get(self._family, {}), self._seen)
            command = f"python -m tests.kernels.triton.recorded {self._family}"
            assert not worse, "\n".join([*worse, f"If that is meant, renew {self._path.name}: {command}"])


def differences(recorded: Mapping[str, Sequence[int]], seen: Mapping[str, Use]) -> list[str]:
    """What needs more than was recorded, is not recorded, or is recorded and was not compiled; a line each."""
    lines = [f"{name}: not recorded" for name in seen if name not in recorded]
    lines += [f"{name}: recorded, but not compiled any more" for name in recorded if name not in seen]
    for name in seen.keys() & recorded.keys():
        for what, before, now in zip(COLUMNS, recorded[name], seen[name], strict=True):
            if now > before:
                lines.append(f"{name}: {now} {what}, recorded {before}")
    return sorted(lines)


def compiler() -> str:
    """Whose counts these are; its assembler comes with it."""
    return f"Triton {triton.__version__}"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _write(path: Path, kernels: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
    """One kernel a line, so that a change of one shows as a change of one."""
    parts = []
    for family, uses in sorted(kernels.items()):
        lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(list(use))}" for name, use in uses.items())
        parts.append(f"  {json.dumps(family)}: {{\n{lines}\n  }}")
    head = {
        "compiler": compiler(),
        "target": "sm_90",
        "columns": list(COLUMNS),
        "command": "python -m tests.kernels.triton.recorded",
    }
    body = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    path.write_text(f'{{\n{body},\n "kernels": {{\n' + ",\n".join(parts) + "\n }\n}\n")


def main(families: list[str]) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    for family in families or FAMILIES:
        script = Path(__file__).with_name(f"compile_{family}.py")
        if status := subprocess.run([sys.executable, str(script), RENEW], env=environment, check=False).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
