"""Attention and rotation on a GPU: equal bits first, then time against the floors of memory and of the matrix unit.

    PYTHONPATH=$PWD python bench/gpu_attention.py [--parts check,decode,prefill,short] [--splits 128,256] [--json FILE]

Needs torch and triton only. Times are medians of replays of a captured graph of launches over caches in turn, which together are larger
than the L2 cache where bandwidth is the question.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context

import torch
from triton.runtime.errors import OutOfResources

from power_lab.kernels.ops import BLOCK, Batch
from power_lab.kernels.triton import attention, rope

DEVICE = "cuda"
SPLIT = attention.split
LARGE, SMOLLM2, QWEN, GEMMA = (32, 8, 128), (9, 3, 64), (16, 8, 128), (4, 1, 256)
Heads = tuple[int, int, int]
Row = tuple[int, int]  # sequence, position


@dataclass(frozen=True)
class Case:
    """A step: `sequences` of `length` keys, the last `window` positions of each being its rows; layer: its sliding window."""

    part: str
    heads: Heads
    sequences: int
    window: int
    length: int
    layer: int = 0
    cut: attention.Plan | None = None
    split: int = 0
    ordered: bool = False

    @property
    def rows(self) -> list[Row]:
        return [(s, p) for s in range(self.sequences) for p in range(self.length - self.window, self.length)]

    @property
    def pages(self) -> int:
        return -(-self.length // BLOCK)

    @property
    def plan(self) -> attention.Plan:
        return self.cut or attention.plan(len(self.rows), *self.heads, self.pages)


def choose(split: int) -> None:
    """Splits of so many keys from here on, whatever the width; 0: as the package chooses."""
    attention.split = (lambda _: split) if split else SPLIT
    for cached in (attention.plan, attention.scratch_floats):
        cached.cache_clear()


class Step:
    """The tensors of a case, `copies` caches of it."""

    def __init__(self, case: Case, copies: int, seed: int = 1) -> None:
        q_heads, kv_heads, dim = case.heads
        random = torch.Generator(DEVICE).manual_seed(seed)
        total = case.sequences * case.pages
        order = torch.randperm(total, device=DEVICE, generator=random)
        if case.ordered:
            order = torch.arange(total, device=DEVICE)
        tables = (order.int() + 1).view(case.sequences, case.pages)
        shape = (total + 1, kv_heads, BLOCK, dim)
        self.caches = [[torch.empty(shape, device=DEVICE, dtype=torch.bfloat16) for _ in "kv"] for _ in range(copies)]
        for cache in self.caches:
            for part in cache:
                part.normal_(generator=random)
        sequence, position = (torch.tensor(each, dtype=torch.int32).to(DEVICE) for each in zip(*case.rows, strict=True))
        slots = tables[sequence.long(), position.long() // BLOCK].long() * BLOCK + position % BLOCK
        self.case = case
        self.batch = self.listed(Batch(sequence, position, slots, sequence, tables, sequence))
        rows = len(case.rows)
        self.qkv = torch.randn(rows, (q_heads + 2 * kv_heads) * dim, device=DEVICE, generator=random)
        rope.queries(self.qkv, q_heads, dim).copy_(torch.randn(rows, q_heads, dim, device=DEVICE, generator=random))
        self.out = torch.full((rows, q_heads * dim), torch.nan, device=DEVICE, dtype=torch.bfloat16)
        need = attention.scratch_floats(rows, q_heads, kv_heads, dim, case.pages) + (1 << 16)
        self.scratch = torch.full((need,), torch.nan, device=DEVICE)

    def listed(self, batch: Batch) -> Batch:
        """The batch with its groups, as a step has them before its first layer."""
        size = self.case.plan.rows
        room = torch.empty(len(batch.positions) + 1, dtype=torch.int32, device=DEVICE)
        return replace(batch, groups={size: attention.list_rows(batch, size, room)})

    def attend(self, copy: int = 0) -> torch.Tensor:
        (q_heads, _, dim), case, (keys, values) = self.case.heads, self.case, self.caches[copy % len(self.caches)]
        attention.attention(
            self.qkv, self.batch, q_heads, dim**-0.5, keys, values, self.out, case.layer, 0.0, None, self.scratch, case.cut
        )  # fmt: skip
        return self.out


def seconds(call: Callable[[int], object], times: int, replays: int = 9) -> float:
    """Of one of `times` calls in a captured graph: median of `replays`."""
    return replayed(captured(call, times), replays) / times


def captured(call: Callable[[int], object], times: int) -> torch.cuda.CUDAGraph:
    """A graph of calls, replayed once."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(times):
            call(i)
    graph.replay()
    return graph


