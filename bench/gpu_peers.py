"""Other engines on the same geometries: transformers measured in a process of its own, vLLM as recorded elsewhere.

    python bench/gpu_peers.py GEOMETRY eager|static [--device cuda] [--prompt 128] [--count 64]

prints one JSON record. `static` is `generate` with a static cache, which compiles the decode step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.geometries import GEOMETRIES  # noqa: E402

RUNS = 5
PATIENCE = {"eager": 90, "static": 100}  # seconds for import, weights, compiling and measuring

RECORDED: dict[str, list[dict[str, Any]]] = {
    "qwen3-8b": [
        {"engine": "vLLM 0.26.0", "batch": 1, "tokens_per_s": 195.3, "end_to_end_tokens_per_s": 189.0},
        {"engine": "vLLM 0.26.0", "batch": 4, "tokens_per_s": 769},
        {"engine": "vLLM 0.26.0", "batch": 64, "tokens_per_s": 10207, "end_to_end_tokens_per_s": 9156},
        {"engine": "vLLM 0.26.0 batch-invariant", "batch": 1, "tokens_per_s": 51.2, "end_to_end_tokens_per_s": 51.1},
        {"engine": "vLLM 0.26.0 batch-invariant", "batch": 4, "tokens_per_s": 215},
        {"engine": "vLLM 0.26.0 batch-invariant", "batch": 64, "tokens_per_s": 4081, "end_to_end_tokens_per_s": 3851},
    ],
    "qwen3-0.6b": [
        {"engine": "vLLM 0.26.0", "batch": 1, "tokens_per_s": 355, "end_to_end_tokens_per_s": 341},
        {"engine": "vLLM 0.26.0", "batch": 4, "tokens_per_s": 1477},
        {"engine": "vLLM 0.26.0", "batch": 16, "tokens_per_s": 6009},
        {"engine": "vLLM 0.26.0", "batch": 64, "tokens_per_s": 12873, "end_to_end_tokens_per_s": 12410},
    ],
}
"""Recorded elsewhere: one run each on an H200 of another day, prompt 128, 256 new tokens, greedy, no prefix cache (29 Nov 2026)."""


def records(geometry: str, device: str) -> list[dict[str, Any]]:
    """What transformers reaches now, and what was recorded; an engine that fails or takes too long says so."""
    measured = [_apart(geometry, how, device) for how in PATIENCE]
    marked = {"phase": "decode", "recorded_elsewhere": True}
    return [*measured, *(marked | record for record in RECORDED.get(geometry, []))]


def _apart(geometry: str, how: str, device: str) -> dict[str, Any]:
    """One measurement in another process, which a slow compiler cannot hold up."""
    named = {"phase": "decode", "engine": f"transformers, {how}", "batch": 1}
    command = [sys.executable, __file__, geometry, how, "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE[how])
    except subprocess.TimeoutExpired:
        return named | {"failed": f"not done after {PATIENCE[how]} s"}
    if done.returncode:
        return named | {"failed": done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else "no message"}
    return named | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("how", choices=PATIENCE)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--count", type=int, default=64)
    args = parser.parse_args()

    import torch
    import transformers

    config = dict(GEOMETRIES[args.geometry])
    made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()
        ids = torch.arange(args.prompt)[None]
    cache = {"cache_implementation": "static"} if args.how == "static" else {}

    def spent(count: int) -> float:
        if args.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        out = model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, **cache)
        out.cpu()
        assert out.shape[1] == args.prompt + count
        return time.perf_counter() - start

    with torch.no_grad():
        first = time.perf_counter()
        spent(8)
        spent(args.count)
        ready = time.perf_counter() - first
        rates = [(args.count - 1) / (spent(args.count) - spent(1)) for _ in range(RUNS)]
    result = {"tokens_per_s": round(statistics.median(rates), 2), "best_tokens_per_s": round(max(rates), 2)}
    about = {"runs": RUNS, "version": transformers.__version__, "ready_s": round(ready, 1)}
    print(json.dumps(result | about))


if __name__ == "__main__":
    main()
