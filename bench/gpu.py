"""Speed of the GPU engine on a real model, after its answers were compared with the CPU's.

    python bench/gpu.py MODEL [--output FILE]

Prints tokens a second with the bandwidth that the weights' bytes amount to, beside a copy's in the same run. Steps are timed from
outside, so they hold everything: planning, the replayed graph, sampling, the copy back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.cpu import about  # noqa: E402
from power_lab.engine.config import EngineConfig  # noqa: E402
from power_lab.engine.engine import Engine  # noqa: E402
from power_lab.engine.request import SamplingParams  # noqa: E402

BATCHES = (1, 4, 16, 64)
COMPARED = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=8, help="of the CPU engine that is compared with")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    divergence, same = compare(args.model, args.threads)
    print(f"against the CPU: KL {divergence:.5f}, likeliest token the same at {same:.1%} of {COMPARED} positions")
    if divergence > 0.002 or same < 0.9:
        raise SystemExit("not measured while wrong")
    floor = copy_bandwidth()
    print(f"copy bandwidth {floor / 1e12:.2f} TB/s")
    records = [{"phase": "parity", "kl": divergence, "same": same}, *measure(args.model, floor)]
    if args.output:
        args.output.write_text(
            json.dumps({"run": about(args), "copy_bytes_per_s": floor, "records": records}, indent=1) + "\n"
        )


def compare(model: str, threads: int) -> tuple[float, float]:
    """Mean divergence of the GPU's next-token distributions from the CPU's, and how often the likeliest token is the same."""
    import numpy as np

    rows: dict[str, Any] = {}
    for device in ("cpu", "cuda"):
        seen: list[Any] = []
        engine = Engine(
            EngineConfig(model=model, device=device, threads=threads, prefix_cache=False),
            threaded=False,
            observer=lambda plan, logits, seen=seen: seen.append(logits[-1].copy()),
        )
        tokens = engine.tokenize((ROOT / "LICENSE").read_text())
        for at in range(COMPARED):
            start = time.perf_counter()
            engine.submit(tokens[at : at + 40], SamplingParams(max_tokens=1)).result()
            if at == 0:
                print(f"{device}: first answer after {time.perf_counter() - start:.2f} s")
        rows[device] = np.array(seen, np.float64)
        engine.close()
    cpu, gpu = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (rows["cpu"], rows["cuda"]))
    return float((np.exp(cpu) * (cpu - gpu)).sum(-1).mean()), float((cpu.argmax(-1) == gpu.argmax(-1)).mean())


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 2 GB on the device, best of 7."""
    import torch

    source = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = max(best, 2 * source.nbytes / (begin.elapsed_time(end) / 1e3))
    return best


def measure(model: str, floor: float) -> list[dict[str, Any]]:
    engine = Engine(
        EngineConfig(model=model, device="cuda", prefix_cache=False, max_batch=64, kv_tokens=65536, step_tokens=4096),
        threaded=False,
    )
    stored = sum(engine.facts.quantisation.values())
    tokens = engine.tokenize((ROOT / "LICENSE").read_text())
    made = []
    for batch in BATCHES:
        for _ in range(2):  # the first compiles and captures
            tickets = [
                engine.submit(tokens[i : i + 128], SamplingParams(max_tokens=200, ignore_eos=True))
                for i in range(batch)
            ]
            walls: list[tuple[float, float]] = []
            while not all(ticket._live.done.is_set() for ticket in tickets):
                start = time.perf_counter()
                engine.step()
                walls.append((start, time.perf_counter() - start))
        step = statistics.median(wall for _, wall in walls[5:])
        made.append(line("decode", batch, batch / step, step, stored, floor))
        forward = graph_time(engine, batch)
        if forward:
            made.append(line("graph", batch, batch / forward, forward, stored, floor))
    rates = []
    for _ in range(6):
        start = time.perf_counter()
        engine.submit(tokens[:2048], SamplingParams(max_tokens=1)).result()
        rates.append(min(2048, len(tokens)) / (time.perf_counter() - start))
    made.append({"phase": "prefill", "tokens_per_s": round(statistics.median(rates[1:]), 1)})
    print(f"prefill {made[-1]['tokens_per_s']:.0f} tok/s")
    print({key: value for key, value in vars(engine._runner.graphs).items() if isinstance(value, int)})
    engine.close()
    return made


def graph_time(engine: Any, batch: int) -> float:
    """Seconds of the forward pass alone: its graph replayed many times between two events."""
    import torch

    kept = engine._runner.graphs._kept.get((batch, batch))
    if kept is None:
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(50):
        engine._runner.ops.replay(kept[0])
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / 50


def line(phase: str, batch: int, rate: float, seconds: float, stored: int, floor: float) -> dict[str, Any]:
    print(
        f"{phase:7} {batch:3}  {rate:9.1f} tok/s  {seconds * 1e3:7.3f} ms  {stored / seconds / floor:.0%} of copy bandwidth"
    )
    return {
        "phase": phase,
        "batch": batch,
        "tokens_per_s": round(rate, 1),
        "ms": round(seconds * 1e3, 4),
        "floor_fraction": round(stored / seconds / floor, 4),
    }


if __name__ == "__main__":
    main()
