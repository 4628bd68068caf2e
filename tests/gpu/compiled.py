"""Loads a tiny model on the GPU with an empty cache of kernels, runs requests of all kinds, and prints what this process had to compile
itself, and what is said of the kernels. Run by test_compilers in a process of its own: `compiled.py FOLDER KIND`, FOLDER empty."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from triton import knobs

from power_lab.engine import loader
from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.engine import Engine
from power_lab.engine.request import SamplingParams
from tests import tiny, tiny_gguf

PROMPT = [i % 250 for i in range(700)]
REQUESTS = [
    SamplingParams(max_tokens=8, ignore_eos=True, seed=1, **rest)  # type: ignore[arg-type]
    for rest in (
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5},
        {"repetition_penalty": 1.2, "temperature": 1.0},
        {"logprobs": 0},
        {"logprobs": 1},
        {"logprobs": 7},
        {"speculate": "ngram", "width": 5},
    )
]


def main(folder: Path, kind: str) -> None:
    own: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            own.append(src.name)

    knobs.compilation.listener = listen
    loader._tokenizer = lambda checkpoint: tiny.tokenizer()
    tiny_gguf.write(folder / "tiny.gguf", tiny.Shape(kind=kind, head_dim=16))
    paths = Paths(folder / "cache", folder / "run", folder / "state")
    config = EngineConfig(model=str(folder / "tiny.gguf"), device="cuda", kv_tokens=4096, context=tiny.CONTEXT)
    engine = Engine(config, paths=paths, threaded=False)
    for params in REQUESTS:
        for count in (1, 100, 700):
            engine.generate(PROMPT[:count], params)
    tickets = [engine.submit(PROMPT[: 10 + i], params) for i, params in enumerate(REQUESTS)]
    for ticket in tickets:
        ticket.result()
    said = [decision.reason for decision in engine.explain() if decision.key == "kernels"]
    engine.close()
    print(json.dumps({"own": own, "said": said}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
