"""CPU speed beside llama.cpp and transformers, in one run: prefill 512, decode 128, batched steps.

`python bench/cpu.py --json` prints a list of records {model, engine, phase, batch, tokens_per_s, floor_fraction, ...}. Correctness comes
first: the run stops when Power Lab's greedy continuation is not what transformers says on the dequantised weights. Engines take turns in
each round, so that a noisy neighbour hits them all; figures are medians.

`floor_fraction` is the read bandwidth that the phase achieves (stored weight bytes times weight passes a second) over the bandwidth that
numpy or torch reads a large array with, measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PREFILL, DECODE = 512, 128
BATCHES = (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print records as JSON only")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", default="llama.cpp,transformers", help="comma-separated; empty for none")
    parser.add_argument("--output", type=Path, help="also write records with machine and commit to this file")
    args = parser.parse_args()
    say = (lambda *a: None) if args.json else print

    ours = PowerLab(args.threads)
    peers = [PEERS[name](ours, args.threads) for name in args.peers.split(",") if name]
    for peer in peers:
        peer.check(ours)
    floor = read_bandwidth(args.threads)
    say(f"read bandwidth {floor / 1e9:.1f} GB/s; weights {ours.weight_bytes / 1e6:.1f} MB a pass")

    samples: dict[tuple[str, str, int], list[float]] = {}
    for _ in range(args.rounds):
        for engine in (ours, *peers):
            for phase, batch, measure in engine.phases():
                samples.setdefault((engine.name, phase, batch), []).append(measure())
    records = [record(key, values, ours, floor) for key, values in samples.items()]
    one = {r["batch"]: r["step_ms"] for r in records if r["phase"] == "step"}
    for r in records:
        say(
            f"{r['engine']:14} {r['phase']:8} batch {r['batch']:2}  {r['tokens_per_s']:8.1f} tok/s  "
            f"{r['gb_per_s']:5.1f} GB/s ({r['floor_fraction']:.0%} of the floor)  best {r['best_tokens_per_s']:.1f}"
        )
    for batch in BATCHES[1:]:
        say(f"step of {batch} rows: {one[batch] / one[1]:.2f} of a 1-row step")
    if args.json:
        print(json.dumps(records, indent=1))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"run": about(args), "records": records}, indent=1) + "\n")


def record(key: tuple[str, str, int], values: list[float], ours: PowerLab, floor: float) -> dict[str, Any]:
    """Values are tokens per second; a prefill reads the weights once per step of 512 rows."""
    engine, phase, batch = key
    rate, best = statistics.median(values), max(values)
    passes = rate / (PREFILL if phase == "prefill" else batch)
    return {
        "model": "smollm2-135m-instruct-q4_1",
        "engine": engine,
        "phase": phase,
        "batch": batch,
        "tokens_per_s": round(rate, 2),
        "best_tokens_per_s": round(best, 2),
        "step_ms": round(1e3 * batch / rate, 3),
        "gb_per_s": round(passes * ours.weight_bytes / 1e9, 2),
        "floor_fraction": round(passes * ours.weight_bytes / floor, 4),
        "runs": len(values),
    }


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


class PowerLab:
    """Ours, in exact mode, through the same engine that serves notebooks."""

    name = "power-lab"

    def __init__(self, threads: int) -> None:
        from power_lab.engine.config import EngineConfig, Paths
        from power_lab.engine.engine import Engine
        from power_lab.models import resolve

        self.path = resolve("smollm2", Paths.default()).path
        config = EngineConfig(
            model="smollm2", threads=threads, prefix_cache=False, step_tokens=PREFILL, max_batch=max(BATCHES)
        )
        self.engine = Engine(config, threaded=False)
        self.weight_bytes = sum(self.engine.facts.quantisation.values())
        text = (ROOT / "LICENSE").read_text()
        self.tokens = self.engine.tokenize(text)[: PREFILL + 8]

    def phases(self) -> list[tuple[str, int, Callable[[], float]]]:
        decode = [("decode" if b == 1 else "batch", b, lambda b=b: self.decode(b)) for b in BATCHES]
        return [("prefill", 1, self.prefill), *decode, *[("step", b, lambda b=b: self.step(b)) for b in BATCHES]]

    def prefill(self) -> float:
        record = self.engine.generate(self.tokens[:PREFILL], self._params(1))
        return PREFILL / record.prefill_s

    def decode(self, batch: int) -> float:
        tickets = [self.engine.submit(self.tokens[i : i + 8], self._params(DECODE)) for i in range(batch)]
        records = [ticket.result() for ticket in tickets]
        return sum(len(r.tokens) - 1 for r in records) / max(r.decode_s for r in records)

    def step(self, rows: int) -> float:
        """Rows a second of steps with exactly `rows` decode rows: the median step's time alone."""
        tickets = [self.engine.submit(self.tokens[i : i + 8], self._params(48)) for i in range(rows)]
        records = [ticket.result() for ticket in tickets]
        walls = [s.wall_s for s in records[0].steps if s.decode_rows == rows and not s.prefill_rows]
        return rows / statistics.median(walls)

    def continuation(self, count: int) -> list[int]:
        return list(self.engine.generate(self.tokens[:64], self._params(count)).tokens)

    def text(self, tokens: list[int]) -> str:
        return self.engine._loaded.tokenizer.decode(tokens)

    def _params(self, count: int) -> Any:
        from power_lab.engine.request import SamplingParams

        return SamplingParams(max_tokens=count, ignore_eos=True)


