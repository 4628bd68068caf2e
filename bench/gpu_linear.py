"""Times of the GPU's matrix products, of candidates for their launches, and whether what must agree does so bit for bit.

    PYTHONPATH=. python bench/gpu_linear.py [check] [dense] [stored] [table] [wide] [partly] [held] [--output FILE]

Launches are compiled by many processes first, into Triton's cache. A time is that of one launch in a captured chain over weights that
exceed the L2 cache together, median of 7 replays. `check` is what the times are worth nothing without: stored weights against the same
values as plain f16, rows alone against rows together. `partly`: tiles some of whose lines are empty; `held`: prompts whose sums of splits
stay in registers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import linear
from power_lab.kernels.triton.linear import Shape
from power_lab.kernels.triton.operand import WHOLE
from power_lab.kernels.triton.ops import settle
from power_lab.kernels.triton.planes import FORMS, DeviceWeight
from tests.kernels.triton.matrices import rounded, weight

BF16, Q8_0, Q6_K, Q4_K, Q4_0, Q4_1 = (QuantType[name] for name in ("BF16", "Q8_0", "Q6_K", "Q4_K", "Q4_0", "Q4_1"))
SHAPES = {  # (N, K, gated)
    "8b qkv": (6144, 4096, False), "8b o": (4096, 4096, False), "8b gu": (12288, 4096, True), "8b down": (4096, 12288, False),
    "8b head": (151936, 4096, False),
    ".6 qkv": (4096, 1024, False), ".6 o": (1024, 2048, False), ".6 gu": (3072, 1024, True), ".6 down": (1024, 3072, False),
    ".6 head": (151936, 1024, False),
    "sm qkv": (960, 576, False), "sm o": (576, 576, False), "sm gu": (1536, 576, True), "sm down": (576, 1536, False),
    "sm head": (49152, 576, False),
    "ge qkv": (1536, 640, False), "ge o": (640, 1024, False), "ge gu": (2048, 640, True), "ge down": (640, 2048, False),
    "ge head": (262144, 640, False),
}  # fmt: skip
TOTAL = 400_000_000  # bytes of weights that a chain runs over


def operand(type: QuantType) -> torch.dtype:
    """Of what matrices of a type are multiplied by."""
    return torch.float16 if type in FORMS or type == QuantType.F16 else torch.bfloat16


def large(type: QuantType, n: int, k: int) -> DeviceWeight:
    """A matrix of `n` rows, few of them different where they are stored codes: made fast, and as good for bits and times."""
    if type == BF16:
        return DeviceWeight(type, n, k, {"values": torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02})
    few, _ = weight(type, 64, k, device="cuda")
    planes = {a: plane.repeat_interleave(n // 64, dim=1).contiguous() for a, plane in few.planes.items()}
    return DeviceWeight(type, n, k, planes)


def seconds(calls: list[Callable[[], Any]]) -> float:
    """Median time of one of the calls in a graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / len(calls) / 1000)
    return median(times)


def bandwidth() -> float:
    """Bytes read and written a second by a kernel that copies 2 GB."""
    a = torch.ones(1 << 29, device="cuda")
    b = torch.empty_like(a)
    return 8 * a.numel() / seconds([lambda: torch.add(a, 1.0, out=b)] * 4)


# --- launches: (type, N, K, gated, rows, Shape or None for what `linear` chooses) ----------------------------------------------------

Job = tuple[QuantType, int, int, bool, int, Shape | None]


