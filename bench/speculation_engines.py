"""What the parts of `bench/speculation.py` share: an engine for each drafter, the log, and a cell's counts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, cast, get_args

from bench.cpu import about
from bench.floors import card
from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.engine import Engine
from power_lab.engine.loader import load
from power_lab.engine.request import Drafting
from power_lab.engine.speculation.metrics import Metrics
from power_lab.engine.tokenizer import Tokenizer
from power_lab.engine.trace import RunRecord

Cell = dict[str, Any]


class Engines:
    """One engine for each `draft=` that drafters need, and one without for plain decoding; none has a thread of its own.

    Args:
        args: device, threads, model and drafters, as asked. settings: of every engine.

    Attributes:
        drafters: name -> the `draft=` of its engine. tokenizer: the model's, once it is loaded.
    """

    tokenizer: Tokenizer

    def __init__(self, args: argparse.Namespace, **settings: Any) -> None:
        self._args, self._settings = args, settings
        self.drafters: dict[Drafting, str] = dict(drafter(text) for text in args.drafters)
        self._made: dict[str, Engine] = {}

    def of(self, drafter: Drafting) -> Engine:
        """Where requests may ask for this drafter; "off" is plain decoding, in an engine that has no draft weights."""
        draft = self.drafters.get(drafter, "")
        if draft not in self._made:
            config = EngineConfig(
                model=self._args.model,
                device=self._args.device,
                threads=self._args.threads,
                draft=draft,
                **self._settings,
            )
            made = load(config, Paths.default(), lambda *_: None)
            self.tokenizer = made.tokenizer
            self._made[draft] = Engine(config, loaded=made, threaded=False)
        return self._made[draft]

    def memory_mb(self, drafter: Drafting) -> float:
        return round(self.of(drafter).memory().total / 1e6, 1)


def drafter(text: str) -> tuple[Drafting, str]:
    """NAME[=DRAFT]."""
    name, _, draft = text.partition("=")
    if name not in get_args(Drafting) or name == "off":
        raise SystemExit(f"--drafters: {name!r} is not a drafter")
    return cast(Drafting, name), draft


class Log:
    """The cells of a run with what ran them, on the screen and in a file that is written anew after each.

    Attributes:
        facts: more about the run, put into the file's head.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._output = args.output
        self._about = about(args) | {"card": card(args.device)} | ({"commit": args.commit} if args.commit else {})
        self.facts: dict[str, Any] = {}
        self.cells: list[Cell] = []

    def of_engine(self, engine: Engine) -> None:
        facts = engine.facts
        self.facts["engine"] = {
            "model": facts.model,
            "sha256": facts.sha256,
            "digest": facts.digest,
            "versions": facts.versions,
        }

    def add(self, cell: Cell, line: str) -> None:
        self.cells.append(cell)
        print(line, flush=True)
        self.write()

    def write(self) -> None:
        if self._output:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"run": self._about, **self.facts, "cells": self.cells}, indent=1)
            self._output.write_text(text + "\n")


def counts(records: Sequence[RunRecord]) -> Cell:
    """What speculation came to, histograms included, in plain values."""
    metrics = Metrics.of(records)
    row = {key: round(value, 5) if isinstance(value, float) else value for key, value in metrics.row().items()}
    return row | {
        "widths": {str(width): count for width, count in sorted(metrics.widths.items())},
        "accepted_lengths": {str(length): count for length, count in sorted(metrics.accepted_lengths.items())},
    }