class LlamaCpp:
    """llama.cpp as packaged by xllamacpp: its server, its own timings, same file, same token ids."""

    name = "llama.cpp"

    def __init__(self, ours: PowerLab, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(ours.path)
        params.n_ctx = 1024
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.warmup = True
        params.verbosity = -1
        self._server = xllamacpp.Server(params)
        self._tokens = ours.tokens

    def check(self, ours: PowerLab) -> None:
        """It quantises activations, so only the first tokens are expected to agree."""
        got = self._complete(self._tokens[:64], 4)["choices"][0]["text"]
        want = ours.text(ours.continuation(2))
        if not got.startswith(want):
            raise SystemExit(f"llama.cpp says {got!r}, Power Lab {want!r}: the comparison is off")

    def phases(self) -> list[tuple[str, int, Callable[[], float]]]:
        return [
            ("prefill", 1, lambda: self._timed(PREFILL, 1, "prompt")),
            ("decode", 1, lambda: self._timed(8, DECODE, "predicted")),
        ]

    def _timed(self, prompt: int, count: int, part: str) -> float:
        """Tokens a second of its own clock, which leaves out all of the server's overhead."""
        timings = self._complete(self._tokens[:prompt], count)["timings"]
        expected = prompt if part == "prompt" else count
        if timings[f"{part}_n"] != expected:
            raise SystemExit(f"llama.cpp computed {timings[f'{part}_n']} {part} tokens and not {expected}")
        return timings[f"{part}_per_second"]

    def _complete(self, tokens: list[int], count: int) -> dict[str, Any]:
        body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        return self._server.handle_completions(body)


class Transformers:
    """transformers in bf16 on the dequantised weights, eager with a cache."""

    name = "transformers"

    def __init__(self, ours: PowerLab, threads: int) -> None:
        import torch

        from power_lab.engine.weights.gguf_model import GgufModel
        from tests.engine.test_reference import hf_model

        torch.set_num_threads(threads)
        self._exact = hf_model(GgufModel.open(ours.path))
        self._model: Any = None
        self._tokens = ours.tokens

    def check(self, ours: PowerLab) -> None:
        """In f32 it must say what we say; then it is cast to bf16, its faster form."""
        import torch

        prompt = torch.tensor([self._tokens[:64]])
        got = self._exact.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False)[0, 64:].tolist()
        if got != ours.continuation(16):
            raise SystemExit(
                f"transformers f32 says {got}, Power Lab {ours.continuation(16)}: not measured while wrong"
            )
        self._model, self._exact = self._exact.to(torch.bfloat16), None
        gc.collect()

    def phases(self) -> list[tuple[str, int, Callable[[], float]]]:
        return [("prefill", 1, self.prefill), ("decode", 1, self.decode)]

    def prefill(self) -> float:
        import torch

        with torch.inference_mode():
            start = time.perf_counter()
            self._model(torch.tensor([self._tokens[:PREFILL]]), logits_to_keep=1)
            return PREFILL / (time.perf_counter() - start)

    def decode(self) -> float:
        import torch

        prompt = torch.tensor([self._tokens[:8]])
        with torch.inference_mode():
            start = time.perf_counter()
            self._model.generate(prompt, max_new_tokens=1, do_sample=False)
            first = time.perf_counter() - start
            start = time.perf_counter()
            self._model.generate(prompt, max_new_tokens=DECODE, min_new_tokens=DECODE, do_sample=False)
            return (DECODE - 1) / (time.perf_counter() - start - first)


PEERS: dict[str, Callable[[PowerLab, int], Any]] = {"llama.cpp": LlamaCpp, "transformers": Transformers}

if __name__ == "__main__":
    main()