def replayed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Seconds of a replay, the median."""
    taken = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def copy_rate() -> float:
    """Bytes read and written a second by a copy."""
    source, target = (torch.empty(2**30, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    source.normal_()
    return (
        2 * source.nbytes / seconds(lambda _: torch.neg(source, out=target), 4)
    )  # a kernel: the copy engine is slower


# --- equal bits -------------------------------------------------------------------------------------------------------------------------


LENGTH = 1000  # keys of the checked sequence


def checked(splits: Sequence[int]) -> list[list[Case]]:
    """For each kind of layer: one prefill, then the same rows in plans of other shapes, in windows and alone."""
    found = []
    for heads, layer, split in ((LARGE, 0, 128), (LARGE, 0, 256), (SMOLLM2, 300, 128), (GEMMA, 300, 64)):
        if split not in splits and 0 not in splits:
            continue
        pages = -(-LENGTH // BLOCK)
        choose(split)
        whole = Case("check", heads, 1, LENGTH, LENGTH, layer, attention.plan(LENGTH, *heads, pages), split)
        group = [whole]
        for rows in (1, 16, 61):
            group.append(replace(whole, window=rows, cut=attention.plan(rows, *heads, pages)))
        found.append(group)
    return found


def check(group: Sequence[Case]) -> Iterator[str]:
    """Bits must be those of the first case, whose values are compared with f64."""
    case = group[0]
    choose(case.split)
    (q_heads, kv_heads, dim), layer = case.heads, case.layer
    step = Step(case, 1)
    pages = step.batch.tables[0].long()
    for part in step.caches[0]:
        part[0] = torch.nan
        part[pages[-1], :, LENGTH % BLOCK :] = torch.nan
    whole = step.attend().clone()
    k, v = (x[pages].transpose(1, 2).flatten(0, 1)[:LENGTH].double() for x in step.caches[0])
    k, v = (x.repeat_interleave(q_heads // kv_heads, 1).transpose(0, 1) for x in (k, v))
    at = torch.arange(LENGTH, device=DEVICE)
    seen = at[None, :] <= at[:, None]
    if layer:
        seen &= at[None, :] > at[:, None] - layer
    q = rope.queries(step.qkv, q_heads, dim).transpose(0, 1).double()
    weights = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    want = (weights @ v).transpose(0, 1).flatten(1)
    yield f"check {case.heads} split {case.split} window {layer}: error {float((whole.double() - want).norm() / want.norm()):.1e}"
    for other in group[1:]:
        results = []
        for first in {LENGTH - other.window, *((0, 60, 250, 255, 256, 511, 700) if other.window < 100 else ())}:
            part, rows = Step(other, 0), slice(first, first + other.window)
            index = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=DEVICE)
            part.caches = step.caches
            part.batch = part.listed(
                replace(part.batch, positions=index, table_of=torch.zeros_like(index), tables=step.batch.tables)
            )
            part.qkv = step.qkv[rows].clone()  # aligned, or else other code is compiled
            results.append(_same(part.attend(), whole[rows]))
        cut = other.plan
        yield f"  {other.window} rows, {cut.programs} programs: {' '.join(sorted(set(results)))}"


def _same(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.isnan().any():
        return "NAN"
    wrong = (a.view(torch.int16) != b.view(torch.int16)).any(1)
    return "equal" if not wrong.any() else f"{int(wrong.sum())} DIFFER"


DECODE = (
    (1, 1, 32768),
    (8, 1, 32768),
    (1, 8, 32768),
    (1, 16, 4096),
    (64, 1, 1024),
    (64, 1, 200),
    (64, 1, 128),
)  # sequences, rows, keys


# --- time -------------------------------------------------------------------------------------------------------------------------------


def cases(parts: Sequence[str], splits: Sequence[int]) -> list[Case]:
    found = []
    for split in splits:
        choose(split)
        if "prefill" in parts:
            for heads in (LARGE, SMOLLM2, GEMMA):
                base = Case("prefill", heads, 1, 8192, 8192, split=split)
                found += [
                    replace(base, cut=replace(base.plan, stages=stages))
                    for stages in (2, 3)
                    if stages == 2 or heads != GEMMA
                ]
        if "decode" in parts:
            for sequences, window, length in DECODE:
                found.append(Case("decode", LARGE, sequences, window, length, split=split))
            found.append(replace(found[-1], sequences=8, window=1, length=32768, ordered=True))
        if "short" in parts:
            for heads, layer in ((SMOLLM2, 0), (QWEN, 0), (GEMMA, 512)):
                for window, length in ((1, 128), (1, 512), (1, 1024), (8, 1024)):
                    found.append(Case("short", heads, 1, window, length, layer, split=split))
    return found


def measure(case: Case, copy: float) -> dict[str, object]:
    """One record of the table."""
    choose(case.split)
    q_heads, kv_heads, dim = case.heads
    read = 4 * case.sequences * case.length * kv_heads * dim
    copies = 1 if case.part == "prefill" else max(2, min(24, int(2e8 // read)))
    record: dict[str, object] = {**asdict(case), "cut": asdict(case.plan)}
    try:
        taken = seconds(Step(case, copies).attend, 2 if case.part == "prefill" else max(20, copies))
    except OutOfResources as error:  # too much shared memory for this plan
        return record | {"error": f"{type(error).__name__}: {error}"[:200]}
    record |= {"us": round(1e6 * taken, 2)}
    if case.part == "prefill":
        return record | {"tflops": round(2 * q_heads * dim * case.length**2 / taken / 1e12, 1)}
    return record | {"of_copy": round(read / taken / copy, 3)}


def line(record: dict[str, object]) -> str:
    cut, split = record["cut"], record["split"]
    assert isinstance(cut, dict)
    what = f"{record['part']} {record['heads']} {record['sequences']}x{record['window']}@{record['length']}"
    how = f"split {split or 'own'} stages {cut['stages']} programs {cut['programs']}"
    how += " ordered pages" * bool(record["ordered"])
    result = {name: record[name] for name in ("us", "tflops", "of_copy", "error") if name in record}
    return f"{what:38} {how:58} " + " ".join(f"{k} {v}" for k, v in result.items())


def chain_time(heads: Heads, layer: int, length: int) -> str:
    """Rotation and attention as a layer calls them, in a chain, at batch 1."""
    choose(0)
    step = Step(Case("short", heads, 1, 1, length, layer), 4)
    norms = torch.ones(heads[2], device=DEVICE), torch.ones(heads[2], device=DEVICE)
    table = torch.randn(length, heads[2] // 2, 2, device=DEVICE)

    def write(i: int) -> None:
        keys, values = step.caches[i % 4]
        rope.rope_write(step.qkv, step.batch, table, False, heads[0], keys, values, norms, 1e-6)

    def both(i: int) -> None:
        write(i)
        step.attend(i)

    times = [1e6 * seconds(call, 40) for call in (write, step.attend, both)]
    return f"chain {heads} @{length}: rotation {times[0]:.2f} us, attention {times[1]:.2f} us, both {times[2]:.2f} us"


CHAIN = [
    (heads, layer, length)
    for heads, layer in ((SMOLLM2, 0), (QWEN, 0), (GEMMA, 512), (LARGE, 0))
    for length in (128, 1024)
]


def compile_one(case: Case | tuple[Heads, int, int]) -> None:
    """Run a case's launch on next to nothing, so that its kernels are in Triton's cache."""
    if isinstance(case, tuple):
        chain_time(*case)
        return
    choose(case.split)
    with suppress(OutOfResources):
        Step(replace(case, length=case.window, cut=case.plan), 1).attend()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="check,prefill,decode,short,chain")
    parser.add_argument("--splits", default="0")
    parser.add_argument("--json")
    options = parser.parse_args()
    parts, splits = options.parts.split(","), [int(t) for t in options.splits.split(",")]
    began = time.time()
    wanted = cases(parts, splits)
    groups = checked(splits) if "check" in parts else []
    variants = {
        (c.heads, c.layer > 0, replace(c.plan, programs=min(c.plan.programs, 1)), c.split, len(c.rows)): c
        for c in wanted
    }
    first = [*(c for group in groups for c in group), *variants.values(), *(CHAIN[::2] if "chain" in parts else [])]
    with ProcessPoolExecutor(15, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, first))
    print(f"compiled {len(first)} variants: {time.time() - began:.0f} s", flush=True)
    lines = []
    for group in groups:
        for text in check(group):
            lines.append(text)
            print(text, flush=True)
    print(f"checked: {time.time() - began:.0f} s", flush=True)
    copy = copy_rate()
    print(f"copy {copy / 1e12:.2f}e12 B/s", flush=True)
    records = []
    for case in wanted:
        records.append(measure(case, copy))
        print(line(records[-1]), flush=True)
    if "chain" in parts:
        for each in CHAIN:
            lines.append(chain_time(*each))
            print(lines[-1], flush=True)
    print(f"{time.time() - began:.0f} s")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"gpu": torch.cuda.get_device_name(), "copy": copy, "records": records, "notes": lines}, file, indent=1
            )


if __name__ == "__main__":
    main()
