"""Speed of speculation beside plain decoding, paired in one run: every prompt is answered by every arm, one after another, in turns.

A request's seconds are all of it, from submission to its last token, prompt included. Answers end where the model ends them. Each request
has a cache namespace of its own: none finds another's prefix, nor its own answer in an n-gram drafter's memory. Controllers and measured
costs live on, as they do in an engine that serves. An answer that differs between arms ends the run.

Every kind of prompt is answered at every temperature asked for, greedily by default: then a small model soon repeats itself, after random
tokens and in other languages too, so that what is adversarial for a drafter is so at temperatures above 0 alone.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from bench.exactness import KV_TOKENS
from bench.prompts import LOOPS, REPEATED, TONGUES, spread
from bench.speculation_engines import Cell, Engines, Log, counts
from power_lab.engine import intake
from power_lab.engine.request import Drafting, SamplingParams
from power_lab.engine.trace import RunRecord

RESAMPLES = 10_000
RANDOM_TOKENS = 64  # of a prompt of chance
ADVERSARIAL = ("random", "tongues")


@dataclass(frozen=True)
class Arm:
    """A way of decoding; width 0 is the default controller, drafter "off" is plain."""

    drafter: Drafting
    width: int = 0

    @property
    def name(self) -> str:
        return "plain" if self.drafter == "off" else f"{self.drafter} {self.width or 'default'}"

    def params(self, tokens: int, temperature: float, seed: int) -> SamplingParams:
        widths: dict[str, Any] = {"width": self.width, "controller": "fixed"} if self.width else {}
        return SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, speculate=self.drafter, **widths)


@dataclass
class Samples:
    """What one arm came to: seconds[prompt][repeat], and the records of the last repeat."""

    seconds: dict[int, list[float]] = field(default_factory=dict)
    records: dict[int, RunRecord] = field(default_factory=dict)

    def of(self, numbers: Sequence[int]) -> np.ndarray:
        return np.array([statistics.median(self.seconds[number]) for number in numbers])


PLAIN = Arm("off")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--widths", type=int, nargs="*", default=[1, 3, 7, 15], help="fixed ones")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="of every prompt, each in turn")
    parser.add_argument(
        "--repeats", type=int, default=1, help="answers of each arm to each prompt; their median counts"
    )
    parser.add_argument(
        "--extra", type=int, default=10, help="prompts of each further kind: repeated, loops, tongues, random"
    )
    parser.add_argument("--warm-up", type=int, default=3, help="prompts that every arm answers beforehand, not counted")


def run(args: argparse.Namespace) -> int:
    speed = Speed(args)
    speed.measure()
    speed.tell()
    return 0


class Speed:
    """All arms over all prompts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.log = Log(args)
        self.engines = Engines(args, max_batch=1, kv_tokens=KV_TOKENS)
        self.log.of_engine(self.engines.of("off"))
        drafters = list(self.engines.drafters)
        self.arms = [PLAIN, *(Arm(name, width) for name in drafters for width in (0, *args.widths))]
        self.prompts = self._prompts()
        self._keys = itertools.count()
        self.log.facts["temperatures"] = args.temperature
        self.samples = {at: {arm: Samples() for arm in self.arms} for at in args.temperature}

    def _prompts(self) -> list[tuple[str, list[int]]]:
        """(kind, tokens): the prompts that the request-wide figure is over, then further kinds."""
        extra = self.args.extra
        vocab = self.engines.of("off").facts.vocab
        further = {"repeated": REPEATED, "loops": LOOPS, "tongues": TONGUES}
        texts = [*spread(self.args.prompts), *((kind, text) for kind in further for text in further[kind][:extra])]
        chance = [np.random.default_rng(seed).integers(256, vocab, RANDOM_TOKENS).tolist() for seed in range(extra)]
        known = [(kind, intake.encode(self.engines.tokenizer, text)) for kind, text in texts]
        return [*known, *(("random", tokens) for tokens in chance)]

    def measure(self) -> None:
        for number in range(min(self.args.warm_up, len(self.prompts))):
            for arm in self.arms:
                for temperature in self.args.temperature:
                    self._answer(arm, number, temperature)
        for number in tqdm(range(len(self.prompts)), desc="prompts", disable=None):
            for temperature in self.args.temperature:
                self._warm(number, temperature)
                self._measure(number, temperature)
                self._keep(number, temperature)

    def _measure(self, number: int, temperature: float) -> None:
        """One prompt by every arm. Raises SystemExit where answers differ."""
        for repeat in range(self.args.repeats):
            turn = (number + repeat) % len(self.arms)  # nobody is always the first
            for arm in (*self.arms[turn:], *self.arms[:turn]):
                start = time.perf_counter()
                record = self._answer(arm, number, temperature)
                samples = self.samples[temperature][arm]
                samples.seconds.setdefault(number, []).append(time.perf_counter() - start)
                samples.records[number] = record
        want = self.samples[temperature][PLAIN].records[number].tokens
        for arm, samples in self.samples[temperature].items():
            if samples.records[number].tokens != want:
                raise SystemExit(f"{arm.name}: prompt {number} has another answer than plain decoding")

    def _warm(self, number: int, temperature: float) -> None:
        """A GPU captures a prompt's step when it comes for the second time: so that no arm pays for it, each engine has seen it twice."""
        for arm in {self.engines.of(arm.drafter): arm for arm in self.arms}.values():
            for _ in range(2):
                self._answer(arm, number, temperature, 1)

    def _answer(self, arm: Arm, number: int, temperature: float, most: int | None = None) -> RunRecord:
        engine = self.engines.of(arm.drafter)
        tokens = self.prompts[number][1]
        room = min(most or self.args.tokens, engine.context - len(tokens))
        params = arm.params(room, temperature, number)
        record = engine.submit(tokens, params, cache_key=str(next(self._keys))).result()
        if record.finish == "error":
            raise SystemExit(f"{arm.name}: prompt {number}: {record.finish_detail}")
        return record

    def _keep(self, number: int, temperature: float) -> None:
        """The raw samples of one prompt, so that a run that is cut short has measured something."""
        kind, tokens = self.prompts[number]
        samples = self.samples[temperature]
        seconds = {arm.name: [round(value, 6) for value in samples[arm].seconds[number]] for arm in self.arms}
        said = len(samples[PLAIN].records[number].tokens)
        told = {
            "prompt": number,
            "kind": kind,
            "temperature": temperature,
            "prompt_tokens": len(tokens),
            "tokens": said,
        }
        self.log.cells.append(told | {"seconds": seconds})
        self.log.write()

    def tell(self) -> None:
        """Tables, by temperature: every arm over the set, kinds of prompts, the best fixed width afterwards."""
        kinds: dict[str, list[int]] = {}
        for number, (kind, _) in enumerate(self.prompts):
            kinds.setdefault(kind, []).append(number)
        whole = {f"all {self.args.prompts}": list(range(self.args.prompts))}
        adversarial = [number for kind in ADVERSARIAL for number in kinds.get(kind, [])]
        sets = whole | {"adversarial": adversarial} | kinds
        print(
            f"   T {'prompts':12} {'arm':20} ratio  [95% interval]  decode  drafts  accepted  a pass  replays  prefill ms   MB"
        )
        self.log.facts["arms"] = []
        for temperature, (name, numbers) in itertools.product(self.args.temperature, sets.items()):
            for arm in self.arms if numbers else ():
                made = {"prompts": name, "temperature": temperature} | self._compare(arm, numbers, temperature)
                self.log.facts["arms"].append(made)
                print(_line(made), flush=True)
        self.log.facts["hindsight"] = [
            self._hindsight(drafter, kind, numbers, temperature)
            for temperature in self.args.temperature
            for drafter in self.engines.drafters
            for kind, numbers in kinds.items()
        ]
        for made in self.log.facts["hindsight"]:
            print(
                f"{made['temperature']:4} {made['drafter']:12} {made['kind']:10} best in hindsight:"
                f" width {made['best_width']:2} of {made['best_s']:.3f} s;"
                f" default {made['default_s']:.3f} s, {made['default_of_best']:.3f} of its speed"
            )
        self.log.write()

    def _compare(self, arm: Arm, numbers: Sequence[int], temperature: float) -> Cell:
        plain, own = self.samples[temperature][PLAIN], self.samples[temperature][arm]
        records = [own.records[number] for number in numbers]
        low, high = interval(plain.of(numbers), own.of(numbers))
        decode = sum(plain.records[n].decode_s for n in numbers) / max(sum(r.decode_s for r in records), 1e-9)
        return {
            "arm": arm.name,
            "ratio": round(float(plain.of(numbers).sum() / own.of(numbers).sum()), 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "decode_ratio": round(decode, 4),
            "tokens": sum(len(record.tokens) for record in records),
            "tokens_per_s": round(sum(len(record.tokens) for record in records) / float(own.of(numbers).sum()), 2),
            "prefill_ms": round(1e3 * statistics.mean(record.prefill_s for record in records), 3),
            "memory_mb": self.engines.memory_mb(arm.drafter),
            **counts(records),
        }

    def _hindsight(self, drafter: Drafting, kind: str, numbers: Sequence[int], temperature: float) -> Cell:
        """Of the fixed widths, plain decoding among them, the fastest on these prompts, beside the default controller."""
        arms = self.samples[temperature]
        fixed = {0: arms[PLAIN]} | {width: arms[Arm(drafter, width)] for width in self.args.widths}
        seconds = {width: float(samples.of(numbers).sum()) for width, samples in fixed.items()}
        best = min(seconds, key=lambda width: seconds[width])
        default = float(arms[Arm(drafter)].of(numbers).sum())
        return {
            "drafter": drafter,
            "kind": kind,
            "temperature": temperature,
            "best_width": best,
            "best_s": round(seconds[best], 5),
            "default_s": round(default, 5),
            "default_of_best": round(seconds[best] / default, 4),
            "seconds_by_width": {str(width): round(value, 5) for width, value in seconds.items()},
        }


def interval(plain: np.ndarray, own: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of summed seconds; prompts are drawn, each with both of its times.

    Args:
        plain, own: [P] seconds of each prompt.
    """
    chosen = np.random.default_rng(0).integers(0, len(plain), (RESAMPLES, len(plain)))
    low, high = np.quantile(plain[chosen].sum(1) / own[chosen].sum(1), (0.025, 0.975))
    return float(low), float(high)


def _line(made: Cell) -> str:
    accepted = "" if made["acceptance"] is None else f"{made['acceptance']:.1%}"
    return (
        f"{made['temperature']:4} {made['prompts']:12} {made['arm']:20} {made['ratio']:5.3f}"
        f"  [{made['low']:.3f}, {made['high']:.3f}]  {made['decode_ratio']:5.3f}"
        f"  {made['drafted']:6}  {accepted:>8}  {made['tokens_per_pass']:6.2f}  {made['replays']:7}  {made['prefill_ms']:10.2f}"
        f"  {made['memory_mb']:.0f}"
    )
