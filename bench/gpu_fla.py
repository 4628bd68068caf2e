"""Our kernels beside those of fla-core (flash-linear-attention), for what both have.

    PYTHONPATH=. python bench/gpu_fla.py [--output FILE]

Needs the packages fla-core and einops. Attention of prompts and of single rows on the 8B geometry's heads, residual norms at the widths of
SmolLM2, 0.6B and 8B. Their keys and values lie one behind another, ours in shuffled pages. Each result is compared with theirs before it is
timed; times are medians of replays of a captured graph.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from fla.modules.norm.layernorm import layer_norm_fwd
from fla.ops.attn.decoding import attn_decoding_one_step
from fla.ops.attn.parallel import parallel_attn

from bench.gpu_attention import DEVICE, LARGE, Case, Step, copy_rate, seconds
from bench.gpu_small import microseconds
from power_lab.kernels.ops import BLOCK
from power_lab.kernels.triton import norm, rope

PROMPTS = (2048, 8192)
DECODE = ((1, 1024), (1, 32768), (8, 32768), (64, 256), (64, 2048))  # sequences, keys
WIDTHS, ROWS = (576, 1024, 4096), (1, 16, 512)
NEAR = 2e-2  # bf16 results of other orders of sums, relative

Record = dict[str, Any]


def attention(part: str, sequences: int, window: int, length: int, copy: float) -> Record:
    """One shape: `sequences` of `length` keys, the last `window` positions of each being rows."""
    case = Case(part, LARGE, sequences, window, length)
    read = 4 * sequences * length * LARGE[1] * LARGE[2]
    copies = 1 if part == "prefill" else max(2, min(24, int(2e8 // read)))
    step = Step(case, copies)
    flat = [_flat(cache, step, case) for cache in step.caches]
    q = rope.queries(step.qkv, LARGE[0], LARGE[2]).contiguous()[None]
    ends = torch.arange(0, (sequences + 1) * length, length, device=DEVICE)

    def theirs(copy: int) -> torch.Tensor:
        keys, values = flat[copy % copies]
        if part == "prefill":
            return parallel_attn(q, keys, values)
        return attn_decoding_one_step(q, keys, values, cu_seqlens=ends)

    error = _apart(step.attend(0).view(q.shape[1:]), theirs(0)[0])
    times = 2 if part == "prefill" else max(20, copies)
    ours_s, theirs_s = seconds(step.attend, times), seconds(theirs, times)
    made: Record = {"part": part, "sequences": sequences, "rows": window, "keys": length, "error": error}
    made |= {
        "us": round(ours_s * 1e6, 2),
        "fla_us": round(theirs_s * 1e6, 2),
        "times_as_fast": round(theirs_s / ours_s, 3),
    }
    if part == "prefill":
        work = 2 * LARGE[0] * LARGE[2] * length**2
        return made | {"tflops": round(work / ours_s / 1e12, 1), "fla_tflops": round(work / theirs_s / 1e12, 1)}
    return made | {"of_copy": round(read / ours_s / copy, 3), "fla_of_copy": round(read / theirs_s / copy, 3)}


def _flat(cache: list[torch.Tensor], step: Step, case: Case) -> list[torch.Tensor]:
    """Keys and values [1, all tokens, heads, dim] of the sequences, one behind another."""
    pages = step.batch.tables.long()
    shape = (case.sequences, case.pages * BLOCK, *LARGE[1:])
    flat = (part[pages].transpose(2, 3).reshape(shape) for part in cache)
    return [part[:, : case.length].flatten(0, 1)[None].contiguous() for part in flat]


def norms(width: int, rows: int) -> Record:
    """x += delta, then its RMS norm."""
    x, delta = torch.randn(rows, width, device=DEVICE), torch.randn(rows, width, device=DEVICE)
    weight, out = torch.randn(width, device=DEVICE), torch.empty(rows, width, device=DEVICE, dtype=torch.bfloat16)

    def theirs() -> torch.Tensor:
        return layer_norm_fwd(delta, weight, None, 1e-5, residual=x, out_dtype=torch.bfloat16, is_rms_norm=True)[0]

    want = theirs()
    norm.norm(x.clone(), delta, None, weight, 1e-5, out)
    error = _apart(out, want)
    ours_us = microseconds(lambda: norm.norm(x, delta, None, weight, 1e-5, out))
    theirs_us = microseconds(lambda: (theirs(), None)[1])
    made = {"part": "norm", "width": width, "rows": rows, "error": error}
    return made | {
        "us": round(ours_us, 2),
        "fla_us": round(theirs_us, 2),
        "times_as_fast": round(theirs_us / ours_us, 3),
    }


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Raises SystemExit where the two are no roundings of the same."""
    error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
    if not error < NEAR:
        raise SystemExit(f"not measured: results are {error:.1e} apart")
    return round(error, 5)


def records() -> Iterator[Record]:
    copy = copy_rate()
    for length in PROMPTS:
        yield attention("prefill", 1, length, length, copy)
    for sequences, length in DECODE:
        yield attention("decode", sequences, 1, length, copy)
    for width in WIDTHS:
        for rows in ROWS:
            yield norms(width, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    run = {"card": torch.cuda.get_device_name(), "fla-core": version("fla-core"), "commit": args.commit}
    made: list[Record] = []
    for record in records():
        made.append(record)
        print("  ".join(f"{key} {value}" for key, value in record.items()), flush=True)
        if args.output:
            args.output.write_text(json.dumps({"run": run, "records": made}, indent=1) + "\n")


if __name__ == "__main__":
    main()