class Warm:
    """Stands in for a kernel: launches only compile."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *a, **k: self.kernel.warmup(*a, grid=grid, **k)


def compile_one(job: Job) -> str:
    """Why it cannot be compiled, or nothing."""
    settle()  # so that the process that measures finds what this one compiles
    type, n, k, gated, rows, s = job
    for name in ("product", "paired", "wide", "spread"):
        if not isinstance(getattr(linear, name), Warm):
            setattr(linear, name, Warm(getattr(linear, name)))
    try:
        few = weight(type, 64, k, device="cuda")[0].planes
        parts = tuple(DeviceWeight(type, n, k, few) for _ in range(2 if gated else 1))
        if type == BF16:
            parts = tuple(
                DeviceWeight(type, n, k, {"values": torch.empty(n, k, device="cuda", dtype=torch.bfloat16)})
                for _ in parts
            )
        launch(
            parts,
            torch.empty(rows, k, device="cuda", dtype=operand(type)),
            result(type, rows, n, gated),
            linear.Workspace.on("cuda"),
            s,
        )
    except Exception as error:  # noqa: BLE001
        return f"{type.name} {s}: {error}"[:200]
    return ""


def compile_all(jobs: list[Job]) -> None:
    began = time.perf_counter()
    kinds: dict[Any, Job] = {}
    for job in jobs:
        type, n, k, gated, rows, s = job
        chosen = s or (
            linear.shape(n, k, type, gated, rows)
            if rows <= linear.NARROW
            else linear.tiling(rows, n, gated, type in FORMS)
        )
        depth = s.bk if s else 128
        kinds.setdefault(
            (
                type,
                gated,
                k % depth == 0,
                linear.reduction(n, k, gated, type in FORMS)[0],
                chosen,
                rows > linear.NARROW,
            ),
            job,
        )
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        for why in pool.imap_unordered(compile_one, kinds.values()):
            if why:
                print("no", why, flush=True)
    print(f"compiled {len(kinds)} in {time.perf_counter() - began:.0f} s", flush=True)


def result(type: QuantType, rows: int, n: int, gated: bool) -> torch.Tensor:
    return torch.full((rows, n), torch.nan, device="cuda", dtype=operand(type) if gated else torch.float32)


def launch(
    parts: tuple[DeviceWeight, ...], x: torch.Tensor, out: torch.Tensor, work: linear.Workspace, s: Shape | None
) -> None:
    if s:
        linear.launch(x, parts, out, work, None, len(parts) - 1, s)
    elif len(parts) > 1:
        linear.gate_up(x, parts[0], parts[1], out, work)
    else:
        linear.linear(x, parts, out, work)


def chained(calls: list[Callable[[], Any]], rows: int) -> float:
    """`seconds` of each call once at least and of 16 launches; of a prompt's, which are long, three."""
    return seconds((calls * 20)[: max(16, len(calls))] if rows <= 512 else calls[:3])


