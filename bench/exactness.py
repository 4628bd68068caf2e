"""The promise on real weights: 100 varied prompts of 200 tokens, whole outputs compared over everything that could change them.

    python bench/exactness.py [--model smollm2] [--device cpu|cuda] [--batches 1 8 50] [--eager 8 50] [--parts ...] [--output FILE]

Half of the prompts are sampled greedily, half at temperature 0.8 with a seed. A cell counts whole outputs (token ids) that equal those of
one request at a time without speculation from an empty cache. Cells: every drafter, alone and in batches, cold and with every prompt
cached, with captured graphs or operation by operation. Follow-up turns continue the model's own answer, whose KV was written by decode or
verify steps: the case in which other engines change their answers (spec/peers.md).

Parts can be run apart, for machines that are lent by the minute: each begins with the one cell with which the others are compared. The log
is written after every cell. Exit status 0 only if every cell is whole.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.cpu import about  # noqa: E402
from bench.floors import card  # noqa: E402
from bench.prompts import spread  # noqa: E402
from power_lab.engine import intake  # noqa: E402
from power_lab.engine.config import EngineConfig, Paths  # noqa: E402
from power_lab.engine.engine import Engine  # noqa: E402
from power_lab.engine.loader import load  # noqa: E402
from power_lab.engine.request import SamplingParams  # noqa: E402
from power_lab.engine.trace import RunRecord  # noqa: E402

WIDTHS = (3, 8, 12, 1)  # taken in turn over the prompts
TURN = 100
QUESTION = "Thank you. Can you say the same in other words, and add one more thing?"
DRAFTERS = ("off", "lookup", "ngram")
KV_TOKENS = 64 * 1024  # what all prompts and answers together leave behind stays cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 50], help="requests at once; the first is 1")
    parser.add_argument("--eager", type=int, nargs="*", default=[8, 50], help="batches that also run without graphs")
    parser.add_argument(
        "--parts", nargs="+", choices=("captured", "eager", "turns"), default=["captured", "eager", "turns"]
    )
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--turn-batch", type=int, default=1, help="conversations at once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--commit", help="what is run, where there is no repository")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.batches[0] != 1:
        parser.error("--batches: the first is 1, with which the others are compared")
    if args.tokens < 2 * TURN:
        parser.error(f"--tokens: at least {2 * TURN}, of which the second half is what a continued answer must say")

    run = about(args) | {"card": card(args.device)} | ({"commit": args.commit} if args.commit else {})
    campaign = Campaign(args, run)
    campaign.outputs()
    if "eager" in args.parts:
        campaign.eager()
    if "turns" in args.parts:
        campaign.turns(args.turns)
    sys.exit(any(cell["identical"] != cell["of"] for cell in campaign.cells))


class Campaign:
    """All cells against one reference.

    Attributes:
        cells: what each came to, printed as they come.
    """

    def __init__(self, args: argparse.Namespace, run: dict[str, Any]) -> None:
        self.args, self._about = args, run
        self._loaded = load(self._config(), Paths.default(), lambda *_: None)
        self.engine = self._engine()
        facts = self.engine.facts
        self.facts = {"model": facts.model, "sha256": facts.sha256, "digest": facts.digest, "versions": facts.versions}
        self.prompts = [intake.encode(self._loaded.tokenizer, text) for _, text in spread(args.prompts)]
        self.reference: list[RunRecord] = []
        self.cells: list[dict[str, Any]] = []

    def outputs(self) -> None:
        """Whole answers to every prompt; without this part, those alone that all others are compared with."""
        if "captured" not in self.args.parts:
            self._answers(self.engine, f"speculation off, {_at_once(1)}, cold", "off", 1, cold=True)
            return
        for batch in self.args.batches:
            for drafter in DRAFTERS:
                name = f"speculation {drafter}, {_at_once(batch)}"
                self.engine.drop_prefixes()
                self._answers(self.engine, f"{name}, cold", drafter, batch, cold=True)
                if batch == 1 and drafter != DRAFTERS[-1]:  # the slowest cells; batches have every drafter warm
                    continue
                if batch == 1:  # so far every request dropped what the one before had left
                    self._run(self.engine, self.prompts, DRAFTERS[0], 1, max(self.args.batches))
                records = self._answers(self.engine, f"{name}, warm", drafter, batch)
                self._expect_cached(name, records, [len(tokens) // 64 * 64 for tokens in self.prompts])
        longest = max(len(r.prompt_tokens) + len(r.tokens) for r in self.reference)
        past = sum(len(r.prompt_tokens) > 512 for r in self.reference)
        print(f"longest context {longest} tokens; {past} prompts past 512", flush=True)

    def eager(self) -> None:
        """The same, operation by operation."""
        eager = self._engine(graph_mb=0)
        for batch in self.args.eager:
            for drafter in DRAFTERS if batch == max(self.args.eager) else DRAFTERS[::2]:  # slow, too
                eager.drop_prefixes()
                self._answers(eager, f"speculation {drafter}, {_at_once(batch)}, cold, eager", drafter, batch)

    def turns(self, count: int) -> None:
        """Continuations and follow-up turns: warm (KV from decode steps), cold (all prefilled), token by token."""
        every = max(1, len(self.prompts) // max(count, 1))
        chosen = list(range(0, len(self.prompts), every))[:count]
        uninterrupted = [self.reference[i].tokens[TURN : 2 * TURN] for i in chosen]
        halves = [[*self.prompts[i], *self.reference[i].tokens[:TURN]] for i in chosen]
        follow = [self.next_turn(self.prompts[i], self.reference[i].tokens[:TURN]) for i in chosen]
        slow = self._engine(step_tokens=1)
        for kind, texts, expected in (("own answer continued", halves, uninterrupted), ("new question", follow, None)):
            for warmth, drafter in (("cold", "off"), ("warm", "off"), ("warm", "ngram"), ("token by token", "off")):
                name = f"{kind}, {warmth}" + (", ngram" if drafter != "off" else "")
                engine = slow if warmth == "token by token" else self.engine
                start = time.monotonic()
                records = []
                batch = self.args.turn_batch
                for at in tqdm(range(0, len(chosen), batch), desc=name, leave=False, disable=None):
                    engine.drop_prefixes()
                    group = chosen[at : at + batch]
                    if warmth == "warm":  # the first turn leaves its blocks behind, then the second hits them
                        first = [engine.submit(self.prompts[i], self.params(i, drafter, TURN)) for i in group]
                        for ticket in first:
                            ticket.result()
                    tickets = [
                        engine.submit(text, self.params(i, drafter, min(TURN, engine.context - len(text))))
                        for i, text in zip(group, texts[at : at + batch], strict=True)
                    ]
                    records += [ticket.result() for ticket in tickets]
                if warmth == "warm":
                    self._expect_cached(name, records, [len(self.prompts[i]) // 64 * 64 for i in chosen])
                expected = [r.tokens for r in records] if expected is None else expected
                self._tell(cell(name, records, expected, time.monotonic() - start))

    def next_turn(self, prompt: list[int], answer: Sequence[int]) -> list[int]:
        """All tokens so far and a new question, as the model's chats or, without a template, as plain text."""
        if self._loaded.tokenizer.chat_template is None:
            return [*prompt, *answer, *self.engine.tokenize(f"\n\n{QUESTION}\n\n")]
        return self.engine.continuation(prompt, answer, QUESTION)

    def params(self, index: int, drafter: str, count: int) -> SamplingParams:
        sampling = {} if index % 2 == 0 else {"temperature": 0.8, "seed": index}
        return SamplingParams(
            max_tokens=count,
            ignore_eos=True,
            speculate=drafter,
            width=WIDTHS[index % len(WIDTHS)],
            controller="fixed",
            **sampling,
        )

    def _config(self, **settings: Any) -> EngineConfig:
        batch = max(*self.args.batches, *self.args.eager, self.args.turn_batch)
        return EngineConfig(
            model=self.args.model,
            device=self.args.device,
            threads=self.args.threads,
            max_batch=batch,
            kv_tokens=KV_TOKENS,
            **settings,
        )

    def _engine(self, **settings: Any) -> Engine:
        """On the one set of weights."""
        return Engine(self._config(**settings), loaded=self._loaded, threaded=False)

    def _answers(self, engine: Engine, name: str, drafter: str, batch: int, *, cold: bool = False) -> list[RunRecord]:
        """A cell: all answers, compared with the first cell's. `cold`: every request finds an empty cache."""
        start = time.monotonic()
        records = self._run(engine, self.prompts, drafter, self.args.tokens, batch, cold=cold, name=name)
        self.reference = self.reference or records
        self._tell(cell(name, records, [r.tokens for r in self.reference], time.monotonic() - start))
        return records

    def _run(
        self,
        engine: Engine,
        texts: list[list[int]],
        drafter: str,
        count: int,
        batch: int,
        *,
        cold: bool = False,
        name: str = "fill",
    ) -> list[RunRecord]:
        records = []
        for at in tqdm(range(0, len(texts), batch), desc=name, leave=False, disable=None):
            numbers = range(at, min(at + batch, len(texts)))
            tickets = [engine.submit(texts[i], self.params(i, drafter, count)) for i in numbers]
            records += [ticket.result() for ticket in tickets]
            if cold and batch == 1:  # those of a batch run beside each other; what they share is computed once
                engine.drop_prefixes()
        engine.check()
        return records

    def _expect_cached(self, name: str, records: list[RunRecord], least: list[int]) -> None:
        """A warm cell that was not warm would prove nothing. The last token of a prompt is always computed."""
        for number, (record, tokens) in enumerate(zip(records, least, strict=True)):
            whole = tokens - 64 if tokens == len(record.prompt_tokens) else tokens
            if record.cached < whole:
                raise SystemExit(f"{name}: prompt {number} found {record.cached} of {whole} tokens in the cache")

    def _tell(self, cell: dict[str, Any]) -> None:
        if not self.cells:
            print(f"{'cell':48} whole outputs   tok/s   accepted/drafted")
        self.cells.append(cell)
        pairs = f"{cell['accepted']}/{cell['drafted']}"
        counts = f"{cell['identical']:3} of {cell['of']:3}   {cell['tokens_per_s']:8.1f}"
        print(f"{cell['cell']:48} {counts}   {pairs}", flush=True)
        if self.args.output:
            self.args.output.parent.mkdir(parents=True, exist_ok=True)
            log = {"run": self._about, "engine": self.facts, "cells": self.cells}
            self.args.output.write_text(json.dumps(log, indent=1) + "\n")


def _at_once(batch: int) -> str:
    return "alone" if batch == 1 else f"batch of {batch}"


def cell(name: str, records: list[RunRecord], expected: Sequence[Sequence[int]], seconds: float) -> dict[str, Any]:
    same = [tuple(r.tokens) == tuple(want) for r, want in zip(records, expected, strict=True)]
    rounds = [r for record in records for r in record.rounds]
    return {
        "cell": name,
        "identical": sum(same),
        "of": len(same),
        "different": [i for i, equal in enumerate(same) if not equal],
        "tokens": sum(len(r.tokens) for r in records),
        "tokens_per_s": round(sum(len(r.tokens) for r in records) / seconds, 2),
        "drafted": sum(len(r.drafted) for r in rounds),
        "accepted": sum(r.accepted for r in rounds),
        "cached_tokens": sum(r.cached for r in records),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
