"""Attention of single rows with hints to the L2 cache and without, by registers and by descriptors: equal bits first, then time.

    PYTHONPATH=. python bench/gpu_hints.py [--output FILE]

`Plan.hints`: keys and values are read to go first (1), results of splits stay longest (2), or both (3). Triton 3.6 drops the hint of loads
by descriptors, so there only 2 is another kernel, and of loads in several stages, so that groups which are walked whole take none: of those
(64 contexts of 1,024 and of 256 keys) descriptors are timed beside registers. The first arm of a case is the plan that steps take. All arms
of a case compute on the same caches, more than the L2 cache holds; times are medians of replays of a captured graph, taken in rounds, each
arm once a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.gpu_attention import DEVICE, GEMMA, LARGE, SMOLLM2, Case, Step, compile_one, copy_rate, seconds
from power_lab.kernels.triton.attention import Plan, split

SIZES = ((1, 32768), (8, 32768), (64, 1024), (1, 2048))  # sequences, keys
ROUNDS = 3

Record = dict[str, Any]


def cases() -> list[Case]:
    return [
        *(
            Case("hints", heads, sequences, 1, length)
            for heads in (LARGE, SMOLLM2, GEMMA)
            for sequences, length in SIZES
        ),
        Case("hints", LARGE, 64, 1, 256),
    ]


def arms(case: Case) -> list[Plan]:
    """The plan that a step takes, then those that differ from it in hints or in how tiles are read."""
    own = replace(case.plan, hints=0)
    whole = own.programs == 0
    ways = [replace(own, described=False, stages=2 if whole else 1)]
    ways += [replace(own, described=True, stages=stages) for stages in ((2, 3) if whole else (2,))]
    found = [own]
    for way in ways:
        hints = (0,) if whole else (0, 2) if way.described else (0, 1, 2, 3)
        found += [replace(way, hints=hint) for hint in hints]
    return list(dict.fromkeys(found))


def measure(case: Case, copy: float) -> Iterator[Record]:
    """All arms of a case. Raises SystemExit where their bits differ."""
    _, kv_heads, dim = case.heads
    read = 4 * case.sequences * case.length * kv_heads * dim
    step = Step(case, max(2, min(24, int(2e8 // read))))
    plans = arms(case)
    want = _attended(step, plans[0])
    for plan in plans[1:]:
        if not torch.equal(_attended(step, plan).view(torch.int16), want.view(torch.int16)):
            raise SystemExit(
                f"not measured: {case.heads} {case.sequences}x{case.length}: {plan} has other bits than {plans[0]}"
            )
    times: dict[Plan, list[float]] = {plan: [] for plan in plans}
    for _ in range(ROUNDS):
        for plan in plans:
            step.case = replace(case, cut=plan)
            times[plan].append(seconds(step.attend, max(20, len(step.caches))))
    for plan, taken in times.items():
        least = statistics.median(taken)
        yield {
            "heads": case.heads, "sequences": case.sequences, "keys": case.length, "splits": -(-case.length // split(dim)),
            **asdict(plan), "us": round(1e6 * least, 2), "rounds_us": [round(1e6 * each, 2) for each in taken],
            "of_copy": round(read / least / copy, 3),
        }  # fmt: skip


def _attended(step: Step, plan: Plan) -> torch.Tensor:
    """What a plan leaves of an output and scratch that were poisoned."""
    step.out.fill_(torch.nan)
    step.scratch.fill_(torch.nan)
    step.case = replace(step.case, cut=plan)
    out = step.attend().clone()
    if out.isnan().any():
        raise SystemExit(f"not measured: {plan} left elements unwritten")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    variants = {(c.heads, len(c.rows), plan): replace(c, cut=plan) for c in cases() for plan in arms(c)}
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, variants.values()))
    copy = copy_rate()
    run = {"card": torch.cuda.get_device_name(DEVICE), "copy": copy, "commit": args.commit}
    made: list[Record] = []
    for case in cases():
        for record in measure(case, copy):
            made.append(record)
            print("  ".join(f"{key} {value}" for key, value in record.items()), flush=True)
        if args.output:
            args.output.write_text(json.dumps({"run": run, "records": made}, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
