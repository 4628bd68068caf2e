"""Attention by registers and by descriptors, where a program walks all keys of a group and where splits are shared out: equal bits first,
then time.

    PYTHONPATH=. python bench/gpu_walks.py [PART...] [--output FILE]

PART: walks, shares or loops, all by default.

What it finds belongs into `attention.ways`. The first arm of a case is the plan that its steps take over tables that are full (an engine's
tables have room for its whole context, so that short contexts meet plans of wide tables, too). Whole walks are timed by registers, in 2
stages, and by descriptors, in 2 and 3; shared ones by registers, in 1 stage, and by descriptors, in 2. `loops` times both with what
the plan has not: one loop over all tiles, all masked, or loops of their own for tiles that need no mask. All arms of a case compute on the
same caches, in turn, which together are twice the L2 cache. Times are medians of replays of a captured graph, taken in rounds, each arm
once a round.
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
import triton

from bench.gpu_attention import (
    DEVICE,
    GEMMA,
    LARGE,
    QWEN,
    SMOLLM2,
    Case,
    Heads,
    Step,
    captured,
    compile_one,
    copy_rate,
    replayed,
)
from power_lab.kernels.triton.attention import Plan

FULL = [(64, keys) for keys in (64, 128, 200, 256, 400, 512, 1024)]  # sequences, keys
FULL += [(50, 200), (100, 200), (100, 1024), (128, 200), (128, 1024)]
FEW = [(sequences, keys) for keys in (512, 2048) for sequences in (1, 4, 8, 16, 32)]
LOOPS = [(1, 200), (1, 2048), (16, 256), (64, 200), (64, 256), (64, 384), (64, 1024)]
CACHES = 1e8  # bytes that are read before a cache comes again
ROUNDS = 3

Record = dict[str, Any]


def cases() -> list[Case]:
    """One row a sequence, but for some: 512 rows of a prompt, 16 of a window. `part`: walks, shares or loops."""
    return [
        *(Case("walks", heads, *size) for heads in (LARGE, SMOLLM2, QWEN, GEMMA) for size in _rows(FULL)),
        *(Case("shares", heads, *size) for heads in (LARGE, QWEN, SMOLLM2, GEMMA) for size in _rows(FEW)),
        Case("walks", LARGE, 1, 512, 2048),
        *(Case("loops", heads, *size) for heads in (LARGE, QWEN, SMOLLM2, GEMMA) for size in _rows(LOOPS)),
        *(Case("loops", LARGE, *size) for size in ((1, 1, 32768), (8, 1, 32768), (1, 16, 200))),
    ]


def _rows(sizes: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    return ((sequences, 1, keys) for sequences, keys in sizes)


def arms(case: Case) -> list[Plan]:
    """The plan that a step takes, then others of the case's part."""
    own = case.plan
    programs, ways = (own.programs, ((1, False), (2, True)))
    if case.part == "walks":
        programs, ways = 0, ((2, False), (2, True), (3, True))
    if case.part == "loops":
        ways = ((2, False), (2, True), (3, True), (4, True)) if programs == 0 else ((1, False), (2, True), (3, True))
    others = [replace(own, programs=programs, stages=stages, described=described) for stages, described in ways]
    if case.part == "loops":
        others = [replace(plan, bare=not own.bare) for plan in others]
    return list(dict.fromkeys([own, *others]))


def variants(cases: list[Case]) -> list[Case]:
    """A case for each kernel that has to be compiled."""
    found: dict[tuple[Heads, Plan, int], Case] = {}
    for case in cases:
        for plan in arms(case):
            listed = triton.next_power_of_2(len(case.rows)) if plan.programs else 0
            found.setdefault(
                (case.heads, replace(plan, programs=min(plan.programs, 1)), listed), replace(case, cut=plan)
            )
    return list(found.values())


def measure(case: Case, copy: float) -> Iterator[Record]:
    """All arms of a case. Raises SystemExit where their bits differ."""
    _, kv_heads, dim = case.heads
    read = 4 * case.sequences * case.length * kv_heads * dim
    step = Step(case, max(2, min(256, int(CACHES // read))))
    plans, times = arms(case), max(20, len(step.caches))
    want = _attended(step, plans[0])
    for plan in plans[1:]:
        if not torch.equal(_attended(step, plan).view(torch.int16), want.view(torch.int16)):
            raise SystemExit(f"not measured: {_named(case)}: {plan} has other bits than {plans[0]}")
    graphs = {}
    for plan in plans:
        step.case = replace(case, cut=plan)
        graphs[plan] = captured(step.attend, times)
    taken: dict[Plan, list[float]] = {plan: [] for plan in plans}
    for _ in range(ROUNDS):
        for plan, graph in graphs.items():
            taken[plan].append(replayed(graph, 9) / times)
    for plan, rounds in taken.items():
        median = statistics.median(rounds)
        yield {
            "part": case.part, "case": _named(case), "own": plan == plans[0], "plan": asdict(plan),
            "us": round(1e6 * median, 2), "rounds_us": [round(1e6 * each, 2) for each in rounds],
            "of_copy": round(read / median / copy, 3),
        }  # fmt: skip


def _named(case: Case) -> Record:
    return {"heads": case.heads, "sequences": case.sequences, "rows": case.window, "keys": case.length}


def _attended(step: Step, plan: Plan) -> torch.Tensor:
    """What a plan leaves of an output and scratch that were poisoned."""
    step.out.fill_(torch.nan)
    step.scratch.fill_(torch.nan)
    step.case = replace(step.case, cut=plan)
    out = step.attend().clone()
    if out.isnan().any():
        raise SystemExit(f"not measured: {plan} left elements unwritten")
    return out


def said(record: Record) -> str:
    case, plan = record["case"], record["plan"]
    what = f"{record['part']} {case['heads']} {case['sequences']}x{case['rows']}@{case['keys']}"
    how = f"{plan['programs'] or 'whole'} {'described' if plan['described'] else 'registers'} {plan['stages']}"
    how += "" if plan["bare"] else " one loop"
    return f"{what:32} {how:27} {'own' * record['own']:3} {record['us']:8.2f} us  {record['of_copy']} of copy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if unknown := {*args.parts} - {case.part for case in cases()}:
        parser.error(f"{min(unknown)!r} is no part")
    chosen = [case for case in cases() if case.part in args.parts or not args.parts]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, variants(chosen)))
    copy = copy_rate()
    name = torch.cuda.get_device_name(DEVICE)
    run = {"command": " ".join(sys.argv), "card": name, "copy": copy, "commit": args.commit}
    made: list[Record] = []
    for case in chosen:
        for record in measure(case, copy):
            made.append(record)
            print(said(record), flush=True)
        if args.output:
            args.output.write_text(json.dumps({"run": run, "records": made}, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
