"""The engines that `bench/cpu.py` compares: ours, llama.cpp's server and transformers, on the same file and the same token ids."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PREFILL, DECODE = 512, 128
BATCHES = (1, 2, 4, 8)
CROWDS = (4, 16)
CROWD_PROMPT, CROWD_ANSWER = 96, 48
QUOTE, WIDTH = 100, 7

Phase = tuple[str, int, Callable[[], float]]
"""(name, requests, measure); `measure` gives tokens a second."""


class PowerLab:
    """Ours, in exact mode, through the same engine that serves notebooks."""

    name = "power-lab"

    def __init__(self, model: str, threads: int) -> None:
        from power_lab.engine.config import EngineConfig, Paths
        from power_lab.engine.engine import Engine
        from power_lab.models import resolve

        self.model, self.threads = model, threads
        self.path = resolve(model, Paths.default()).path
        config = EngineConfig(
            model=model, threads=threads, prefix_cache=False, step_tokens=PREFILL, max_batch=max(*BATCHES, *CROWDS)
        )
        self.engine = Engine(config, threaded=False)
        self.weight_bytes = sum(self.engine.facts.quantisation.values())
        text = (ROOT / "LICENSE").read_text()
        self.tokens = self.engine.tokenize(text)[:4096]
        self.accepted: list[float] = []

    def phases(self) -> list[Phase]:
        decode: list[Phase] = [("decode" if b == 1 else "batch", b, lambda b=b: self.decode(b)) for b in BATCHES]
        steps: list[Phase] = [("step", b, lambda b=b: self.step(b)) for b in (*BATCHES, 16)]
        crowds: list[Phase] = [("crowd", n, lambda n=n: self.crowd(n)) for n in CROWDS]
        quotes: list[Phase] = [
            ("quote", 1, lambda: self.quote("off")),
            ("quote by lookup", 1, lambda: self.quote("lookup")),
        ]
        return [("prefill", 1, self.prefill), *decode, *steps, *crowds, *quotes]

    def prefill(self) -> float:
        return PREFILL / self.engine.generate(self.tokens[:PREFILL], self._params(1)).prefill_s

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

    def crowd(self, requests: int) -> float:
        """Answered tokens a second of so many requests that come at once, prompts included."""
        start = time.perf_counter()
        tickets = [
            self.engine.submit(crowd_prompt(self.tokens, i), self._params(CROWD_ANSWER)) for i in range(requests)
        ]
        for ticket in tickets:
            ticket.result()
        return requests * CROWD_ANSWER / (time.perf_counter() - start)

    def quote(self, drafter: str) -> float:
        """Decoded tokens a second of an answer that repeats a text of the prompt."""
        record = self.engine.submit(self.quoting(), self._params(QUOTE, speculate=drafter, width=WIDTH)).result()
        if drafter != "off":
            drafted = sum(len(r.drafted) for r in record.rounds)
            self.accepted.append(sum(r.accepted for r in record.rounds) / max(drafted, 1))
        return (len(record.tokens) - 1) / record.decode_s

    def quoting(self) -> list[int]:
        """A text twice and begun again: whoever reads it will go on with the text."""
        text = (ROOT / "LICENSE").read_text()
        start = text.index("2. Grant of Copyright License")
        tokens = self.engine.tokenize(text[start : start + 2000])
        return [*tokens, *tokens[1:], *tokens[1:24]]

    def loading(self) -> float:
        """Seconds from nothing to an engine that answers, in a new process, compiled kernels and the file's pages at hand."""
        code = (
            "import time; start = time.perf_counter()\n"
            "from power_lab.engine.config import EngineConfig; from power_lab.engine.engine import Engine\n"
            f"engine = Engine(EngineConfig(model={self.model!r}, threads={self.threads}))\n"
            "print(time.perf_counter() - start)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return float(done.stdout)

    def continuation(self, count: int, prompt: int = 64) -> list[int]:
        return list(self.engine.generate(self.tokens[:prompt], self._params(count)).tokens)

    def text(self, tokens: list[int]) -> str:
        return self.engine._loaded.tokenizer.decode(tokens)

    def _params(self, count: int, **options: Any) -> Any:
        from power_lab.engine.request import SamplingParams

        return SamplingParams(max_tokens=count, ignore_eos=True, **options)


class LlamaCpp:
    """llama.cpp as packaged by xllamacpp: its server, its own timings."""

    name = "llama.cpp"

    def __init__(self, ours: PowerLab) -> None:
        self._path, self._threads, self._tokens = ours.path, ours.threads, ours.tokens
        self._alone = self._serve(1, 1024)
        self._crowds = {n: self._serve(n, n * 256) for n in CROWDS}

    def _serve(self, parallel: int, context: int) -> Any:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(self._path)
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = context, parallel, True, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._threads
        return xllamacpp.Server(params)

    def check(self, ours: PowerLab) -> None:
        """It quantises activations, so one next token in ten may differ (`tests/engine/test_reference.py` measures by how much)."""
        lengths = range(40, 120, 8)
        theirs = [self._complete(self._alone, self._tokens[:n], 1)["choices"][0]["text"] for n in lengths]
        mine = [ours.text(ours.continuation(1, n)) for n in lengths]
        if sum(a == b for a, b in zip(theirs, mine, strict=True)) < 0.7 * len(lengths):
            raise SystemExit(f"llama.cpp says {theirs}, Power Lab {mine}: the comparison is off")

    def phases(self) -> list[Phase]:
        return [
            ("prefill", 1, lambda: self._timed(PREFILL, 1, "prompt")),
            ("decode", 1, lambda: self._timed(8, DECODE, "predicted")),
            *[("crowd", n, lambda n=n: self.crowd(n)) for n in CROWDS],
        ]

    def _timed(self, prompt: int, count: int, part: str) -> float:
        """Tokens a second of its own clock, which leaves out all of the server's overhead."""
        timings = self._complete(self._alone, self._tokens[:prompt], count)["timings"]
        expected = prompt if part == "prompt" else count
        if timings[f"{part}_n"] != expected:
            raise SystemExit(f"llama.cpp computed {timings[f'{part}_n']} {part} tokens and not {expected}")
        return timings[f"{part}_per_second"]

    def crowd(self, requests: int) -> float:
        """As ours; continuous batching over as many slots."""
        with ThreadPoolExecutor(requests) as pool:
            start = time.perf_counter()
            ask = lambda i: self._complete(self._crowds[requests], crowd_prompt(self._tokens, i), CROWD_ANSWER)  # noqa: E731
            answers = list(pool.map(ask, range(requests)))
            wall = time.perf_counter() - start
        if any(answer["timings"]["predicted_n"] != CROWD_ANSWER for answer in answers):
            raise SystemExit("llama.cpp did not answer in full")
        return requests * CROWD_ANSWER / wall

    def _complete(self, server: Any, tokens: list[int], count: int) -> dict[str, Any]:
        body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        return server.handle_completions(body)


class Transformers:
    """transformers in bf16 on the dequantised weights, eager with a cache."""

    name = "transformers"

    def __init__(self, ours: PowerLab) -> None:
        import torch

        from power_lab.engine.weights.gguf_model import GgufModel
        from tests.engine.test_reference import hf_model

        torch.set_num_threads(ours.threads)
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

    def phases(self) -> list[Phase]:
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


PEERS: dict[str, Callable[[PowerLab], Any]] = {"llama.cpp": LlamaCpp, "transformers": Transformers}


def crowd_prompt(tokens: list[int], index: int) -> list[int]:
    """Prompts that share nothing."""
    return tokens[index * CROWD_PROMPT : (index + 1) * CROWD_PROMPT]
