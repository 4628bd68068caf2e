"""What the parts of `bench/speculation.py` share: an engine for each drafter, the log, and a cell's counts."""

from __future__ import annotations

import argparse
import json
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
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
from power_lab.models import ensure

Cell = dict[str, Any]
MADE = "made"  # the DRAFT of a drafter that no file brings: built for the run, in a folder that ends with it


class Engines:
    """One engine for each `draft=` that drafters need, and one without for plain decoding; none has a thread of its own.

    Args:
        args: device, threads, model and drafters, as asked. settings: of every engine.

    Attributes:
        drafters: name -> the `draft=` of its engine. tokenizer: the model's, once it is loaded.
        made: name -> what was built for it, with its SHA-256.
    """

    tokenizer: Tokenizer

    def __init__(self, args: argparse.Namespace, **settings: Any) -> None:
        self._args, self._settings = args, settings
        self.drafters: dict[Drafting, str] = dict(drafter(text) for text in args.drafters)
        self._engines: dict[str, Engine] = {}
        self._folder: Path | None = None
        self.made: dict[str, str] = {}

    def of(self, drafter: Drafting) -> Engine:
        """Where requests may ask for this drafter; "off" is plain decoding, in an engine that has no draft weights."""
        draft = self.drafters.get(drafter, "")
        if draft == MADE:
            draft = self.drafters[drafter] = str(self._build(drafter))
        if draft not in self._engines:
            config = EngineConfig(
                model=self._args.model,
                device=self._args.device,
                threads=self._args.threads,
                draft=draft,
                **self._settings,
            )
            loaded = load(config, Paths.default(), lambda *_: None)
            self.tokenizer = loaded.tokenizer
            self._engines[draft] = Engine(config, loaded=loaded, threaded=False)
            if drafter in self.made:
                self.made[drafter] += f", sha256 {loaded.facts.draft.sha256[:16]}"
        return self._engines[draft]

    def _build(self, drafter: Drafting) -> Path:
        from bench import speculation_drafts

        if self._folder is None:
            self._folder = Path(mkdtemp(prefix="power-lab-drafts-"))
            weakref.finalize(self, shutil.rmtree, self._folder)
        if drafter == "draft-model":
            model = ensure(self._args.model, Paths.default(), lambda *_: None).path
            self.made[drafter] = "the model itself, its layers in Q3_K and MXFP4"
            return speculation_drafts.few_bits(model, self._folder / "few-bits.gguf")
        if drafter == "eagle":
            plain = self.of("off")
            self.made[drafter] = "an assistant of two layers, random weights"
            spec, out = plain._loaded.model.spec, self._folder / "eagle.safetensors"
            return speculation_drafts.random_eagle(spec, plain.facts.sha256, out)
        raise SystemExit(f"--drafters: nobody makes a {drafter}; only draft-model and eagle")

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
