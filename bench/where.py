"""Where the time of a decode step goes: each recorded operation of a real model, timed in its place, against the read bandwidth.

    python bench/where.py [--models smollm2,gemma3-270m] [--threads 2] [--rows 1] [--steps 60] [--context 200] [--output FILE]

The step's program is run job by job, so that weights and caches are as cold as in a step; a job's time is the median over all steps. Timing
from Python adds about a microsecond to each job, so that the sum exceeds the step's own time, which is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.cpu import about, read_bandwidth  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2,gemma3-270m", help="comma-separated names")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1, help="requests that decode at once")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--context", type=int, default=200, help="tokens before the first step")
    parser.add_argument("--output", type=Path, help="also write records with machine and commit to this file")
    args = parser.parse_args()
    floor = read_bandwidth(args.threads)
    print(f"read bandwidth {floor / 1e9:.1f} GB/s")
    records = [record for model in args.models.split(",") for record in steps(model, args, floor)]
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(
            json.dumps({"run": about(args), "floor_gb_per_s": floor / 1e9, "records": records}, indent=1) + "\n"
        )


def steps(model: str, args: argparse.Namespace, floor: float) -> list[dict[str, Any]]:
    from power_lab.engine.config import EngineConfig
    from power_lab.engine.engine import Engine
    from power_lab.engine.request import SamplingParams
    from power_lab.kernels.numba.team import run

    config = EngineConfig(model=model, threads=args.threads, max_batch=args.rows, step_tokens=4096)
    engine = Engine(config, threaded=False)
    tokens = engine.tokenize((ROOT / "LICENSE").read_text())
    params = SamplingParams(max_tokens=2 * args.steps + 4, ignore_eos=True)
    tickets = [engine.submit(tokens[i : i + args.context], params) for i in range(args.rows)]
    while engine.status().running < args.rows or not engine.step():
        engine.step()
    whole = []
    for _ in range(args.steps):
        start = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - start)
    runner, ops = engine._runner, engine._runner.ops
    graph, _ = runner.graphs._kept[args.rows, args.rows]
    times = [[] for _ in graph.words]  # type: ignore[attr-defined]

    def replay(graph: Any) -> None:
        ops._wake()  # type: ignore[attr-defined]
        for index in range(len(graph.words)):
            start = time.perf_counter()
            run(ops._block, graph.words[index : index + 1], 1)  # type: ignore[attr-defined]
            times[index].append(time.perf_counter() - start)

    ops.replay = replay  # type: ignore[method-assign]
    for _ in range(args.steps):
        engine.step()
    del ops.replay
    for ticket in tickets:
        ticket.cancel()
    records = summary(
        model, args.rows, [statistics.median(t) for t in times], described(engine), statistics.median(whole), floor
    )
    engine.close()
    return records


def described(engine: Any) -> list[tuple[str, int]]:
    """(what, bytes of weights) of every operation of a one-row step, in order: as `Decoder.forward` calls them."""
    calls: list[tuple[str, int]] = []

    class Listing:
        def parts(self, out: Any) -> Any:
            return out

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> None:
                weights = [
                    w
                    for arg in args
                    for w in (arg if isinstance(arg, tuple) else (arg,))
                    if type(w).__name__ == "Weight"
                ]
                label = name
                if weights and name != "embed":
                    rows, kinds = sum(w.rows for w in weights), "+".join(sorted({w.type.name for w in weights}))
                    label = f"{name} {rows}x{weights[0].cols} {kinds}"
                calls.append((label, 0 if name == "embed" else sum(w.data.nbytes for w in weights)))

            return call

    model, runner = engine._loaded.model, engine._runner
    from power_lab.engine.plan import Span, StepPlan

    batch = runner.inputs.fill(StepPlan(0, (Span(0, 0, (1,), 0, 1, (1,)),)))
    model.ops, kept = Listing(), model.ops
    try:
        model.forward(batch, runner.caches, runner.workspace)
    finally:
        model.ops = kept
    return calls


def summary(
    model: str, rows: int, times: list[float], calls: list[tuple[str, int]], whole: float, floor: float
) -> list[dict[str, Any]]:
    groups: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for (label, size), seconds in zip(calls, times, strict=True):
        groups[label].append((seconds, size))
    total = sum(times)
    print(f"{model}, {rows} rows: step {whole * 1e3:.2f} ms; {len(times)} operations, {total * 1e3:.2f} ms one by one")
    records = []
    for label, parts in sorted(groups.items(), key=lambda item: -sum(s for s, _ in item[1])):
        seconds, size = sum(s for s, _ in parts), sum(b for _, b in parts)
        made = {"model": model, "rows": rows, "operation": label, "calls": len(parts), "us": round(seconds * 1e6, 1)}
        line = f"  {label:38} {len(parts):4} calls {seconds * 1e6:9.1f} us {seconds / total:5.0%}"
        if size:
            made |= {"gb_per_s": round(size / seconds / 1e9, 2), "floor_fraction": round(size / seconds / floor, 3)}
            line += f" {size / seconds / 1e9:6.1f} GB/s ({size / seconds / floor:.0%} of the floor)"
        print(line)
        records.append(made)
    records.append({"model": model, "rows": rows, "operation": "step", "us": round(whole * 1e6, 1)})
    return records


if __name__ == "__main__":
    main()
