"""CPU speed beside llama.cpp and transformers, in one run.

`python bench/cpu.py --json` prints a list of records {model, engine, phase, batch, tokens_per_s, floor_fraction, ...}. Phases: a prompt
of 512 tokens, 128 decoded ones, batches, steps alone, 4 and 16 requests at once, an answer that quotes its prompt with and without
lookup, loading. Correctness comes first: the run stops when Power Lab's greedy continuation is not what transformers says on the
dequantised weights. Engines take turns in each round, so that a noisy neighbour hits them all; figures are medians.

`floor_fraction` is the read bandwidth that the phase achieves (stored weight bytes times weight passes a second) over the bandwidth that
numpy or torch reads a large array with, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.engines import BATCHES, PEERS, PREFILL, PowerLab  # noqa: E402

Samples = dict[tuple[str, str, int], list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print records as JSON only")
    parser.add_argument("--models", default="smollm2,gemma3-270m", help="comma-separated names")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", default="llama.cpp,transformers", help="comma-separated; empty for none")
    parser.add_argument("--output", type=Path, help="also write records with machine and commit to this file")
    args = parser.parse_args()
    say = (lambda *a: None) if args.json else print

    floor = read_bandwidth(args.threads)
    say(f"read bandwidth {floor / 1e9:.1f} GB/s")
    records: list[dict[str, Any]] = []
    for model in args.models.split(","):
        ours = PowerLab(model, args.threads)
        say(f"{model}: weights {ours.weight_bytes / 1e6:.1f} MB a pass")
        peers = [PEERS[name](ours) for name in args.peers.split(",") if name]
        for peer in peers:
            peer.check(ours)
        made = [record(key, values, ours, floor) for key, values in measure(ours, peers, args.rounds).items()]
        loading = [ours.loading() for _ in range(args.rounds + 1)][1:]
        made.append(
            {"model": model, "engine": ours.name, "phase": "load", "seconds": round(statistics.median(loading), 3)}
        )
        show(made, ours, say)
        records += made
        ours.engine.close()
    if args.json:
        print(json.dumps(records, indent=1))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"run": about(args), "records": records}, indent=1) + "\n")


def measure(ours: PowerLab, peers: list[Any], rounds: int) -> Samples:
    samples: Samples = {}
    for _ in range(rounds):
        for engine in (ours, *peers):
            for phase, batch, run in engine.phases():
                samples.setdefault((engine.name, phase, batch), []).append(run())
    return samples


def show(records: list[dict[str, Any]], ours: PowerLab, say: Any) -> None:
    rate = {(r["engine"], r["phase"], r["batch"]): r["tokens_per_s"] for r in records if "batch" in r}
    for r in records[:-1]:
        floor = f"  {r['gb_per_s']:5.1f} GB/s ({r['floor_fraction']:.0%} of the floor)" if "gb_per_s" in r else ""
        say(
            f"{r['engine']:14} {r['phase']:16} {r['batch']:3}  {r['tokens_per_s']:8.1f} tok/s  best {r['best_tokens_per_s']:8.1f}{floor}"
        )
    say(f"{ours.name:14} load {records[-1]['seconds']:.2f} s")
    for (engine, phase, batch), value in rate.items():
        if engine != ours.name:
            say(f"{phase} {batch}: {rate[ours.name, phase, batch] / value:.2f} of {engine}")
    one = rate[ours.name, "step", 1]
    for batch in (*BATCHES[1:], 16):
        say(f"step of {batch} rows: {batch * one / rate[ours.name, 'step', batch]:.2f} of a 1-row step")
    plain, lookup = (rate[ours.name, phase, 1] for phase in ("quote", "quote by lookup"))
    say(
        f"lookup on a quoting task: {lookup / plain:.2f} of plain decoding; {statistics.median(ours.accepted):.0%} accepted"
    )


def record(key: tuple[str, str, int], values: list[float], ours: PowerLab, floor: float) -> dict[str, Any]:
    """Values are tokens per second; a prefill reads the weights once per step of 512 rows."""
    engine, phase, batch = key
    rate, best = statistics.median(values), max(values)
    made = {
        "model": ours.model,
        "engine": engine,
        "phase": phase,
        "batch": batch,
        "tokens_per_s": round(rate, 2),
        "best_tokens_per_s": round(best, 2),
        "runs": len(values),
    }
    if phase in ("prefill", "decode", "batch", "step"):  # elsewhere passes over the weights are not counted
        passes = rate / (PREFILL if phase == "prefill" else batch)
        made |= {
            "step_ms": round(1e3 / passes, 3),
            "gb_per_s": round(passes * ours.weight_bytes / 1e9, 2),
            "floor_fraction": round(passes * ours.weight_bytes / floor, 4),
        }
    return made


def read_bandwidth(threads: int) -> float:
    """Bytes a second that `threads` threads read a 512 MB array with: the better of numpy's max and torch's sum, best of 7."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import torch

    torch.set_num_threads(threads)
    array = np.ones(512_000_000 // 4, np.float32)
    parts, whole = np.array_split(array, threads), torch.from_numpy(array)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for read in (lambda: list(pool.map(np.max, parts)), whole.sum):
            for _ in range(7):
                start = time.perf_counter()
                read()
                best = max(best, array.nbytes / (time.perf_counter() - start))
    return best


def about(args: argparse.Namespace) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    commit = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "threads": args.threads,
    }


if __name__ == "__main__":
    main()
