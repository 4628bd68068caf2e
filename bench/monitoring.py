"""What looking costs: engine-thread CPU time a token with nobody and with two subscribers at 20 Hz, and memory of what is looked at.

    python bench/monitoring.py [--model smollm2] [--tokens 100] [--pairs 20] [--hz 20] [--subscribers 2] [--output FILE]

A real engine host runs one request after another; every second one is watched. Each watched run is compared with the one before it, so that
what else the machine does is in both; CPU time is the engine thread's own, by the system's clock of that thread. `--model tiny` is a
random model whose steps are almost all Python: there a cost shows that a real model's arithmetic hides.

The client's memory is that of a process that is told 100,000 samples, through the decoder and the connection that notebooks use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.cpu import about  # noqa: E402
from power_lab.engine.config import EngineConfig, HostSettings, Paths  # noqa: E402
from power_lab.engine.engine import Engine  # noqa: E402
from power_lab.engine.host import protocol as wire  # noqa: E402
from power_lab.engine.host.api import OnProgress  # noqa: E402
from power_lab.engine.host.client import HostClient  # noqa: E402
from power_lab.engine.host.remote import RemoteEngine  # noqa: E402
from power_lab.engine.request import SamplingParams  # noqa: E402
from power_lab.engine.vitals import Vitals  # noqa: E402

CPU = "\0cpu"  # asks a `Measured` engine for the nanoseconds of its thread
EVENTS = 100_000


class Measured(Engine):
    """An engine that tells how much CPU time its thread has used."""

    def tokenize(self, text: str) -> list[int]:
        if text != CPU:
            return super().tokenize(text)
        assert self._thread is not None and self._thread.ident is not None
        return [time.clock_gettime_ns(time.pthread_getcpuclockid(self._thread.ident))]


def make(config: EngineConfig, *, paths: Paths, progress: OnProgress) -> Measured:
    """For hosts: the engine of a configuration; model "tiny" is random."""
    if config.model != "tiny":
        return Measured(config, paths=paths, progress=progress)
    from power_lab.kernels.table import select
    from tests import tiny

    return Measured(config, loaded=tiny.loaded(tiny.Shape(layers=1), select("cpu", "exact", 1, paths.kernels)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=100, help="of a run")
    parser.add_argument("--batch", type=int, default=1, help="requests at once")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--subscribers", type=int, default=2)
    parser.add_argument("--hz", type=float, default=20.0)
    parser.add_argument("--output", type=Path, help="also write the result with machine and commit to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="power-lab-watch-") as folder:
        result = measure(Path(folder), args)
    for key, value in result.items():
        print(f"{key:36} {value}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"run": about(args), **result}, indent=1) + "\n")


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    paths = Paths(Paths.default().cache, folder / "run", folder / "state")
    settings = HostSettings(factory=f"{Path(__file__).resolve()}:make", client="bench", linger_s=1)
    client = HostClient.connect(paths, settings)
    config = EngineConfig(model=args.model, device=args.device, threads=args.threads, max_batch=max(1, args.batch))
    engine = RemoteEngine(client, client.load(config))
    watchers = [HostClient.connect(paths, settings) for _ in range(args.subscribers)]
    try:
        return {
            "model": engine.facts.model,
            "device": engine.facts.device,
            **watch(engine, watchers, args),
            **told(client),
        }
    finally:
        for one in watchers:
            one.close()
        client.shutdown(drain=False)


def watch(engine: RemoteEngine, watchers: list[HostClient], args: argparse.Namespace) -> dict[str, Any]:
    """Runs in pairs: unwatched, watched."""
    runs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    samples = 0
    for _ in range(3):
        run(engine, args)  # compiles and captures
    began = 0.0
    for pair in range(args.pairs):
        for watched in (False, True) if pair % 2 else (True, False):
            seen: list[float] = []
            feeds = [
                one.subscribe(lambda vitals, seen=seen: seen.append(vitals.at), args.hz) for one in watchers if watched
            ]
            start = time.perf_counter()
            runs[watched].append(run(engine, args))
            began += (time.perf_counter() - start) * watched
            samples += len(seen)
            for feed in feeds:
                feed.close()
    cpu, speed = ([one[at] for one in runs[False]] for at in (0, 1))
    cpu_ratios, speed_ratios = (
        [there[at] / without[at] for without, there in zip(runs[False], runs[True], strict=True)] for at in (0, 1)
    )
    return {
        "subscribers": args.subscribers,
        "hz": args.hz,
        "samples_a_second_each": round(samples / max(1, args.subscribers) / began, 2),
        "runs": 2 * args.pairs,
        "tokens_a_run": args.tokens * args.batch,
        "cpu_us_a_token_unwatched": round(statistics.median(cpu) * 1e6, 2),
        "tokens_per_s_unwatched": round(statistics.median(speed), 1),
        "cpu_ratio": spread(cpu_ratios),
        "tokens_per_s_ratio": spread(speed_ratios),
    }


def run(engine: RemoteEngine, args: argparse.Namespace) -> tuple[float, float]:
    """CPU seconds of the engine thread a token, and tokens a second."""
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=1)
    before, start = engine.tokenize(CPU)[0], time.perf_counter()
    submitted = [engine.submit([number + 1, 2, 3, 4], params) for number in range(args.batch)]
    for one in submitted:
        one.result()
    seconds, tokens = time.perf_counter() - start, args.tokens * args.batch
    return (engine.tokenize(CPU)[0] - before) / 1e9 / tokens, tokens / seconds


def spread(ratios: list[float]) -> dict[str, float]:
    """Median of paired ratios, with the interval that a sign test gives it (about 95 %)."""
    ordered, count = sorted(ratios), len(ratios)
    off = max(0, int(count / 2 - 0.98 * count**0.5))
    low, high = ordered[off], ordered[count - 1 - off]
    return {"median": round(statistics.median(ratios), 4), "low": round(low, 4), "high": round(high, 4)}


def told(client: HostClient) -> dict[str, Any]:
    """Memory of this process over 100,000 samples."""
    arrived = threading.Event()
    kept: list[Vitals] = []

    def first(vitals: Vitals) -> None:
        kept[:] = [vitals]
        arrived.set()

    feed = client.subscribe(first, 20)
    assert arrived.wait(10), "no sample came"
    feed.close()
    count = 0

    def listen(vitals: Vitals) -> None:
        nonlocal count
        count += 1

    feed = client.subscribe(listen, 0.2)
    body = msgspec.msgpack.encode(wire.Sample(id=feed.id, vitals=kept[0]))
    process = psutil.Process()
    for _ in range(1000):
        client.deliver(wire.reply_of(body))
    before, start = process.memory_info().rss, time.perf_counter()
    for _ in range(EVENTS):
        client.deliver(wire.reply_of(body))
    seconds, grown = time.perf_counter() - start, process.memory_info().rss - before
    feed.close()
    assert count >= EVENTS, "samples were lost"
    return {
        "events": EVENTS,
        "bytes_an_event_on_the_wire": len(body),
        "client_memory_grown_bytes": grown,
        "client_us_an_event": round(seconds / EVENTS * 1e6, 2),
    }


if __name__ == "__main__":
    main()