class Chain:
    """Copies of one weight, more than the cache holds."""

    def __init__(self, name: str, type: QuantType = BF16) -> None:
        (self.n, self.k, self.gated), self.type = SHAPES[name], type
        first = [large(type, self.n, self.k) for _ in range(2 if self.gated else 1)]
        self.nbytes = sum(w.nbytes for w in first)
        self.weights = [tuple(first)]
        for _ in range(min(60, max(2, TOTAL // self.nbytes)) - 1):
            self.weights.append(
                tuple(DeviceWeight(w.type, w.rows, w.cols, {a: p.clone() for a, p in w.planes.items()}) for w in first)
            )
        self.work = linear.Workspace.on("cuda")
        self.inputs = torch.randn(4096, self.k, device="cuda", dtype=operand(type))
        self.first: torch.Tensor | None = None

    def time(self, rows: int, s: Shape | None) -> float:
        x, out = self.inputs[:rows], result(self.type, rows, self.n, self.gated)
        launch(self.weights[0], x, out, self.work, s)
        if self.first is None:
            self.first = out[0].clone()
        if not torch.equal(out[0], self.first):
            print("BITS", self.n, self.k, rows, s, flush=True)
        calls = [lambda w=w: launch(w, x, out, self.work, s) for w in self.weights]
        return chained(calls, rows)

    def library(self, rows: int) -> float:
        x = torch.randn(rows, self.k, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(rows, self.n, device="cuda", dtype=torch.bfloat16)
        calls = [lambda w=w: torch.matmul(x, w.planes["values"].t(), out=out) for pair in self.weights for w in pair]
        return chained(calls, rows) * (2 if self.gated else 1)


# --- check ------------------------------------------------------------------------------------------------------------------------

CHECKED = [(200, 576), (320, 1536)]
LARGE = [type for type, form in FORMS.items() if form.block == 256]


def check_jobs() -> list[Job]:
    shapes = [(type, n, k) for type in (BF16, *FORMS) for n, k in CHECKED if type not in LARGE or k % 256 == 0]
    return [
        (type, n, k, gated, rows, None)
        for type, n, k in shapes
        for gated in (False, True)
        for rows in (1, 32, 64, 128, 300)
    ]


def check() -> list[dict[str, Any]]:
    work, bad = linear.Workspace.on("cuda"), 0
    for type, (n, k) in itertools.product((BF16, *FORMS), CHECKED):
        if type in LARGE and k % 256:
            continue
        stored, plain = [], []
        for seed in range(2):
            one, values = weight(type, n, k, seed, device="cuda")
            stored.append(one)
            held = rounded(values, type).to(operand(type))
            plain.append(DeviceWeight(QuantType.F16 if type in FORMS else BF16, n, k, {"values": held}))
        x, once = torch.randn(300, k, device="cuda", dtype=operand(type)), type not in FORMS or not FORMS[type].sub
        for gated in (False, True):
            count = 2 if gated else 1
            want = result(type, 300, n, gated)
            launch(tuple(stored[:count]), x, want, work, None)
            alike = once and linear.reduction(n, k, gated, True) == linear.reduction(n, k, gated, False)
            if not gated:
                exact = x.double() @ plain[0].planes["values"].double().t() * (WHOLE.value if type in FORMS else 1)
                error = ((want - exact).norm() / exact.norm()).item()
                if not error < (1e-5 if once else 6e-4):
                    bad += 1
                    print("VALUES", type.name, n, k, error, flush=True)
            for rows in (1, 5, 16, 17, 33, 64, 65, 128, 129, 300):
                for parts in (stored, plain) if alike else (stored,):
                    got = result(type, rows, n, gated)
                    launch(tuple(parts[:count]), x[:rows], got, work, None)
                    if not torch.equal(got, want[:rows]):
                        bad += 1
                        off = (got.double() - want[:rows].double()).abs().max().item()
                        print("BITS", parts[0].type.name, type.name, n, k, gated, rows, off, flush=True)
                        if bad > 60:
                            raise SystemExit("too many")
    print(f"check: {bad} failures", flush=True)
    return [{"check": "failures", "count": bad}]


# --- times ------------------------------------------------------------------------------------------------------------------------


def dense_candidates(name: str) -> list[Shape]:
    gated = SHAPES[name][2]
    if name[:2] in ("8b", ".6"):
        found = [(64, 128, 4, 4, a) for a in (0, 8)] + ([] if gated else [(64, 128, 4, 6, a) for a in (0, 4, 8)])
        return [Shape(bk, bn, 16, w, s, a) for bn, bk, w, s, a in found]
    return [Shape(128, 64, 16, 4, 4, a) for a in (0, 8)]


def batch_candidates(name: str) -> list[tuple[int, Shape]]:
    """For 32 to 128 rows."""
    gated = SHAPES[name][2]
    tiles = [
        (64, 128, 4, 3),
        (64, 64, 4, 4),
        (64, 64, 4, 6),
        (128, 64, 8, 4),
        (128, 64, 4, 4),
        (64, 128, 8, 3),
        (128, 64, 8, 3),
    ]
    tiles += [] if gated else [(64, 128, 4, 4), (128, 128, 8, 3)]
    return [(rows, Shape(bk, bn, rows, w, s, 8)) for rows in (32, 64, 128) for bn, bk, w, s in tiles]


def stored_candidates(type: QuantType, name: str) -> list[Shape]:
    tiles = [
        (256, 64, 4, 2),
        (256, 64, 4, 3),
        (128, 64, 4, 3),
        (256, 128, 8, 2),
        (256, 128, 8, 3),
        (128, 128, 8, 3),
        (128, 128, 8, 4),
    ]
    depths = [
        bk for bk in (128, 256) if bk >= FORMS[type].depth and (bk == FORMS[type].depth or SHAPES[name][1] % bk == 0)
    ]
    return [Shape(bk, bn, 16, w, s) for bk, bn, w, s in tiles if bk in depths]


def stored_cases() -> list[tuple[QuantType, str]]:
    eight = [(type, name) for type in (Q8_0, Q6_K, Q4_K, Q4_0) for name in ("8b qkv", "8b o", "8b gu", "8b down")]
    return [
        *eight,
        *((Q4_1, name) for name in ("sm qkv", "sm o", "sm gu", "sm down")),
        (Q4_1, "sm head"),
        (Q8_0, "ge head"),
    ]


def times(cases: list[tuple[QuantType, str, list[tuple[int, Shape | None]]]], rate: float) -> list[dict[str, Any]]:
    records = []
    for type, name, launches in cases:
        chain = Chain(name, type)
        found = []
        for rows, s in launches:
            try:
                t = chain.time(rows, s)
            except Exception as error:  # noqa: BLE001
                print("failed", type.name, name, rows, s, str(error)[:100], flush=True)
                continue
            found.append((rows, t, s))
            records.append(
                {"type": type.name, "shape": name, "rows": rows, "us": round(t * 1e6, 2), "launch": s and astuple(s)}
            )
        floor = chain.nbytes / rate
        print(f"{type.name:5s} {name:8s} floor {floor * 1e6:6.2f}", end=" |")
        for rows in sorted({rows for rows, _, _ in found}):
            mine = sorted(((t, s) for r, t, s in found if r == rows), key=lambda a: a[0])
            beside = ""
            if type == BF16 and mine[0][1] is None and "head" not in name:
                cub = chain.library(rows)
                records.append({"type": "cuBLAS", "shape": name, "rows": rows, "us": round(cub * 1e6, 2)})
                beside = f"(cublas {cub * 1e6:.1f})"
            print(f" r{rows}{beside}", end="")
            for t, s in mine[:5]:
                what = f":{s.bn}/{s.bk}/w{s.warps}/s{s.stages}/a{s.ahead}" if s else ""
                work = f"={chain.nbytes * rows / t / 1e12:.0f}T" if rows > 512 and type == BF16 else f"={floor / t:.2f}"
                print(f" {t * 1e6:.2f}{work}{what}", end="")
        print(flush=True)
        del chain
        torch.cuda.empty_cache()
    return records


def held() -> list[dict[str, Any]]:
    """Prompts: sums of splits that meet in the result, and that are held in registers."""
    records = []
    for name in ("8b o", "8b down", ".6 down"):
        chain = Chain(name)
        splits = linear.reduction(chain.n, chain.k, False, False)
        for rows in (512, 4096):
            x, found = chain.inputs[:rows], {}
            outs = [result(BF16, rows, chain.n, False) for _ in range(2)]
            for kept in (False, True):
                calls = [
                    partial(linear.launch_wide, x, w["values"], w["values"], outs[kept], None, 0, splits, kept)
                    for w in (pair[0].planes for pair in chain.weights)
                ]
                found[kept] = chained(calls, rows)
            library, same = chain.library(rows), torch.equal(outs[0], outs[1])
            records.append({
                "held": name, "rows": rows, "us": round(found[False] * 1e6, 2), "held_us": round(found[True] * 1e6, 2),
                "cublas_us": round(library * 1e6, 2), "same": same,
            })  # fmt: skip
            print(records[-1], flush=True)
        del chain
        torch.cuda.empty_cache()
    return records


def cases_of(what: str) -> list[tuple[QuantType, str, list[tuple[int, Shape | None]]]]:
    if what == "dense":
        swept = [(BF16, name, [(1, s) for s in dense_candidates(name)]) for name in SHAPES if name[:2] in ("8b", ".6")]
        many = [name for name in SHAPES if name[:2] in ("8b", ".6") and "head" not in name]
        return swept + [(BF16, name, batch_candidates(name)) for name in many]
    if what == "stored":
        return [(type, name, [(1, s) for s in stored_candidates(type, name)]) for type, name in stored_cases()]
    if what == "table":
        rows = (1, 8, 16, 32, 64, 128)
        eight = [name for name in SHAPES if name[:2] == "8b" and "head" not in name]
        return [(BF16, name, [(r, None) for r in rows]) for name in SHAPES] + [
            (type, name, [(r, None) for r in (1, 16)]) for type in (Q8_0, Q6_K, Q4_K, Q4_0) for name in eight
        ]  # fmt: skip
    if what == "partly":
        tiles = [(used, stages) for used in (0, 48, 56) for stages in (3, 4, 6)]
        rows_of = {16: (1, 16), 32: (24, 32), 64: (48, 64)}
        launches = [
            (rows, Shape(128, 64, bm, 4, stages, 8, used=used))
            for bm, several in rows_of.items()
            for rows in several
            for used, stages in tiles
        ]
        return [(BF16, name, launches) for name in ("8b qkv", "8b o")]
    plain: list[Any] = [
        (BF16, name, [(r, None) for r in (512, 4096)]) for name in SHAPES if name[:2] == "8b" and "head" not in name
    ]
    return plain + [(type, "8b gu", [(r, None) for r in (512, 4096)]) for type in (Q4_K, Q8_0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["check", "dense", "stored", "table", "wide", "partly", "held"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    settle()
    cases = [case for what in args.what if what not in ("check", "held") for case in cases_of(what)]
    jobs: list[Job] = [(type, *SHAPES[name], rows, s) for type, name, launches in cases for rows, s in launches]
    compile_all(jobs + (check_jobs() if "check" in args.what else []))
    began = time.perf_counter()
    rate = bandwidth()
    print(f"copy {rate / 1e12:.3f} TB/s", flush=True)
    records: list[dict[str, Any]] = [{"copy": rate}]
    about = {"command": " ".join(sys.argv), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    if "check" in args.what:
        records += check()
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
    more = [held] if "held" in args.what else []
    for measure in (*more, *(partial(times, [case], rate) for case in cases)):
        records += measure()
        if args.output:
            args.output.write_text(json.dumps({"run": about, "records": records}, separators=(",", ":")) + "\n")
    print(f"{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
