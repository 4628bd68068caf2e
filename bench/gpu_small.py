"""Times of the GPU's small kernels: norms, lookups, the sampler chain, log-probabilities.

    PYTHONPATH=. python bench/gpu_small.py [--output FILE]

A time is that of one call in a captured chain of 20 on the same arrays, as in a step, where each call reads what the one before has just
written; median of 9 replays.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton

from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import chain, embed, logprobs, norm
from power_lab.kernels.triton.planes import DeviceWeight
from power_lab.kernels.triton.sample import Scratch, sample
from tests.kernels.triton.sampling import Row, at, controls

ROWS = (1, 8, 64)
HISTORY = Row(temperature=0.0, repetition=1.1, before=tuple(range(2000)), generated=tuple(range(500)))
KINDS: dict[str, tuple[Row, dict[str, bool]]] = {
    "greedy": (Row(temperature=0.0), {"random": False, "penalised": False}),
    "plain": (Row(), {"limited": False, "penalised": False}),
    "greedy, all passes": (Row(temperature=0.0), {}),
    "plain, all passes": (Row(), {}),
    "top-k 50": (Row(top_k=50), {"penalised": False}),
    "top-p 0.95": (Row(top_p=0.95), {"penalised": False}),
    "k 50, p 0.95": (Row(top_k=50, top_p=0.95), {"penalised": False}),
    "penalties": (HISTORY, {"random": False}),
    "300 biases": (Row(temperature=0.0, bias=dict.fromkeys(range(0, 9000, 30), 1.0)), {"random": False, "penalised": False}),
    "long penalties": (replace(HISTORY, before=tuple(range(32000))), {"random": False}),
}  # fmt: skip


def microseconds(call: Callable[[], None], count: int = 20) -> float:
    """Median of 9 replays of a graph of `count` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return round(median(times), 2)


def norms() -> dict[str, Any]:
    """Of every number of warps; `alone`: the present one without the chain."""
    found: dict[str, Any] = {}
    for width in (576, 640, 1024, 2048, 2560, 4096, 8192):
        block = triton.next_power_of_2(width)
        for rows in ROWS:
            x, delta = (torch.randn(rows, width, device="cuda") * scale for scale in (1.0, 1e-3))
            weight, out = (
                torch.randn(width, device="cuda"),
                torch.empty(rows, width, device="cuda", dtype=torch.bfloat16),
            )
            arguments = x, delta, None, weight, out, 1e-5, None, width, block
            options = {"enable_fp_fusion": False, **chain.options(x.device)}
            times: dict[str, float] = {"alone": 0.0}
            for warps in (1, 2, 4, 8, 16):
                if block // 32 // warps >= 2:
                    launch = lambda w=warps, a=arguments, r=rows, o=options: norm._norm_rows[(r,)](*a, num_warps=w, **o)  # noqa: E731
                    times[str(warps)] = microseconds(launch)
            launch = lambda a=arguments, r=rows, w=width: norm._norm_rows[(r,)](  # noqa: E731
                *a, PDL=False, num_warps=norm.warps(w), enable_fp_fusion=False
            )
            times["alone"] = microseconds(launch)
            found[f"{width} x {rows}"] = times
            print(f"norm {width} x {rows}".ljust(24), times, flush=True)
    return found


def lookups() -> dict[str, Any]:
    found: dict[str, Any] = {}
    table = DeviceWeight(QuantType.BF16, 49152, 576, {"values": torch.randn(49152, 576, device="cuda").bfloat16()})
    for rows in ROWS:
        ids, x = torch.arange(rows, device="cuda", dtype=torch.int32), torch.empty(rows, 576, device="cuda")
        out, weight, logits = (
            torch.empty_like(x),
            torch.randn(576, device="cuda"),
            torch.randn(rows, 49152, device="cuda"),
        )
        before = -1 - ids
        calls: dict[str, Callable[[], None]] = {
            "embed": lambda i=ids, o=x: embed.embed(table, i, o),
            "embed, drawn": lambda i=before, o=x, d=ids: embed.embed(table, i, o, drawn=d),
            "gathered norm": lambda i=ids, o=out, x=x, w=weight: norm.norm(x, x, None, w, 1e-5, o, i),
            "softcap": lambda x=logits: norm.softcap(x, 30.0),
        }
        for top in (0, 5, 20):
            s = logprobs.Scratch.allocate(rows, 49152, top, "cuda")
            best, values = (
                torch.empty(rows, top, device="cuda", dtype=torch.int32),
                torch.empty(rows, top, device="cuda"),
            )
            chosen = torch.empty(rows, device="cuda")
            calls[f"logprobs {top}"] = lambda a=(logits, ids, chosen, best, values, s): logprobs.launch(*a)
        found[str(rows)] = {name: microseconds(call) for name, call in calls.items()}
        print(f"lookups x {rows}".ljust(24), found[str(rows)], flush=True)
    return found


def samplers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for vocabulary in (49152, 151936):
        for count in (1, 16, 64, 256):
            logits = torch.randn(count, vocabulary, device="cuda") * 3
            scratch, tokens = (
                Scratch.allocate(count, vocabulary, "cuda"),
                torch.zeros(count, dtype=torch.int32, device="cuda"),
            )
            figures: dict[str, Any] = {}
            for kind, (row, options) in KINDS.items():
                rows = controls([at(row, i) for i in range(count if "long" not in kind else min(count, 64))], "cuda")
                x, t = logits[: len(rows.seeds)], tokens[: len(rows.seeds)]
                figures[kind] = microseconds(lambda x=x, r=rows, t=t, s=scratch, o=options: sample(x, r, t, s, **o))
            found[f"{vocabulary} x {count}"] = figures
            print(f"sample {vocabulary} x {count}".ljust(24), figures, flush=True)
    return found


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"norms": norms, "lookups": lookups, "samplers": samplers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="", help="for the record")
    parser.add_argument("--date", default="", help="for the record")
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="only this; may be repeated")
    chosen = parser.parse_args()
    record = {
        "command": "python bench/gpu_small.py", "date": chosen.date, "commit": chosen.commit,
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        **{part: PARTS[part]() for part in chosen.part or PARTS},
    }  # fmt: skip
    if chosen.output:
        chosen.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
