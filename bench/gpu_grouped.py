"""Two arithmetics of products with stored codes, side by side on the GPU: weights rounded to bf16, and sums scaled group by group.

    PYTHONPATH=. python bench/gpu_grouped.py [--types Q4_K,Q4_0,Q8_0,Q6_K] [--output FILE]

Kernels are compiled by many processes; bits and values are checked, rows alone against rows together, over launch shapes and into NaN;
then times on the shapes of an 8B model, for 1 and 16 rows over the candidates, for 64, 512 and 4096. A time is that of one launch in a
captured chain over weights that exceed the L2 cache together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.gpu_linear import LARGE, SHAPES, TOTAL, Warm, bandwidth, result, seconds
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import linear, panels, planes
from power_lab.kernels.triton.linear import Shape
from power_lab.kernels.triton.panels import Tile
from power_lab.kernels.triton.planes import FORMS, DeviceWeight
from tests.kernels.triton.matrices import weight

EIGHT = ("8b qkv", "8b o", "8b gu", "8b down")
CHECKED = ((200, 576), (320, 1536))
ROWS = (1, 2, 5, 8, 9, 16, 17, 31, 33, 64, 65, 100, 128, 129, 200, 300)


@dataclass(frozen=True, slots=True)
class Case:
    """One launch; without a plan `linear` chooses.

    `programs` stands in for linear.PROGRAMS, which decides the splits, and `tile` for that of the type's grouped form.
    """

    type: QuantType
    grouped: bool
    n: int
    k: int
    gated: bool
    rows: int
    plan: Shape | Tile | None = None
    programs: int = linear.PROGRAMS
    tile: int = 0

    def chosen(self) -> None:
        """Make what is no argument of a launch so."""
        linear.PROGRAMS = self.programs
        planes.GROUPED_FORMS[self.type] = replace(FORMS[self.type], grouped=self.tile or FORMS[self.type].depth)


def weights(case: Case, whole: bool = True) -> list[DeviceWeight]:
    """Matrices of few different rows, or for a launch that only compiles, those few rows alone."""
    case.chosen()
    few, _ = weight(case.type, 64, case.k, device="cuda", grouped=case.grouped)
    copies = case.n // 64 if whole else 1
    made = {a: plane.repeat_interleave(copies, dim=1).contiguous() for a, plane in few.planes.items()}
    return [DeviceWeight(case.type, case.n, case.k, made, case.grouped) for _ in range(2 if case.gated else 1)]


def launch(case: Case, parts: list[DeviceWeight], x: torch.Tensor, out: torch.Tensor, work: linear.Workspace) -> None:
    case.chosen()
    if isinstance(case.plan, Shape):
        linear.launch(x, tuple(parts), out, work, None, int(case.gated), case.plan)
    elif isinstance(case.plan, Tile):
        splits = linear.reduction(case.n, case.k, case.gated, True)
        panels.launch(x, tuple(parts), out, work.partials, None, int(case.gated), splits, case.plan)
    elif case.gated:
        linear.gate_up(x, parts[0], parts[1], out, work)
    else:
        linear.linear(x, tuple(parts), out, work)


def compile_one(case: Case) -> str:
    """Why it cannot be compiled, or nothing."""
    for module, names in ((linear, ("product", "wide", "spread")), (panels, ("added", "grouped_wide", "spread"))):
        for name in names:
            if not isinstance(getattr(module, name), Warm):
                setattr(module, name, Warm(getattr(module, name)))
    try:
        x = torch.empty(case.rows, case.k, device="cuda", dtype=torch.bfloat16)
        launch(case, weights(case, False), x, result(case.rows, case.n, case.gated), linear.Workspace.on("cuda"))
    except Exception as error:  # noqa: BLE001
        return f"{case}: {error}"[:300]
    return ""


def compile_all(cases: list[Case]) -> None:
    began, kinds = time.perf_counter(), {}
    for case in cases:
        case.chosen()
        splits = linear.reduction(case.n, case.k, case.gated, True)[0]
        plan: Any = case.plan or "panels"
        if case.plan is None and case.rows <= linear.NARROW:
            plan = linear.shape(case.n, case.k, case.type, case.gated, case.rows, case.grouped)
        alone = (
            isinstance(plan, Shape) and case.rows <= plan.bm
        )  # one tile of rows, whose weights are not kept in the cache
        kinds.setdefault(
            (case.type, case.grouped, case.gated, case.n % 16, case.k % 256, splits, plan, alone, case.tile), case
        )
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        for why in pool.imap_unordered(compile_one, kinds.values()):
            if why:
                print("no", why, flush=True)
    print(f"compiled {len(kinds)} in {time.perf_counter() - began:.0f} s", flush=True)


# --- candidates -------------------------------------------------------------------------------------------------------------------


def few(type: QuantType, gated: bool) -> list[tuple[Shape, int]]:
    """(launch, programs) for up to 16 rows; tiles of 8 rows are for 8 at most, and four warps take the matrix unit's own instructions."""
    depth = FORMS[type].depth
    found = [(64, 8, 2, 3), (64, 16, 4, 3), (64, 16, 2, 3), (32, 16, 2, 3), (32, 16, 1, 3), (64, 16, 2, 4)]
    found += [] if gated else [(128, 16, 2, 3)]
    ahead = 0 if gated else 2
    tiles = [(Shape(depth, bn, bm, w, s, ahead), linear.PROGRAMS) for bn, bm, w, s in found]
    tiles += [(Shape(depth, 64, 16, 2, 3, 2 - ahead), linear.PROGRAMS)]
    return [*tiles, (Shape(depth, 32 if gated else 64, 16, 2, 3, ahead), linear.PROGRAMS // 2)]


def middle(type: QuantType) -> list[Shape]:
    """For 17 to 64 rows, in tiles of 32 rows or of all."""
    depth = FORMS[type].depth
    return [Shape(depth, bn, bm, w, s) for bn, bm, w, s in ((64, 32, 2, 3), (32, 64, 2, 3), (64, 64, 4, 3))]


MANY = (Tile(128, 1, 8, 4), Tile(128, 2, 8, 3))


def cases_of(type: QuantType, name: str) -> list[Case]:
    n, k, gated = SHAPES[name]
    today = [Case(type, False, n, k, gated, rows) for rows in (1, 16, 64, 512, 4096)]
    mine = [
        Case(type, True, n, k, gated, rows, s, programs)
        for s, programs in few(type, gated)
        for rows in (1, 16)
        if rows <= s.bm
    ]
    if FORMS[type].low == 4 and not FORMS[type].high:  # whose tiles may be deeper
        deep = [(64, 8, 2, 3), (64, 16, 2, 3), (32, 16, 2, 3), (64, 16, 2, 2)]
        mine += [
            Case(type, True, n, k, gated, rows, Shape(256, bn, bm, w, s, 0 if gated else 2), tile=256)
            for bn, bm, w, s in deep
            for rows in (1, 16)
            if rows <= bm
        ]
    mine += [Case(type, True, n, k, gated, 64, s) for s in middle(type)]
    mine += [Case(type, True, n, k, gated, rows, t) for t in MANY for rows in (64, 512, 4096)]
    return today + mine


# --- check ------------------------------------------------------------------------------------------------------------------------


def check_cases(types: list[QuantType]) -> list[list[Case]]:
    """Lists of cases whose rows must be the same, bit for bit."""
    found = []
    for type in types:
        for n, k in CHECKED:
            if type in LARGE and k % 256:
                continue
            for gated in (False, True):
                plans: list[Shape | Tile | None] = [None]
                if k % 256 == 0:
                    plans += [s for s, _ in few(type, gated)[:2]]
                elif gated:
                    continue
                found.append(
                    [
                        Case(type, True, n, k, gated, rows, p)
                        for p in plans
                        for rows in (ROWS if p is None else (5, 100))
                    ]
                )
    return found


def check(types: list[QuantType]) -> list[dict[str, Any]]:
    work, bad, records = linear.Workspace.on("cuda"), 0, []
    for alike in check_cases(types):
        c = alike[0]
        pairs = [weight(c.type, c.n, c.k, seed, device="cuda", grouped=True) for seed in range(2 if c.gated else 1)]
        parts = [w for w, _ in pairs]
        x = torch.randn(300, c.k, device="cuda", dtype=torch.bfloat16)
        want = result(300, c.n, c.gated)
        launch(c, parts, x, want, work)
        if not c.gated:
            exact = x.double() @ pairs[0][1].double().t()
            before = result(300, c.n, False)
            launch(c, [weight(c.type, c.n, c.k, 0, device="cuda", grouped=False)[0]], x, before, work)
            errors = [((y.double() - exact).norm() / exact.norm()).item() for y in (want, before)]
            print(
                f"{c.type.name:6s} {c.n}x{c.k} error against exact values: {errors[0]:.1e}, today {errors[1]:.1e}",
                flush=True,
            )
            records.append({"type": c.type.name, "shape": [c.n, c.k], "error": errors[0], "error_today": errors[1]})
            bad += not errors[0] < 5e-6
        for case in alike:
            got = result(case.rows, c.n, c.gated)
            launch(case, parts, x[: case.rows], got, work)
            if not torch.equal(got, want[: case.rows]):
                bad += 1
                off = (got.double() - want[: case.rows].double()).abs().max().item()
                print("BITS", case.type.name, c.n, c.k, c.gated, case.rows, case.plan, off, flush=True)
        if work.counters.any():
            bad += 1
            print("COUNTERS", c, flush=True)
            work.counters.zero_()
    print(f"check: {bad} failures", flush=True)
    return [*records, {"check": "failures", "count": bad}]


# --- times ------------------------------------------------------------------------------------------------------------------------


def times(type: QuantType, name: str, rate: float) -> list[dict[str, Any]]:
    """Both arithmetics on one shape, over copies of a weight that exceed the cache."""
    records: list[dict[str, Any]] = []
    work, inputs = linear.Workspace.on("cuda"), torch.randn(4096, SHAPES[name][1], device="cuda", dtype=torch.bfloat16)
    cases = cases_of(type, name)
    rows_of: dict[tuple[bool, int], torch.Tensor] = {}  # the first row, by splits
    for grouped, tile in sorted({(case.grouped, case.tile) for case in cases}):
        mine = [case for case in cases if (case.grouped, case.tile) == (grouped, tile)]
        first = weights(mine[0])
        nbytes = sum(w.nbytes for w in first)
        copies = [
            [DeviceWeight(w.type, w.rows, w.cols, {a: p.clone() for a, p in w.planes.items()}, grouped) for w in first]
            for _ in range(min(40, max(2, TOTAL // nbytes)))
        ]
        for case in mine:
            x, out = inputs[: case.rows], result(case.rows, case.n, case.gated)
            calls = [lambda c=case, parts=parts, x=x, out=out: launch(c, parts, x, out, work) for parts in copies]
            try:
                t = seconds((calls * 20)[: max(16, len(calls))] if case.rows <= 512 else calls[:2])
            except Exception as error:  # noqa: BLE001
                print("failed", case, str(error)[:100], flush=True)
                continue
            splits = linear.reduction(case.n, case.k, case.gated, True)[0]
            row = rows_of.setdefault((grouped, splits), out[0].clone())
            if not torch.equal(out[0], row):
                print("BITS", case, (out[0].float() - row.float()).abs().max().item(), flush=True)
                records.append({"check": "bits", "case": str(case)})
            plan = None if case.plan is None else [type_name(case.plan), *astuple(case.plan), case.programs, case.tile]
            records.append(
                {
                    "type": type.name,
                    "shape": name,
                    "grouped": grouped,
                    "rows": case.rows,
                    "us": round(t * 1e6, 2),
                    "plan": plan,
                }
            )
        floor = nbytes / rate * 1e6
        for rows in sorted({case.rows for case in mine}):
            best = sorted(
                (r for r in records if r.get("rows") == rows and r["grouped"] == grouped), key=lambda r: r["us"]
            )
            n, k, gated = SHAPES[name]
            flops = 2 * rows * n * k * (2 if gated else 1)
            print(f"{type.name:5s} {name:8s} {'grouped' if grouped else 'today  '} r{rows:<5d}", end="")
            for r in best[:4]:
                how = f"{floor / r['us']:.2f}" if rows <= 64 else f"{flops / r['us'] / 1e6:.0f}T"
                print(f" {r['us']:.2f}={how}" + (f":{'/'.join(map(str, r['plan'][1:]))}" if r["plan"] else ""), end="")
            print(flush=True)
        del copies, first
        torch.cuda.empty_cache()
    return records


def type_name(plan: Shape | Tile) -> str:
    return "few" if isinstance(plan, Shape) else "panels"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="Q4_K,Q4_0,Q8_0,Q6_K")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    types = [QuantType[name] for name in args.types.split(",")]
    checked = check_cases(types)
    before = [replace(alike[0], grouped=False, gated=False, rows=300) for alike in checked]
    timed = [case for type in types for name in EIGHT for case in cases_of(type, name)]
    compile_all([*(case for alike in checked for case in alike), *before, *timed])
    began, rate = time.perf_counter(), bandwidth()
    print(f"copy {rate / 1e12:.3f} TB/s", flush=True)
    records: list[dict[str, Any]] = [{"copy": rate}, *check(types)]
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    about = {"command": " ".join(sys.argv), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for type in types:
        for name in EIGHT:
            records += times(type, name, rate)
            if args.output:
                args.output.write_text(json.dumps({"run": about, "records": records}, separators=(",", ":")) + "\n")
        print(f"{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
