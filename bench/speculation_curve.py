"""Speed-up of a large model against acceptance and width, by a drafter of set acceptance whose drafts cost what a small decoder's cost.

The drafter knows what the target said in a recorded run and errs by a seeded coin at each position, so that a draft is right with the set
chance if those before it were. Before that it runs a small decoder of its own over the request, as a draft model does, or waits for a given
time. The bound beside each figure is tokens a pass times the cost of a plain step over that of a round's drafting, forward pass and
sampling: what is missing to it is the rest of the host's work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from bench.geometries import GEOMETRIES, random_model
from bench.measure import step_seconds
from bench.speculation_engines import Cell, Log, counts
from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.engine import Engine
from power_lab.engine.loader import Loaded, LoadedDraft
from power_lab.engine.request import Drafting, SamplingParams
from power_lab.engine.speculation.drafters import Draft, DraftAsk, Drafter
from power_lab.engine.trace import RunRecord
from power_lab.kernels.table import select

PROMPT = 128
NAME: Drafting = "ngram"  # in whose place the drafter works


class Synthetic:
    """Right with a set chance, at the price of another drafter's work.

    Args:
        known: prompt and output of the recorded run. acceptance: chance of each draft. vocab: of the target.
        work: what a draft costs: done before each answer; what it answers is not used.
    """

    name: str = NAME  # under which its calls are measured and requests ask for it

    def __init__(self, known: Sequence[int], acceptance: float, vocab: int, work: Drafter) -> None:
        coin = np.random.default_rng(0).random(len(known)) < acceptance
        self._drafts = [token if right else (token + 1) % vocab for token, right in zip(known, coin, strict=True)]
        self._work = work

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None:
        self._work.begin(request_id, prompt, namespace)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        self._work.propose(asks)
        return [Draft(tuple(self._drafts[len(ask.tokens) :][: ask.width])) for ask in asks]

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        self._work.commit(request_id, emitted)

    def end(self, request_id: int) -> None:
        self._work.end(request_id)


class Waiting:
    """Work of a given time: so many seconds a draft token."""

    name = "waiting"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None: ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        end = time.perf_counter() + self._seconds * max(ask.width for ask in asks)
        while time.perf_counter() < end:
            pass
        return [Draft()] * len(asks)

    def commit(self, request_id: int, emitted: Sequence[int]) -> None: ...

    def end(self, request_id: int) -> None: ...


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", choices=list(GEOMETRIES), default="qwen3-8b")
    parser.add_argument(
        "--draft-geometry", choices=list(GEOMETRIES), help="the small decoder that drafts; else --draft-us"
    )
    parser.add_argument("--draft-us", type=float, default=0.0, help="microseconds of a draft token, waited for")
    parser.add_argument("--acceptances", type=float, nargs="+", default=[0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0])
    parser.add_argument("--widths", type=int, nargs="+", default=list(range(1, 16)))


def run(args: argparse.Namespace) -> int:
    Curve(args).measure()
    return 0


class Curve:
    """Every acceptance with every width, and with the default controller."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.log = Log(args)
        loaded = _load(args)
        config = EngineConfig(
            device=args.device, prefix_cache=False, max_batch=1, kv_tokens=-(-(PROMPT + args.tokens + 64) // 64) * 64
        )
        self.engine = Engine(config, loaded=loaded, threaded=False)
        self.log.of_engine(self.engine)
        self._vocab = self.engine.facts.vocab
        self._prompt = np.random.default_rng(0).integers(0, 256, PROMPT).tolist()
        self._make = self.engine._proposer._make

    def measure(self) -> None:
        self._answer("off", 1)  # compiles and captures
        plain = [self._answer("off", 1) for _ in range(3)]
        known = [*self._prompt, *plain[0].tokens]
        step = statistics.median(step_seconds([record]) for record in plain)
        device = _device_seconds(plain)
        self.log.facts["plain"] = {"ms": round(step * 1e3, 4), "device_ms": round(device * 1e3, 4)}
        print(f"plain: {step * 1e3:.3f} ms a step, {device * 1e3:.3f} ms on the device")
        choices: list[int] = [*self.args.widths, 0]
        for acceptance in tqdm(self.args.acceptances, desc="acceptances", disable=None):
            drafter = Synthetic(known, acceptance, self._vocab, self._work())
            self._use(lambda _, made=drafter: made)
            for width in choices:
                record = self._warm(width)
                if list(record.tokens) != known[PROMPT:]:
                    raise SystemExit(f"width {width}, acceptance {acceptance}: another output than plain decoding")
                self._tell(acceptance, width, record, step)

    def _use(self, make: Callable[[str], Drafter]) -> None:
        self.engine._proposer._make = make
        self.engine.drop_prefixes()  # and the drafters of before

    def _work(self) -> Drafter:
        return self._make("draft-model") if self.args.draft_geometry else Waiting(self.args.draft_us / 1e6)

    def _warm(self, width: int) -> RunRecord:
        """The second of two answers: the first compiles and captures the shapes of its windows."""
        self._answer(NAME, width)
        return self._answer(NAME, width)

    def _answer(self, drafter: Drafting, width: int) -> RunRecord:
        widths: dict[str, Any] = {"width": width, "controller": "fixed"} if width else {"width": max(self.args.widths)}
        params = SamplingParams(max_tokens=self.args.tokens, ignore_eos=True, speculate=drafter, **widths)
        return self.engine.submit(self._prompt, params).result()

    def _tell(self, acceptance: float, width: int, record: RunRecord, step: float) -> None:
        rounds = record.rounds[1:]
        spent = rounds[-1].at - record.rounds[0].at
        said = sum(len(entry.emitted) for entry in rounds)
        per_pass = said / len(rounds)
        round_s = statistics.mean(entry.draft_s + entry.forward_s + entry.sample_s for entry in rounds)
        cell: Cell = {
            "acceptance_set": acceptance,
            "width": width or "default",
            "speed_up": round(step * said / spent, 4),
            "bound": round(per_pass * step / round_s, 4),
            "expected_tokens_per_pass": _expected(acceptance, width) if width else None,
            "draft_ms": round(1e3 * statistics.mean(entry.draft_s for entry in rounds), 4),
            "verify_ms": round(1e3 * statistics.median(entry.forward_s for entry in rounds), 4),
            **counts([record]),
        }
        line = f"acceptance {acceptance:4.2f} width {cell['width']!s:7} speed-up {cell['speed_up']:5.2f} of at most {cell['bound']:5.2f}"
        self.log.add(
            cell,
            f"{line}, {per_pass:5.2f} tokens a pass, draft {cell['draft_ms']:.3f} ms, verify {cell['verify_ms']:.3f} ms",
        )


def _load(args: argparse.Namespace) -> Loaded:
    ops = select(args.device, "exact", args.threads, Paths.default().kernels)
    context = PROMPT + args.tokens + 64
    loaded = random_model(args.geometry, ops, args.device, context)
    if not args.draft_geometry:
        return loaded
    if GEOMETRIES[args.draft_geometry]["vocab_size"] != loaded.facts.vocab:
        raise SystemExit(f"--draft-geometry: {args.draft_geometry} has another vocabulary than {args.geometry}")
    small = random_model(args.draft_geometry, ops, args.device, context)
    draft = LoadedDraft(small.model, small.facts.model, "", sum(small.facts.quantisation.values()))
    return replace(loaded, draft=draft)


def _device_seconds(records: Sequence[RunRecord]) -> float:
    """Median seconds of a decode step's forward pass and sampling."""
    return statistics.median(entry.forward_s + entry.sample_s for record in records for entry in record.rounds[1:])


def _expected(acceptance: float, width: int) -> float:
    """Tokens of a round whose every draft is right with this chance (Leviathan et al. 2023, eq. 1)."""
    return round(sum(acceptance**n for n in range(width + 1)), 4)
