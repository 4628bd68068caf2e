"""Other engines on the same geometries: transformers measured in a process of its own, vLLM and llama.cpp as recorded elsewhere.

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
from power_lab.engine.models.spec import ModelSpec  # noqa: E402

RUNS = 5
HOW = ("eager", "static")
PATIENCE = 300.0  # seconds for import, weights, compiling and measuring; 100 were too few on a machine that compiled for others, too

VLLM, INVARIANT, LLAMA = "vLLM 0.26.0", "vLLM 0.26.0 batch-invariant", "llama.cpp 0.4.0"
EAGER, STATIC = "transformers 5.17, eager", "transformers 5.17, static"
AS_BF16 = {"weights": "the Q4_1 file as bf16"}
AS_FILE = {"weights": "the Q4_1 file"}
RECORDED: dict[str, list[dict[str, Any]]] = {
    "qwen3-8b": [
        {"engine": VLLM, "batch": 1, "tokens_per_s": 195.3, "end_to_end_tokens_per_s": 189.0},
        {"engine": VLLM, "batch": 4, "tokens_per_s": 769},
        {"engine": VLLM, "batch": 64, "tokens_per_s": 10207, "end_to_end_tokens_per_s": 9156},
        {"engine": INVARIANT, "batch": 1, "tokens_per_s": 51.2, "end_to_end_tokens_per_s": 51.1},
        {"engine": INVARIANT, "batch": 4, "tokens_per_s": 215},
        {"engine": INVARIANT, "batch": 64, "tokens_per_s": 4081, "end_to_end_tokens_per_s": 3851},
        {"engine": EAGER, "batch": 1, "tokens_per_s": 26.5, "of": "128 new tokens"},
        {"engine": STATIC, "batch": 1, "tokens_per_s": 112, "of": "128 new tokens"},
    ],
    "qwen3-0.6b": [
        {"engine": VLLM, "batch": 1, "tokens_per_s": 355, "end_to_end_tokens_per_s": 341},
        {"engine": VLLM, "batch": 4, "tokens_per_s": 1477},
        {"engine": VLLM, "batch": 16, "tokens_per_s": 6009},
        {"engine": VLLM, "batch": 64, "tokens_per_s": 12873, "end_to_end_tokens_per_s": 12410},
        {"engine": EAGER, "batch": 1, "tokens_per_s": 36.5, "of": "128 new tokens"},
        {"engine": STATIC, "batch": 1, "tokens_per_s": 271, "of": "128 new tokens"},
    ],
    "gemma3-270m-bf16": [
        {"engine": EAGER, "batch": 1, "tokens_per_s": 46, "of": "128 new tokens"},
        {"engine": STATIC, "batch": 1, "tokens_per_s": 373, "of": "128 new tokens"},
    ],
    "smollm2-bf16": [
        AS_BF16 | {"engine": VLLM, "batch": 1, "tokens_per_s": 431},
        AS_BF16 | {"engine": VLLM, "batch": 1, "end_to_end_tokens_per_s": 413, "of": "50 chats, 200 new tokens"},
        AS_BF16 | {"engine": VLLM, "batch": 50, "end_to_end_tokens_per_s": 9478, "of": "50 chats, 200 new tokens"},
        AS_BF16 | {"engine": INVARIANT, "batch": 1, "end_to_end_tokens_per_s": 410, "of": "50 chats, 200 new tokens"},
        AS_BF16
        | {"engine": INVARIANT, "batch": 50, "end_to_end_tokens_per_s": 15478, "of": "50 chats, 200 new tokens"},
        AS_FILE | {"engine": LLAMA, "batch": 1, "tokens_per_s": 795},
        AS_FILE | {"engine": LLAMA, "batch": 1, "end_to_end_tokens_per_s": 718, "of": "50 prompts, 200 new tokens"},
    ],
}
"""Steady rates (decoding alone) and those with the prompts in them. Unless `of` says otherwise: prompts of 128 tokens, 256 new ones."""

ELSEWHERE = "another H200, 29 Nov 2026, one run, greedy, no prefix cache"


def geometry_of(spec: ModelSpec) -> str | None:
    """The name of the geometry whose layers a model has, whatever its weights are stored as."""
    mine = (spec.width, len(spec.layers), spec.vocab)
    for name, config in GEOMETRIES.items():
        if mine == (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]):
            return name
    return None


def records(geometry: str, device: str, patience: float) -> list[dict[str, Any]]:
    """What transformers reaches now, and what was recorded; an engine that fails or takes longer than `patience` seconds says so."""
    measured = [_apart(geometry, how, device, patience) for how in HOW]
    marked = {"phase": "decode", "recorded_elsewhere": ELSEWHERE}
    return [*measured, *(marked | record for record in RECORDED.get(geometry, []))]


def _apart(geometry: str, how: str, device: str, patience: float) -> dict[str, Any]:
    """One measurement in another process, which a slow compiler cannot hold up."""
    named = {"phase": "decode", "engine": f"transformers, {how}", "batch": 1, "weights": f"{geometry}, random, bf16"}
    command = [sys.executable, __file__, geometry, how, "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience)
    except subprocess.TimeoutExpired:
        return named | {"failed": f"not done after {patience:g} s; --patience gives it more"}
    if done.returncode:
        return named | {"failed": done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else "no message"}
    return named | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("how", choices=HOW)
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
