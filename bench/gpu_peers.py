"""Other engines on the same geometries: transformers measured in processes of its own, vLLM and llama.cpp as recorded elsewhere.

    python bench/gpu_peers.py GEOMETRY eager|static [--device cuda] [--prompt 128] [--count 64] [--wait]

prints one JSON record. `static` is `generate` with a static cache, which compiles the decode step.

`records` starts the processes of all geometries at once: they import, make weights, compile and warm up side by side, so the device holds
the weights of all of them. Only when each is ready, has failed or was ended are they let measure, strictly one after another. For that it
gives them `--wait`: such a process prints the line `ready` when it is warm and waits for a line from stdin before it measures; one whose
stdin is closed instead ends without measuring.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.geometries import GEOMETRIES  # noqa: E402
from power_lab.engine.models.spec import ModelSpec  # noqa: E402

RUNS = 5
HOW = ("eager", "static")
PATIENCE = 300.0  # seconds for import, weights and compiling beside others, which take turns on few cores; as many again for measuring
READY = "ready"

Record = dict[str, Any]

VLLM, INVARIANT, LLAMA = "vLLM 0.26.0", "vLLM 0.26.0 batch-invariant", "llama.cpp 0.4.0"
EAGER, STATIC = "transformers 5.17, eager", "transformers 5.17, static"
AS_BF16 = {"weights": "the Q4_1 file as bf16"}
AS_FILE = {"weights": "the Q4_1 file"}
RECORDED: dict[str, list[Record]] = {
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


def command(geometry: str, how: str, device: str) -> list[str]:
    return [sys.executable, __file__, geometry, how, "--device", device, "--wait"]


def records(
    geometries: Sequence[str],
    device: str,
    patience: float,
    command: Callable[[str, str, str], Sequence[str]] = command,
) -> Iterator[tuple[str, Record]]:
    """For each geometry what transformers reaches now, and what was recorded; each record with its geometry, as soon as there is one.

    Args:
        geometries: one named twice is measured once.
        patience: seconds that all have to get ready, and each to measure; an engine that fails or takes longer says so.
        command: (geometry, how, device) -> the words that start a process.

    Whoever may not read to the end closes the generator (`contextlib.closing`): then no process is left.
    """
    marked = {"phase": "decode", "recorded_elsewhere": ELSEWHERE}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers: list[Peer] = []
        for geometry in dict.fromkeys(geometries):
            for how in HOW:
                peers.append(Peer(geometry, how, command(geometry, how, device), folder))
                stack.callback(peers[-1].end)
        until_ready(peers, patience)
        for geometry in dict.fromkeys(geometries):
            yield from ((geometry, peer.measure(patience)) for peer in peers if peer.geometry == geometry)
            yield from ((geometry, marked | record) for record in RECORDED.get(geometry, []))


class Peer:
    """An engine on a geometry in another process, which a slow compiler cannot hold up.

    Args:
        command: what starts it, by the protocol of `--wait`.
        folder: for what it says. Files, unlike pipes, are never full, and their end does not wait for its compiler's processes.
    """

    def __init__(self, geometry: str, how: str, command: Sequence[str], folder: Path) -> None:
        self.geometry = geometry
        self._named = {"phase": "decode", "engine": f"transformers, {how}", "batch": 1}
        self._named |= {"weights": f"{geometry}, random, bf16"}
        self._ended = ""  # why, if we ended it
        self._out, self._err = folder / f"{geometry}-{how}.out", folder / f"{geometry}-{how}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err)

    @property
    def starting(self) -> bool:
        """Neither ready nor over."""
        return self._process.poll() is None and READY not in _lines(self._out)

    def measure(self, patience: float) -> Record:
        """Let it measure, until it is over."""
        if not self._ended:
            try:
                self._process.communicate(b"measure\n", timeout=patience)
            except subprocess.TimeoutExpired:
                self.end(f"not done after {patience:g} s; --patience gives it more")
        if self._ended:
            return self._named | {"failed": self._ended}
        if status := self._process.returncode:
            lines = _lines(self._err) or [f"no message, exit status {status}"]
            return self._named | {"failed": lines[-1][:200]}
        try:
            return self._named | json.loads(_lines(self._out)[-1])
        except (IndexError, ValueError):
            return self._named | {"failed": "ended without a record"}

    def end(self, why: str = "ended") -> None:
        """Kill it, unless it is over. why: for its record."""
        if self._process.poll() is None:
            self._ended = why
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()


def until_ready(peers: Sequence[Peer], patience: float) -> None:
    """Wait until each is ready or over; those that are neither after `patience` seconds are ended."""
    end = time.monotonic() + patience
    while any(peer.starting for peer in peers) and time.monotonic() < end:
        time.sleep(0.1)
    for peer in peers:
        if peer.starting:
            peer.end(f"not ready after {patience:g} s; --patience gives it more")


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").strip().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("how", choices=HOW)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--wait", action="store_true", help=f"say `{READY}`, then wait for a line before measuring")
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
        if args.wait:
            print(READY, flush=True)
            if not sys.stdin.readline():
                return
        rates = [(args.count - 1) / (spent(args.count) - spent(1)) for _ in range(RUNS)]
    result = {"tokens_per_s": round(statistics.median(rates), 2), "best_tokens_per_s": round(max(rates), 2)}
    about = {"runs": RUNS, "version": transformers.__version__, "ready_s": round(ready, 1)}
    print(json.dumps(result | about))


if __name__ == "__main__":
    main()
