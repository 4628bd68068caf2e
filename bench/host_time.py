"""What a step of plain decoding costs its host: CPU time of the engine's thread, with a device whose operations do nothing.

    python bench/host_time.py [TREE...] [--requests 1 16 64] [--listen none delta host] [--repeats 7] [--profile] [--output FILE]

A GPU is idle for as long as a step's planning, launch, commit and traces take longer than the step before it. Here all of that is the
engine's own code, on graphs, one step ahead; only the device's driver is missing. Several trees (of other commits) are measured in turn,
again and again, each in a process of its own, so that a busy machine is the same for all. Times are of the thread's CPU clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROMPT, WARM = 64, 40
LISTEN = ("none", "delta", "host")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="checkouts to measure; this one alone when there are none")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=400, help="of a repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--listen", nargs="+", choices=LISTEN, default=["none"], help="who hears of tokens")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, in this tree")
    parser.add_argument("--output", type=Path, help="also write the medians to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one or args.profile:
        for listen in args.listen:
            for requests in args.requests:
                print(json.dumps([listen, requests, measure(requests, args.steps, listen, args.profile)]))
        return
    trees = [tree.resolve() for tree in args.trees] or [ROOT]
    found: dict[tuple[str, int], dict[Path, list[float]]] = {}
    for _ in range(args.repeats):
        for tree in trees:
            for listen, requests, seconds in _in(tree, args):
                found.setdefault((listen, requests), {}).setdefault(tree, []).append(seconds)
    records = []
    for (listen, requests), by_tree in found.items():
        for tree, times in by_tree.items():
            best, median = min(times), statistics.median(times)
            told = f"{requests:3} requests, told {listen:5} {best * 1e6:7.0f} us a step (median {median * 1e6:.0f})"
            print(f"{told}, {best / requests * 1e6:5.1f} a request   {tree}")
            records.append({"tree": str(tree), "listen": listen, "requests": requests, "step_s": times})
    if args.output:
        args.output.write_text(json.dumps({"command": " ".join(sys.argv), "records": records}, indent=1) + "\n")


def _in(tree: Path, args: argparse.Namespace) -> list[tuple[str, int, float]]:
    """One repeat in a process that imports `tree`."""
    command = [sys.executable, __file__, "--one", "--steps", str(args.steps), "--listen", *args.listen]
    command += ["--requests", *map(str, args.requests)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tree, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


class Nowhere:
    """An operation table's arrays without its operations: a device that takes no time, and draws token after token.

    Args:
        ops: whose arrays and weights they are.
    """

    asynchronous = True
    row_buckets = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    _KEPT = ("empty", "asarray", "tohost", "view", "weight", "vector", "kv_cache", "rope_tables", "operand", "digest")

    def __init__(self, ops: Any) -> None:
        self._ops, self._step = ops, 0

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._ops, name)
        return target if name in self._KEPT or not callable(target) else lambda *_, **__: None

    def free_bytes(self) -> None: ...

    def reasons(self) -> tuple[str, ...]:
        return ()

    def step(self) -> Any:
        return nullcontext()

    def staging(self, raw: Any) -> Any:
        return _Staging(raw)

    def fetch(self, tokens: Any, *_: Any) -> Any:
        self._step += 1
        return _Fetched((tokens.cumsum(dtype="int32") * 0 + 32 + self._step % 64,))

    def capture(self, forward: Callable[[], Any]) -> tuple[Any, Any]:
        return _Graph(), forward()

    def replay(self, graph: Any) -> None: ...


class _Graph:
    nbytes = 1000


class _Staging:
    def __init__(self, raw: Any) -> None:
        self._hosts, self._turn = (raw.copy(), raw.copy()), 0

    def open(self) -> Any:
        return self._hosts[self._turn]

    def send(self, nbytes: int) -> None:
        self._turn ^= 1


class _Fetched:
    seconds = 1e-6

    def __init__(self, hosts: tuple[Any, ...]) -> None:
        self._hosts = hosts

    def get(self) -> tuple[Any, ...]:
        return self._hosts


def measure(requests: int, steps: int, listen: str, profile: bool = False) -> float:
    """CPU seconds of a step of so many requests: of the engine's thread, or of the process, where that tells clients of it too."""
    from power_lab.engine.request import SamplingParams
    from power_lab.kernels.table import select
    from tests import tiny

    engine = tiny.engine(
        tiny.Shape(),
        Nowhere(select("cpu", "exact", 1, tiny.cache_dir())),  # type: ignore[arg-type]
        kv_tokens=64 * (2 + (PROMPT + steps + WARM) // 64) * requests,
        max_batch=requests,
        step_tokens=max(512, requests),
    )
    params = SamplingParams(max_tokens=steps + 2 * WARM, ignore_eos=True)
    client = _Client() if listen == "host" else None
    for at in range(requests):
        prompt = [32 + at % 64, *(33 + i % 60 for i in range(PROMPT - 1))]
        if client is not None:
            client.submit(engine, at, prompt, params)
        else:
            engine.submit(prompt, params, on_delta=(lambda _: None) if listen == "delta" else None)
    spent: list[float] = []

    def decode() -> None:
        while min(live.request.emitted for live in engine._stepper.live.values()) < WARM:  # noqa: SLF001
            engine.step()
        clock = time.process_time if client is not None else time.thread_time
        with _profiling(profile):
            start = clock()
            for _ in range(steps):
                engine.step()
            if client is not None:
                client.wait()
            spent.append(clock() - start)

    thread = threading.Thread(target=decode)  # as an engine's own: signals come to the main one
    thread.start()
    thread.join()
    engine.close()
    if client is not None:
        client.close()
    return spent[0] / steps


class _Client:
    """A host's connection, its loop in a thread, to a process that reads and forgets."""

    def __init__(self) -> None:
        import asyncio
        import logging
        import socket
        from types import SimpleNamespace

        from power_lab.engine.host.connection import Connection

        ours, theirs = socket.socketpair()
        self._reader = subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL)
        theirs.close()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

        async def connect() -> Any:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            return Connection(SimpleNamespace(log=logging.getLogger()), reader, writer, 0)  # type: ignore[arg-type]

        self._connection = asyncio.run_coroutine_threadsafe(connect(), self._loop).result()

    def submit(self, engine: Any, request: int, prompt: list[int], params: Any) -> None:
        from types import SimpleNamespace

        from power_lab.engine.host import protocol as wire
        from power_lab.engine.host.connection import Run

        frame = wire.Submit(id=request, engine="", prompt=tuple(prompt), params=params)  # type: ignore[arg-type]
        self._connection._start(engine, frame, Run(request, SimpleNamespace(runs=1)))  # type: ignore[arg-type]  # noqa: SLF001

    def wait(self) -> None:
        """Until the loop has done what it was told before."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(done.set)
        done.wait()

    def close(self) -> None:
        self.wait()
        self._loop.call_soon_threadsafe(self._connection.hang_up)
        self._reader.wait()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _profiling:
    def __init__(self, on: bool) -> None:
        self._on = on

    def __enter__(self) -> None:
        if self._on:
            import cProfile

            self._profile = cProfile.Profile()
            self._profile.enable()

    def __exit__(self, *_: object) -> None:
        if self._on:
            import pstats

            self._profile.disable()
            pstats.Stats(self._profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
