"""Runs the tests of this folder in several processes on one GPU: `python3 tests/gpu/run.py [-j 14] [FILE...] [--report FILE.json]`.

Every process is a pytest that collects all tests and takes those that no other has taken yet; the compiling that dominates a first run is
shared that way. One whose CUDA context has failed ends, and another takes its place. Tests of the device's memory run last and alone.
`--cache FILE.tar.xz` is unpacked into Triton's cache first; `--keep FILE.tar.xz` is that cache afterwards (`bench/kernel_cache.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALONE = ("test_memory.py",)
LOST = ("CUDA error", "an illegal memory access", "Triton Error [CUDA]")
"""What a failure says after which this process can use the GPU no more."""

Result = dict[str, Any]


# --- a process that takes its share ---------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--claims", type=Path, help="folder through which processes share the tests out")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--claims"):
        config.pluginmanager.register(Share(config.getoption("--claims")))


class Share:
    """The part of pytest that runs tests which no other process has taken.

    Args:
        folder: holds a file for each test taken, named by `name_of`, `collected.json`, and a list of results for each process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lost = False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        collected = self._folder / f"collected.{os.getpid()}"
        collected.write_text(json.dumps([item.nodeid for item in session.items]))
        collected.replace(self._folder / "collected.json")
        mine = (item for item in session.items if self._take(item.nodeid))
        item = next(mine, None)
        while item is not None:  # the next one is known before one ends, so that it keeps the fixtures which both use
            following = next(mine, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._lost:
                if following is not None:
                    (self._folder / name_of(following.nodeid)).unlink()
                os._exit(3)  # the context is gone: no fixture could be ended
            item = following
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = str(report.longrepr) if report.longrepr and not report.passed else ""
        result = {
            "test": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "seconds": report.duration,
            "said": said,
        }
        with (self._folder / f"results.{os.getpid()}").open("a") as file:
            file.write(json.dumps(result) + "\n")
        self._lost = self._lost or (report.failed and any(words in said for words in LOST))

    def _take(self, test: str) -> bool:
        try:
            with (self._folder / name_of(test)).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return False
        return True


def name_of(test: str) -> str:
    return f"taken.{hashlib.sha256(test.encode()).hexdigest()}"


# --- the process that starts them ----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=sorted(Path(__file__).parent.glob("test_*.py")))
    parser.add_argument("-j", "--jobs", type=int, default=max(1, min(14, len(os.sched_getaffinity(0)) - 2)))
    parser.add_argument("-k", "--only", default="", help="as pytest's -k")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which what still runs is ended")
    parser.add_argument("--report", type=Path, help="all results, as JSON")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from bench import kernel_cache

    if args.cache:
        print(kernel_cache.unpack(args.cache, kernel_cache.default_cache()), "files of compiled kernels", flush=True)
    start, results, missing = time.monotonic(), [], []
    together = [path for path in args.files if path.name not in ALONE]
    for files, jobs in ((together, args.jobs), ([path for path in args.files if path.name in ALONE], 1)):
        if files:
            done, left = run(files, jobs, args.only, start + args.limit)
            results, missing = results + done, missing + left
    text, good = summary(results, missing)
    print(f"{text} in {time.monotonic() - start:.0f} s")
    if args.report:
        args.report.write_text(json.dumps({"results": results, "missing": missing}, indent=1) + "\n")
    if args.keep:
        print(kernel_cache.pack(kernel_cache.default_cache(), args.keep), "files of compiled kernels kept")
    return 0 if good else 1


def run(files: Sequence[Path], jobs: int, only: str, end: float) -> tuple[list[Result], list[str]]:
    """Results of all phases of all tests, and the tests that have none. Processes that end before all is taken are replaced."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.gpu.run",
        "-p",
        "no:cacheprovider",
        "-q",
        *(["-k", only] if only else []),
    ]
    with tempfile.TemporaryDirectory(prefix="tests-gpu-") as name:
        folder = Path(name)
        command += [f"--claims={folder}", *map(str, files)]
        running = [_start(command, folder) for _ in range(jobs)]
        spare, said = jobs, 0
        while running and time.monotonic() < end:
            time.sleep(0.2)
            for process in [process for process in running if process.poll() is not None]:
                running.remove(process)
                if process.returncode not in (0, 1, 5):  # 5: none was left for it
                    print(f"process {process.pid} ended with {process.returncode}", flush=True)
                    _give_back(folder, process.pid)
                    if spare:
                        spare -= 1
                        running.append(_start(command, folder))
            done = len({result["test"] for result in _results(folder) if result["when"] == "teardown"})
            if done >= said + 50:
                said = done
                print(f"{done} of {len(_collected(folder))}", flush=True)
        for process in running:
            process.kill()
            process.wait()
        results = list(_results(folder))
        ended = {result["test"] for result in results if result["when"] == "teardown" or result["outcome"] == "failed"}
        missing = [test for test in _collected(folder) if test not in ended]
        if missing or not results:
            for path in sorted(folder.glob("log.*")):
                said = path.read_text(errors="replace")
                print(f"--- {path.name}\n{said[max(said.find('Fatal'), 0) :][:1500]}")
        return results, missing


def _start(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    number, path = tempfile.mkstemp(prefix="begun.", dir=folder)
    with os.fdopen(number, "ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    Path(path).rename(folder / f"log.{process.pid}")
    return process


def _give_back(folder: Path, pid: int) -> None:
    """The test that a process which is gone had taken beside the one that it was at."""
    ended = {result["test"] for result in _results(folder) if result["when"] == "teardown"}
    claims = [folder / name_of(test) for test in _collected(folder) if test not in ended]
    for path in [path for path in claims if path.exists() and path.read_text() == str(pid)][1:]:
        path.unlink()


def _collected(folder: Path) -> list[str]:
    path = folder / "collected.json"
    return json.loads(path.read_text()) if path.exists() else []


def _results(folder: Path) -> Iterator[Result]:
    for path in sorted(folder.glob("results.*")):
        for line in path.read_text().splitlines():
            yield json.loads(line)


def summary(results: Sequence[Result], missing: Sequence[str]) -> tuple[str, bool]:
    """What came of the tests, failures first, and whether all of them ran and none failed."""
    failed = [result for result in results if result["outcome"] == "failed"]
    passed = {result["test"] for result in results if result["when"] == "call" and result["outcome"] == "passed"}
    skipped = {result["test"] for result in results if result["outcome"] == "skipped"}
    slowest = sorted(results, key=lambda result: -result["seconds"])[:5]
    lines = [f"--- {result['test']} ({result['when']})\n{result['said'][-1500:]}" for result in failed]
    lines += [f"slow: {result['seconds']:.1f} s {result['test']}" for result in slowest]
    lines += [f"did not end: {test}" for test in missing]
    lines.append(f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped, {len(missing)} did not end")
    return "\n".join(lines), bool(passed) and not failed and not missing


if __name__ == "__main__":
    sys.exit(main())
