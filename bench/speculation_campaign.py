"""Exactness of speculation: every pair of drafter, width, temperature, batch and cache, whole outputs compared.

The array has versions, since records name its cells by number. The first, of 51 cells, is that of the records of 2026-11-30: seven
drafters, fixed widths, `cost` and `adaptive`. The second begins with these, and its further cells complete the pairs of `draft-model`,
`eagle` and `governor`. A width that is a number is `fixed` at it; a controller may draft up to the largest of these.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from bench.exactness import KV_TOKENS
from bench.exactness import cell as compared
from bench.prompts import spread
from bench.speculation_engines import MADE, Engines, Log, counts
from power_lab.engine import intake
from power_lab.engine.engine import Engine
from power_lab.engine.request import SamplingParams
from power_lab.engine.trace import RunRecord
from tests.pairs import all_pairs

VERSION = 2
FIRST_DRAFTERS = ("lookup", "ngram", "hybrid", "mtp", "dspark", "dflash", "dflash2")
FIRST_WIDTHS = (1, 3, 7, 15, 31, "cost", "adaptive")
WIDTHS = (*FIRST_WIDTHS, "governor")
TEMPERATURES = (0.0, 0.8)
EVERY = (
    "lookup", "ngram", "hybrid=mtp", "mtp=mtp", "dspark=dflash", "dflash=dflash", "dflash2=dflash2",
    f"draft-model={MADE}", f"eagle={MADE}",
)  # fmt: skip
"""Every drafter, as `--drafters` takes them, those of the first version in its order."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs=2, default=[1, 8], help="requests at once")
    parser.add_argument("--cells", type=int, nargs="+", metavar="NUMBER", help="only these of the array")
    parser.add_argument(
        "--references", type=Path, metavar="FILE", help="what requests alone say: read, or made if it is not there"
    )
    parser.set_defaults(drafters=list(EVERY))


def run(args: argparse.Namespace) -> int:
    """All cells; 1 unless every output of each is the reference's."""
    campaign = Campaign(args)
    array = cases(list(campaign.engines.drafters), args.batches)
    campaign.log.facts["array"] = {"version": VERSION, "cells": len(array), "drafters": args.drafters, "widths": WIDTHS}
    print(f"{len(array)} cells of {args.prompts} prompts and {args.tokens} tokens (array {VERSION})")
    if args.references:
        campaign.share(args.references)
    for number, case in enumerate(array):
        if args.cells is None or number in args.cells:
            campaign.run(number, case)
    return int(any(cell["identical"] != cell["of"] for cell in campaign.log.cells))


def cases(drafters: Sequence[str], batches: list[int]) -> list[dict[str, Any]]:
    """An array in which every pair of values of any two axes occurs; the cells of the first version come first."""
    common = {"temperature": TEMPERATURES, "batch": batches, "cache": ("cold", "warm")}
    old = [name for name in drafters if name in FIRST_DRAFTERS]
    first = all_pairs({"drafter": old, "width": FIRST_WIDTHS, **common}) if old else []
    return all_pairs({"drafter": drafters, "width": WIDTHS, **common}, begun=first)


class Campaign:
    """All cells against requests alone, without speculation, from an empty cache."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.log = Log(args)
        self.engines = Engines(args, kv_tokens=KV_TOKENS, max_batch=max(args.batches))
        plain = self.engines.of("off")
        self.log.of_engine(plain)
        self.prompts = [intake.encode(self.engines.tokenizer, text) for _, text in spread(args.prompts)]
        self._references: dict[float, list[list[int]]] = {}

    def share(self, file: Path) -> None:
        """Take what requests alone say from a file, or make it. Raises SystemExit for a file of another engine, model or prompts."""
        about = {"engine": self.log.facts["engine"], "prompts": self.prompts, "tokens": self.args.tokens}
        if not file.exists():
            told = {str(temperature): self._reference(temperature) for temperature in TEMPERATURES}
            half = file.with_name(f".{file.name}")  # others may read it as soon as it is there
            half.write_text(json.dumps(about | {"references": told}))
            half.replace(file)
        read = json.loads(file.read_text())
        self._references = {float(key): value for key, value in read.pop("references").items()}
        if read != json.loads(json.dumps(about)):
            raise SystemExit(f"{file} holds what another engine, model or other prompts have said: delete it")

    def run(self, number: int, case: dict[str, Any]) -> None:
        expected = [tuple(tokens) for tokens in self._reference(case["temperature"])]
        engine = self.engines.of(case["drafter"])
        self.log.facts["made"] = self.engines.made
        engine.drop_prefixes()
        warm = case["cache"] == "warm"
        name = f"{number:2} {case['drafter']}, {case['width']}, T={case['temperature']}, batch {case['batch']}, {case['cache']}"
        if warm:  # whatever earlier answers left is gone, so that only prompts are cached
            self._answers(engine, case | {"drafter": "off", "batch": max(self.args.batches)}, 1, "fill", cold=False)
        start = time.monotonic()
        records = self._answers(engine, case, self.args.tokens, name, cold=not warm)
        made = case | compared(name, records, expected, time.monotonic() - start) | counts(records)
        found = sum(record.cached for record in records)
        missed = sum((len(tokens) - 1) // 64 * 64 for tokens in self.prompts) if warm else 0
        if found < missed:  # a warm cell that was not warm would prove nothing
            raise SystemExit(f"{name}: {found} of {missed} tokens were cached")
        if not made["drafted"]:
            raise SystemExit(f"{name}: nothing was drafted: {records[0].rounds[-1].note}")
        told = f"{made['accepted']}/{made['drafted']} accepted, {made['tokens_per_pass']:.2f} a pass, {made['tokens_per_s']:.0f} tok/s"
        self.log.add(made, f"{name:52} {made['identical']:3} of {made['of']:3}   {told}")

    def _reference(self, temperature: float) -> list[list[int]]:
        if temperature not in self._references:
            case = {"drafter": "off", "width": 1, "temperature": temperature, "batch": 1}
            records = self._answers(
                self.engines.of("off"), case, self.args.tokens, f"reference, T={temperature}", cold=True
            )
            self._references[temperature] = [list(record.tokens) for record in records]
        return self._references[temperature]

    def _answers(self, engine: Engine, case: dict[str, Any], tokens: int, name: str, *, cold: bool) -> list[RunRecord]:
        """`cold`: the requests of a batch find an empty cache; what they share is computed once."""
        records = []
        for at in tqdm(range(0, len(self.prompts), case["batch"]), desc=name, leave=False, disable=None):
            numbers = range(at, min(at + case["batch"], len(self.prompts)))
            tickets = [engine.submit(self.prompts[i], self._params(i, case, tokens)) for i in numbers]
            records += [ticket.result() for ticket in tickets]
            if cold:
                engine.drop_prefixes()
        engine.check()
        return records

    def _params(self, index: int, case: dict[str, Any], tokens: int) -> SamplingParams:
        width = case["width"]
        fixed = isinstance(width, int)
        return SamplingParams(
            max_tokens=tokens,
            temperature=case["temperature"],
            seed=index,
            ignore_eos=True,
            speculate=case["drafter"],
            width=width if fixed else max(w for w in WIDTHS if isinstance(w, int)),
            controller="fixed" if fixed else width,
        )
