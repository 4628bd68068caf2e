"""How long the notebooks take that people work through: each from a fresh kernel and a fresh engine host, seconds by cell.

    python bench/lessons.py [NOTEBOOK ...] [--output FILE]

All of `notebooks/` without arguments. They run as by `power-lab run`, through nbclient; the default model and its compiled kernels are on
the disk already. `cpu_seconds` are those of kernel and host, read four times a second: what a machine needs at most that does nothing else,
but for what is waited for. `load` is the machine's load average when a notebook began and ended: what else ran made `seconds` longer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.cpu import about  # noqa: E402
from power_lab.notebook import run_notebook  # noqa: E402
from tests.homes import own_home  # noqa: E402

FOLDER = ROOT / "notebooks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=[*FOLDER.glob("*.ipynb"), *FOLDER.glob("*/*.ipynb")])
    parser.add_argument("--output", type=Path, help="also write the result with machine and commit to this file")
    args = parser.parse_args()
    args.threads = "the default"
    os.environ["PYTHONPATH"] = str(ROOT)  # of kernels and hosts
    found = {}
    for path in sorted(args.notebooks):
        found[path.stem] = measured(path)
        show(path.stem, found[path.stem])
        if args.output:
            args.output.write_text(json.dumps({"run": about(args), "notebooks": found}, indent=1) + "\n")


def show(name: str, one: dict[str, Any]) -> None:
    worst = max(one["cells"], key=lambda cell: cell["seconds"])
    spent = f"{one['seconds']:6.1f} s, {one['cpu_seconds']:.1f} s of CPU"
    print(f"{name:12} {spent}, at most {worst['seconds']:.1f} s: {worst['first_line']}", flush=True)


def measured(path: Path) -> dict[str, Any]:
    """Seconds of a notebook from its kernel's start to its end, and of its code cells."""
    begun: list[tuple[float, float]] = []
    lines: list[str] = []

    def on_cell(done: int, total: int, line: str) -> None:
        begun.append((time.perf_counter(), used.seconds()))
        lines.append(line)

    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="power-lab-lessons-") as folder,
        own_home(Path(folder)) as home,
        Used() as used,
    ):
        os.environ["POWER_LAB_HOME"] = str(home)
        start = time.perf_counter()
        result = run_notebook(path, Path(folder) / path.name, on_cell=on_cell)
        begun.append((time.perf_counter(), used.seconds()))
        del os.environ["POWER_LAB_HOME"]
    if not result.ok:
        raise SystemExit(f"{path}: {result.failures}")
    return {
        "seconds": round(result.seconds, 2),
        "cpu_seconds": round(begun[-1][1], 2),
        "seconds_to_the_first_cell": round(begun[0][0] - start, 2),
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "cells": [
            {"seconds": round(end - begin, 3), "cpu_seconds": round(after - before, 2), "first_line": line}
            for ((begin, before), (end, after)), line in zip(pairwise(begun), lines, strict=True)
        ],
    }


class Used:
    """CPU time of all processes that this one began while it is open, also of those that have ended, up to the last reading."""

    def __init__(self) -> None:
        self._spent: dict[tuple[int, float], float] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def seconds(self) -> float:
        with self._lock:
            for one in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    self._spent[one.pid, one.create_time()] = times.user + times.system
            return sum(self._spent.values())

    def _watch(self) -> None:
        while not self._ended.wait(0.25):
            self.seconds()


if __name__ == "__main__":
    main()
