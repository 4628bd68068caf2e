"""Collecting text: the target answers many prompts at once, half of them greedily, half sampled with seeds that are kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from power_lab.engine.engine import Engine
from power_lab.engine.request import SamplingParams
from power_lab.engine.ticket import Ticket
from power_lab.engine.trace import RunRecord
from power_lab.errors import ConfigError
from power_lab.training.corpus import Corpus

TEMPERATURE = 0.8
_SAVE = 60.0
"""Seconds between two saves."""


def params(number: int, seed: int, tokens: int) -> SamplingParams:
    """How text `number` is said: even ones greedily, odd ones at `TEMPERATURE` with a seed of their own."""
    warm = TEMPERATURE if number % 2 else 0.0
    return SamplingParams(max_tokens=tokens, temperature=warm, seed=(seed << 32) + number)


def collect(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    out: Path,
    *,
    seed: int = 0,
    tokens: int = 256,
    seconds: float = 0,
    waiting: int = 512,
) -> Corpus:
    """Let the engine answer prompts (token ids) and keep everything in `out`; a file that exists is continued.

    Args:
        tokens: most tokens of an answer.
        seconds: after which the rest is cancelled; what was said until then is kept. 0 sets no limit.
        waiting: requests in the engine at once, running or queued.

    Raises:
        ConfigError: the file was made by another model, with another seed or from other prompts.
    """
    facts: dict[str, Any] = {
        "model": engine.facts.model,
        "sha256": engine.facts.sha256,
        "vocab": engine.facts.vocab,
        "seed": seed,
        "tokens": tokens,
        "temperature": TEMPERATURE,
        "prompts": len(prompts),
    }
    texts = _Texts(facts, out)
    first = texts.count
    start, saved = time.monotonic(), time.monotonic()
    queue: deque[Ticket] = deque()
    sent = first
    with tqdm(total=len(prompts), initial=first, desc="collecting", unit="text", disable=None) as bar:
        while queue or sent < len(prompts):
            if seconds and time.monotonic() - start > seconds:
                break
            while sent < len(prompts) and len(queue) < waiting:
                queue.append(engine.submit(prompts[sent], params(sent, seed, tokens)))
                sent += 1
            texts.add(queue.popleft().result(), bar)
            if time.monotonic() - saved > _SAVE:
                texts.save()
                saved = time.monotonic()
        for ticket in queue:
            engine.cancel(ticket.id)
        for ticket in queue:
            record = ticket.result()
            if len(record.tokens) < 2:  # the order of texts is the order of prompts, so that a file can be continued
                break
            texts.add(record, bar)
    corpus = texts.save()
    said = len(corpus.tokens) - int(corpus.prompts.sum())
    passed = time.monotonic() - start
    print(
        f"{len(corpus)} texts, {len(corpus.tokens)} tokens, {said} of them said by the model; {passed:.0f} s",
        flush=True,
    )
    return corpus


class _Texts:
    """Texts as they come, and the file that they are kept in."""

    def __init__(self, facts: dict[str, Any], out: Path) -> None:
        self._facts, self._out = facts, out
        self._texts: list[list[int]] = []
        self._prompts: list[int] = []
        self._seeds: list[int] = []
        self._temperatures: list[float] = []
        if out.exists():
            self._continue(Corpus.load(out))

    @property
    def count(self) -> int:
        return len(self._texts)

    def add(self, record: RunRecord, bar: Any) -> None:
        self._texts.append([*record.prompt_tokens, *record.tokens])
        self._prompts.append(len(record.prompt_tokens))
        self._seeds.append(int(str(record.params["seed"])))
        self._temperatures.append(float(str(record.params["temperature"])))
        bar.update()

    def save(self) -> Corpus:
        if not self._texts:
            raise ConfigError("seconds", "nothing was said in this time", "Give it more.")
        corpus = Corpus.of(self._texts, self._prompts, self._seeds, self._temperatures, self._facts)
        corpus.save(self._out)
        return corpus

    def _continue(self, before: Corpus) -> None:
        for key, value in self._facts.items():
            if before.facts.get(key) != value:
                remedy = "Name another file for what this engine says."
                raise ConfigError(
                    "out", f"{self._out} was made with {key} {before.facts.get(key)!r}, not {value!r}", remedy
                )
        self._texts = [before.tokens[a:b].tolist() for a, b in zip(before.starts, before.ends, strict=True)]
        self._prompts, self._seeds = before.prompts.tolist(), before.seeds.tolist()
        self._temperatures = [round(float(value), 6) for value in before.temperatures]
