"""The promise on real weights: 100 varied prompts of 200 tokens, every drafter, alone and in a batch of 8; follow-up turns.

Half of the prompts are sampled greedily, half at temperature 0.8 with a seed. A cell counts whole outputs (token ids) that equal those of
one request at a time without speculation from an empty cache. Follow-up turns continue the model's own answer, whose KV was written by
decode or verify steps: the case in which other engines change their answers (spec/peers.md).

Exit status 0 only if every cell is whole.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.cpu import about  # noqa: E402
from bench.prompts import prompts  # noqa: E402
from power_lab.engine import intake  # noqa: E402
from power_lab.engine.config import EngineConfig  # noqa: E402
from power_lab.engine.engine import Engine  # noqa: E402
from power_lab.engine.request import SamplingParams  # noqa: E402
from power_lab.engine.trace import RunRecord  # noqa: E402

WIDTHS = (3, 8, 12, 1)  # taken in turn over the prompts
TURN = 100
QUESTION = "Thank you. Can you say the same in other words, and add one more thing?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    campaign = Campaign(args)
    cells = [*campaign.outputs(), *campaign.turns(args.turns)]
    print(f"{'cell':44} whole outputs   tok/s   accepted/drafted")
    for cell in cells:
        pairs = f"{cell['accepted']}/{cell['drafted']}"
        print(f"{cell['cell']:44} {cell['identical']:3} of {cell['of']:3}   {cell['tokens_per_s']:8.1f}   {pairs}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(
            json.dumps({"run": about(args), "engine": campaign.facts, "cells": cells}, indent=1) + "\n"
        )
    sys.exit(any(cell["identical"] != cell["of"] for cell in cells))


class Campaign:
    """All cells against one reference."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.engine = self._engine()
        facts = self.engine.facts
        self.facts = {"model": facts.model, "sha256": facts.sha256, "digest": facts.digest, "versions": facts.versions}
        chosen = prompts()
        step = len(chosen) / args.prompts
        self.prompts = [
            intake.encode(self.engine._loaded.tokenizer, chosen[int(i * step)][1]) for i in range(args.prompts)
        ]
        self.reference: list[RunRecord] = []

    def _engine(self, **settings: Any) -> Engine:
        config = EngineConfig(model=self.args.model, threads=self.args.threads, max_batch=8, **settings)
        return Engine(config, threaded=False)

    def params(self, index: int, drafter: str, count: int) -> SamplingParams:
        sampling = {} if index % 2 == 0 else {"temperature": 0.8, "seed": index}
        return SamplingParams(
            max_tokens=count, ignore_eos=True, speculate=drafter, width=WIDTHS[index % len(WIDTHS)], **sampling
        )

    def outputs(self) -> list[dict[str, Any]]:
        cells = []
        for batch in (1, 8):
            for drafter in ("off", "lookup", "ngram"):
                self.engine.drop_prefixes()
                name = f"speculation {drafter}, {'alone' if batch == 1 else 'batch of 8'}"
                cold = None if batch == 8 else self.engine.drop_prefixes  # alone: every prompt from an empty cache
                start = time.monotonic()
                records = self._run(name, self.prompts, drafter, self.args.tokens, batch, cold)
                if not self.reference:
                    self.reference = records
                cells.append(cell(name, records, [r.tokens for r in self.reference], time.monotonic() - start))
        longest = max(len(r.prompt_tokens) + len(r.tokens) for r in self.reference)
        print(
            f"longest context {longest} tokens; {sum(len(r.prompt_tokens) > 512 for r in self.reference)} prompts past 512"
        )
        return cells

    def turns(self, count: int) -> list[dict[str, Any]]:
        """Continuations and follow-up turns: warm (KV from decode steps), cold (all prefilled), token by token."""
        every = max(1, len(self.prompts) // max(count, 1))
        chosen = list(range(0, len(self.prompts), every))[:count]
        cells = []
        uninterrupted = [self.reference[i].tokens[TURN : 2 * TURN] for i in chosen]
        halves = [[*self.prompts[i], *self.reference[i].tokens[:TURN]] for i in chosen]
        follow = [self.next_turn(self.prompts[i], self.reference[i].tokens[:TURN]) for i in chosen]
        want: list[Sequence[int]] | None = None
        for kind, texts, expected in (("own answer continued", halves, uninterrupted), ("new question", follow, None)):
            expected = expected if expected is not None else want
            for warmth, drafter in (("cold", "off"), ("warm", "off"), ("warm", "ngram"), ("token by token", "off")):
                records = []
                engine = self._engine(step_tokens=1) if warmth == "token by token" else self.engine
                start = time.monotonic()
                name = f"{kind}, {warmth}" + (", ngram" if drafter != "off" else "")
                for number, (index, text) in enumerate(zip(tqdm(chosen, desc=name, leave=False), texts, strict=True)):
                    engine.drop_prefixes()
                    if warmth == "warm":  # the first turn leaves its blocks behind, then the second hits them
                        engine.submit(self.prompts[index], self.params(index, drafter, TURN)).result()
                    count = min(TURN, engine.context - len(text))
                    record = engine.submit(text, self.params(index, drafter, count)).result()
                    if warmth == "warm" and record.cached < len(self.prompts[index]) // 64 * 64:
                        raise SystemExit(f"{name}: prompt {number} was not served from the cache")
                    records.append(record)
                if expected is None:
                    expected = [r.tokens for r in records]
                cells.append(cell(name, records, expected, time.monotonic() - start))
        return cells

    def next_turn(self, prompt: list[int], answer: Sequence[int]) -> list[int]:
        """All tokens so far and a new question, as the model's chats or, without a template, as plain text."""
        if self.engine._loaded.tokenizer.chat_template is None:
            return [*prompt, *answer, *self.engine.tokenize(f"\n\n{QUESTION}\n\n")]
        return self.engine.continuation(prompt, answer, QUESTION)

    def _run(
        self, name: str, texts: list[list[int]], drafter: str, count: int, batch: int, between: Callable[[], Any] | None
    ) -> list[RunRecord]:
        records = []
        for at in tqdm(range(0, len(texts), batch), desc=name, leave=False):
            tickets = [
                self.engine.submit(texts[i], self.params(i, drafter, count))
                for i in range(at, min(at + batch, len(texts)))
            ]
            records += [ticket.result() for ticket in tickets]
            if between is not None:
                between()
        self.engine.check()
        return records


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
