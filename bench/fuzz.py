"""The fuzzing campaign: seeded mutations of hostile inputs, each target in worker processes under a memory and a time limit.

A case may refuse its input with a typed error or load what the reference loads; anything else is a failure: another exception, a wrong
load, more memory than `--memory` above the idle worker, more seconds than `--seconds`, a crash. Failures are printed and written with
their seeds; `--case SEED` runs one again in this process. What is fuzzed is said in tests/fuzz/targets.py.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

START_SECONDS = 120.0  # imports and originals of a worker
KEPT_FAILURES = 200  # of each target in the output
WARM_CASES = 200  # before memory is compared: caches fill


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="all if none is given")
    parser.add_argument("--mutations", type=int, default=1000, help="of each target")
    parser.add_argument("--seed", type=int, default=0, help="the first; the others follow")
    parser.add_argument("--workers", dest="threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="for one case")
    parser.add_argument("--memory", type=int, default=512, help="MiB of address space for one case")
    parser.add_argument("--case", type=int, help="run this one seed here, without limits")
    parser.add_argument("--module", default="tests.fuzz.targets", help="where TARGETS is")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs=3, metavar=("TARGET", "FIRST", "LAST"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        target, first, last = args.worker
        work(args.module, target, range(int(first), int(last)), args.memory << 20)
        return 0
    targets = import_module(args.module).TARGETS
    names = args.targets or list(targets)
    if unknown := [name for name in names if name not in targets]:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(targets)}")
    if args.case is not None:
        for name in names:
            with tempfile.TemporaryDirectory(prefix="power-lab-fuzz-") as folder:
                print(f"{name} {args.case}: {targets[name](Path(folder))(args.case)}")
        return 0
    results = {name: campaign(name, args) for name in names}
    if args.output:
        from bench.cpu import about

        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"run": about(args), "targets": results}, indent=1) + "\n")
    return 1 if any(result["failures"] for result in results.values()) else 0


@dataclass
class Tally:
    """What came of a target's cases."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    growth: int = 0  # of a worker's resident bytes between its first WARM_CASES cases and its last: a leak shows here
    slowest: tuple[float, int] = (0.0, -1)  # seconds and seed

    def fail(self, seed: int, error: str, trace: str = "") -> None:
        self.outcomes["FAILED"] += 1
        self.failures.append({"seed": seed, "error": error, "trace": trace})


def campaign(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All cases of one target, spread over workers by ranges of seeds."""
    started = time.monotonic()
    ends = [args.seed + args.mutations * part // args.threads for part in range(args.threads + 1)]
    with ThreadPoolExecutor(args.threads) as pool:
        tallies = list(pool.map(lambda part: watch(name, range(*part), args), pairwise(ends)))
    outcomes = sum((tally.outcomes for tally in tallies), Counter())
    failures = [failure for tally in tallies for failure in tally.failures]
    slowest = max(tally.slowest for tally in tallies)
    result = {
        "seeds": [args.seed, args.seed + args.mutations],
        "seconds": round(time.monotonic() - started, 1),
        "outcomes": dict(outcomes.most_common()),
        "memory_growth_bytes": max(tally.growth for tally in tallies),
        "slowest_case": {"seconds": round(slowest[0], 3), "seed": slowest[1]},
        "failures": failures[:KEPT_FAILURES],
    }
    print(f"{name}: {args.mutations} cases in {result['seconds']} s, {len(failures)} failures, "
          f"grown by {result['memory_growth_bytes'] >> 10} KiB, slowest {slowest[0]:.2f} s")  # fmt: skip
    for label, count in outcomes.most_common():
        print(f"  {count:8}  {label}")
    for failure in failures[:5]:
        print(f"  seed {failure['seed']}: {failure['error'][:300]}")
    return result


def watch(name: str, seeds: range, args: argparse.Namespace) -> Tally:
    """Run a range of seeds in a worker; one that hangs or dies costs its seed, and another worker goes on behind it."""
    tally = Tally()
    at = seeds.start
    while at < seeds.stop:
        limits = ["--module", args.module, "--memory", str(args.memory)]
        worker = ["--worker", name, str(at), str(seeds.stop)]
        command = [sys.executable, str(Path(__file__)), *limits, *worker]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            ready = False
            try:
                for report in lines(process, START_SECONDS, args.seconds):
                    if "growth" in report:
                        tally.growth = max(tally.growth, report["growth"])
                    elif "seed" not in report:
                        ready = True
                    else:
                        at = report["seed"] + 1
                        tally.slowest = max(tally.slowest, (report["seconds"], report["seed"]))
                        if "error" in report:
                            tally.fail(report["seed"], report["error"], report["trace"])
                        else:
                            tally.outcomes[report["outcome"]] += 1
                ended = f"the worker ended with {process.wait()}"
            except TimeoutError:
                ended = f"more than {args.seconds} s"
            finally:
                process.kill()
        if not ready:
            raise RuntimeError(f"the worker for {name} did not start: {ended}")
        if at < seeds.stop:
            tally.fail(at, ended)
            at += 1
    return tally


def lines(process: subprocess.Popen[bytes], first: float, seconds: float) -> Iterator[dict[str, Any]]:
    """A worker's reports. Raises TimeoutError when the next one takes longer than `seconds` (the first: `first`)."""
    assert process.stdout is not None
    descriptor, pending, patience = process.stdout.fileno(), b"", first
    while True:
        if not select.select([descriptor], [], [], patience)[0]:
            raise TimeoutError
        block = os.read(descriptor, 1 << 16)
        if not block:
            return
        *whole, pending = (pending + block).split(b"\n")
        for line in whole:
            yield json.loads(line)
            patience = seconds


def work(module: str, name: str, seeds: range, memory: int) -> None:
    """A worker: one report a line. What cases print goes to stderr."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="power-lab-fuzz-") as folder:
        case = import_module(module).TARGETS[name](Path(folder))
        limit = resident_and_reserved()[1] + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        print(json.dumps({"ready": True}), file=reports)
        before = 0
        for index, seed in enumerate(seeds):
            if index == WARM_CASES:
                before = resident_and_reserved()[0]
            print(json.dumps({"seed": seed, **_run(case, seed)}), file=reports)
        print(json.dumps({"growth": resident_and_reserved()[0] - before if before else 0}), file=reports)


def _run(case: Any, seed: int) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        result = {"outcome": case(seed)}
    except Exception as error:  # noqa: BLE001 -- whatever is raised is the finding
        result = {"error": f"{type(error).__name__}: {error}"[:2000], "trace": traceback.format_exc()[-4000:]}
    return {**result, "seconds": round(time.perf_counter() - started, 4)}


def resident_and_reserved() -> tuple[int, int]:
    """This process's resident memory and address space in bytes."""
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[1]) * resource.getpagesize(), int(pages[0]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
