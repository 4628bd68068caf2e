"""Times of what drafters add to a step, at SmolLM2's sizes, each beside a copy of the same bytes by the driver.

    PYTHONPATH=. python bench/gpu_companion.py [--output FILE]

A time is that of one call in a captured chain of 20 on the same arrays, as in `gpu_small`: caches are warm, launches overlap their
neighbours. Bytes are what a call reads and writes, `copied` the time of `Tensor.copy_` on half as many: it reads and writes as much.
Compiles about 40 variants first, 15 s; then takes 5 s.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton

from bench.gpu_small import microseconds
from power_lab.kernels.ops import Batch
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import conv, embed, linear, logprobs, moves, norm, rope
from power_lab.kernels.triton.planes import DeviceWeight

ROWS = (1, 8, 16, 128)
WIDTH, TAPS, VOCABULARY, SAID, RANK, GROUPS = 576, 4, 49152, 16384, 32, 36
HEADS, KV_HEADS, DIM = 9, 3, 64
Case = tuple[int, Callable[[], Any]]  # bytes, call


def empty(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(kind)


def matrix(rows: int, cols: int) -> DeviceWeight:
    return DeviceWeight(QuantType.BF16, rows, cols, {"values": empty(rows, cols, kind=torch.bfloat16)})


def new_operations(rows: int) -> dict[str, Case]:
    narrow = torch.bfloat16
    x, delta, gain = empty(rows, WIDTH), empty(rows, WIDTH) * 1e-3, empty(WIDTH)
    table, taken = empty(1024, TAPS * WIDTH, kind=narrow), empty(rows, TAPS * WIDTH, kind=narrow)
    places = torch.randperm(1024, device="cuda")[:rows]
    said, full = empty(rows, SAID), empty(rows, VOCABULARY)
    ids = torch.randperm(VOCABULARY, device="cuda")[:SAID].sort().values.int()
    coef, base, normed = empty(rows, 4 * GROUPS), empty(2, 2, WIDTH), empty(rows, WIDTH, kind=narrow)
    out, before = empty(rows, WIDTH, kind=narrow), torch.arange(-1, rows - 1, device="cuda", dtype=torch.int32)
    before[::16] = -1
    one = rows * WIDTH
    return {
        "tap x": (6 * one, lambda: moves.tap(x, None, None, 0.0, table, WIDTH, places)),
        "tap x + delta": (10 * one, lambda: moves.tap(x, delta, None, 0.0, table, WIDTH, places)),
        "tap x + norm": (10 * one, lambda: moves.tap(x, delta, gain, 1e-5, table, WIDTH, places)),
        "take": (4 * TAPS * one, lambda: moves.take(table, places, taken)),
        "scatter_columns": (
            4 * rows * (SAID + VOCABULARY) + 4 * SAID,
            lambda: moves.scatter_columns(said, ids, full),
        ),
        "dynamic_conv before": (8 * one, lambda: conv.dynamic_conv(normed, coef, base, 0, before, out)),
        "dynamic_conv behind": (12 * one, lambda: conv.dynamic_conv(x, coef, base, 1, before, delta)),
    }


def old_operations(rows: int) -> dict[str, Case]:
    """What drafters take of those that models have."""
    work, narrow = linear.Workspace.on("cuda"), torch.bfloat16
    w1, w2, fc, keys_of = (
        matrix(VOCABULARY, RANK),
        matrix(SAID, RANK),
        matrix(WIDTH, TAPS * WIDTH),
        matrix(KV_HEADS * DIM, WIDTH),
    )
    ids = torch.randint(VOCABULARY, (rows,), device="cuda", dtype=torch.int32)
    before, added, said = empty(rows, RANK, kind=narrow), empty(rows, SAID), empty(rows, SAID)
    features, projected = empty(rows, TAPS * WIDTH, kind=narrow), empty(rows, WIDTH)
    context, kv = empty(rows, WIDTH, kind=narrow), empty(rows, 2 * KV_HEADS * DIM)
    hidden, sure, conf = empty(rows, WIDTH, kind=narrow), empty(rows, 1), matrix(1, WIDTH)
    caches = rope.kv_cache(8, KV_HEADS, DIM, torch.device("cuda"))
    slots = torch.arange(64, 64 + rows, device="cuda")
    batch = _batch(slots)
    turn, full, tokens = empty(1024, DIM // 2, 2), empty(rows, VOCABULARY), ids % VOCABULARY
    reports = {
        f"logprobs {top}, {vocabulary}": (
            4 * rows * vocabulary,
            _reported(full[:, :vocabulary].contiguous(), tokens, top),
        )
        for top in (0, 16)
        for vocabulary in (SAID, VOCABULARY)
    }
    return {
        "embed 32": (4 * rows * RANK, lambda: embed.embed(w1, ids, before)),
        "linear 32 -> 16384": (2 * SAID * RANK + 4 * rows * SAID, lambda: linear.linear(before, (w2,), added, work)),
        "add 16384": (12 * rows * SAID, lambda: norm.norm(said, added, None, None, 0.0, None)),
        "linear 2304 -> 576": (2 * WIDTH * TAPS * WIDTH, lambda: linear.linear(features, (fc,), projected, work)),
        "linear 576 -> 384": (
            4 * KV_HEADS * DIM * WIDTH,
            lambda: linear.linear(context, (keys_of, keys_of), kv, work),
        ),
        "linear 576 -> 1": (2 * rows * WIDTH, lambda: linear.linear(hidden, (conf,), sure, work)),
        "rope_write, no queries": (
            12 * rows * KV_HEADS * DIM,
            lambda: rope.rope_write(kv, batch, turn, False, 0, *caches),
        ),
        **reports,
    }


def _batch(slots: torch.Tensor) -> Batch:
    none = slots[:0].int()
    return Batch(none, slots.int(), slots, none, none, none)


def _reported(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Callable[[], Any]:
    rows, vocabulary = logits.shape
    tokens = tokens % vocabulary
    scratch = logprobs.Scratch.allocate(rows, vocabulary, top, "cuda")
    ids, values = torch.empty(rows, top, device="cuda", dtype=torch.int32), torch.empty(rows, top, device="cuda")
    chosen = torch.empty(rows, device="cuda")
    return lambda: logprobs.launch(logits, tokens, chosen, ids, values, scratch)


def timed(cases: dict[str, Case]) -> dict[str, dict[str, float]]:
    found = {}
    for name, (nbytes, call) in cases.items():
        source = torch.empty(max(nbytes // 2, 1), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copied = microseconds(lambda t=target, s=source: (t.copy_(s), None)[1])
        found[name] = {"us": microseconds(call), "copied": copied, "bytes": nbytes}
        print(f"  {name:24} {found[name]['us']:8.2f} us   copied {copied:8.2f} us   {nbytes:>10} bytes", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="", help="for the record")
    parser.add_argument("--date", default="", help="for the record")
    chosen = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python bench/gpu_companion.py", "date": chosen.date, "commit": chosen.commit,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "microseconds": {},
    }  # fmt: skip
    for rows in ROWS:
        print(f"{rows} rows", flush=True)
        result["microseconds"][rows] = timed(new_operations(rows) | old_operations(rows))
        if chosen.output:
            chosen.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
