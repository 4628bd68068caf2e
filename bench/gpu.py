"""Speed of the GPU engine, after its answers were checked: bits first, then tokens a second beside what the device reaches at best.

    python bench/gpu.py MODEL... [--cases bits parity decode verify prefill where peers] [--batches 1 4 16 64 128] [--context TOKENS]
                        [--long TOKENS] [--patience SECONDS] [--unchecked] [--output FILE]

A MODEL is a geometry (qwen3-8b, qwen3-0.6b, gemma3-270m-bf16, smollm2-bf16, tiny) of random weights made on the device, a model file or
a name from `lab.models()`. Whatever is timed, its bits are compared first; with `--unchecked` they are not, and each figure's `checked`
says what was compared before it. Cases, all by default:
- bits: a text's logits are the same in one prefill, in chunks, token by token, in verify windows, in a batch and from the engine's steps.
- parity: with the f32 CPU arithmetic, for files: KL <= 0.002, the likeliest token the same at >= 90 % of the positions.
- decode: prompts of 128 tokens, 256 new, greedy, no prefix cache. verify: steps of 8 and 16 rows of one request, drafted on the host;
  then in rounds that stay on the device, with drafts that cost nothing. prefill: 4,096 tokens.
- where: a decode step by operation.
- peers, once at the end for all models: transformers on the same geometries with random weights, in processes that get ready side by side
  and measure one after another, each ended after `--patience` seconds of either; vLLM and llama.cpp as they were recorded elsewhere. With
  `--cases peers` alone no geometry is opened, only files. fla-core's kernels are in `gpu_fla.py`.

`--context` is the longest request that the engine takes, the model's own with `model`. It decides how wide block tables are, and so how
attention shares its work: by default a geometry takes only what the measured requests need, a file its own. `--long` lets one request of
each batch of `decode` have that many tokens of prompt.

`tokens_per_s` is steady: the steps in which all requests decode. `end_to_end_tokens_per_s` has the prompts in it.

`floor_fraction` of decoding is the rate at which the weights' stored bytes pass, of prefill its operations, over copy bandwidth and matrix
rate measured in the same run. `read_fraction` counts what a step really reads: the multiplied matrices and the KV. `graph_ms` is the step's
graph alone, replayed without the host, the mean of two steps, a quarter and three quarters of the way (halfway where it verifies drafts),
`busy` its share of the step, `launch_ms` the host's time to launch it; `device_ms` is the engine's own count of a step on the device.
Figures are medians. With wrong bits or no parity nothing is measured and the exit status is 1. At the end comes one table of decoding,
peers beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import bits, gpu_peers, gpu_table  # noqa: E402
from bench.cpu import about  # noqa: E402
from bench.floors import card, copy_bandwidth, matrix_rate  # noqa: E402
from bench.geometries import GEOMETRIES, random_model  # noqa: E402
from bench.measure import Bench, Record  # noqa: E402
from bench.spy import Spy  # noqa: E402
from power_lab.engine.config import EngineConfig, Paths, usable_cores  # noqa: E402
from power_lab.engine.loader import Loaded, load  # noqa: E402
from power_lab.kernels.table import select  # noqa: E402

CHECKS = ("bits", "parity")
TIMED = ("decode", "verify", "prefill", "where")
CASES = (*CHECKS, *TIMED, "peers")
DIVERGENCE, SAME = 0.002, 0.9  # parity with the CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--unchecked", action="store_true", help="time without comparing bits first, unless `bits` is asked for"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help="of verify steps")
    parser.add_argument("--at", type=int, nargs="+", default=[1, 64], help="batches of `where`")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--count", type=int, default=256, help="tokens to decode")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of the long prompt")
    parser.add_argument("--context", type=context, help="longest request in tokens, or `model`")
    parser.add_argument(
        "--long", type=int, default=0, help="tokens of the prompt of one request of each batch of `decode`"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=gpu_peers.PATIENCE,
        help="seconds that peers have to get ready, and each of them to measure",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of the CPU that is compared with")
    parser.add_argument("--commit", help="what is measured, where there is no repository")
    parser.add_argument("--json", action="store_true", help="print records as JSON only")
    parser.add_argument("--output", type=Path, help="also write records with device, command and commit to this file")
    args = parser.parse_args()
    args.cases = ordered(args.cases, unchecked=args.unchecked)
    say: Callable[..., None] = (lambda *_: None) if args.json else partial(print, flush=True)
    run = about(args) | {"card": card(args.device)} | ({"commit": args.commit} if args.commit else {})
    floors = {"copy_bytes_per_s": 0.0, "matrix_flop_per_s": 0.0}
    if set(TIMED) & set(args.cases):
        floors = {"copy_bytes_per_s": copy_bandwidth(args.device), "matrix_flop_per_s": matrix_rate(args.device)}
        copy, matrix = floors.values()
        say(f"{run['card']}: copy {copy / 1e12:.3f} TB/s, bf16 product {matrix / 1e12:.1f} TFLOP/s")
    records: list[Record] = []
    try:
        geometries: dict[str, str | None] = {}
        for model in args.models:
            alone = model in GEOMETRIES and args.cases == ["peers"]  # nothing of it is measured here
            geometries[model] = model if alone else measure(model, args, tuple(floors.values()), records, say)
            if args.device == "cuda":
                free()
        if "peers" in args.cases:
            measure_peers(geometries, args, records, say)
        say(gpu_table.table(records))
    finally:  # what was measured before a fault is kept
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps({"run": run, **floors, "records": records}, indent=1) + "\n")
        if args.json:
            print(json.dumps(records, indent=1))


def ordered(asked: Sequence[str], *, unchecked: bool) -> list[str]:
    """The cases in the order in which they run: before whatever is timed come its bits, unless that is waived."""
    wanted = {*asked} | ({"bits"} if set(TIMED) & {*asked} and not unchecked else set())
    return [case for case in CASES if case in wanted]


def context(text: str) -> int:
    """Tokens; 0 is the model's own."""
    return 0 if text == "model" else int(text)


def measure(
    model: str, args: argparse.Namespace, floors: tuple[float, ...], records: list[Record], say: Callable[..., None]
) -> str | None:
    """All cases of one model but its peers, appended to `records` as they come.

    Returns the geometry of its peers, if there is one. Raises SystemExit where its answers are wrong."""

    checked: list[str] = []  # what was compared and found right so far

    def keep(record: Record) -> None:
        marked = {"checked": list(checked)} if record["phase"] in TIMED and "engine" not in record else {}
        records.append({"model": model} | record | marked)
        say(line(records[-1]))

    start = time.perf_counter()
    loaded = open_model(model, args)
    keep({"phase": "load", "seconds": round(time.perf_counter() - start, 2), "digest": loaded.facts.digest})
    keep({"phase": "model", "parameters": loaded.facts.parameters, "stored_bytes": loaded.facts.quantisation})
    for case in CHECKS:
        if case in args.cases:
            verdict = check_bits(loaded) if case == "bits" else check_parity(model, loaded, args)
            keep({"phase": case} | verdict)
            if not verdict["right"]:
                raise SystemExit(f"{model}: not measured while wrong: {verdict}")
            if "not_run" not in verdict:
                checked.append(case)
    if set(TIMED) & set(args.cases):
        bench = Bench(
            loaded,
            args.device,
            *floors,
            prompt=args.prompt,
            count=args.count,
            batch=max(args.batches),
            prefill=args.prefill,
            long=args.long,
            context=loaded.context if args.context == 0 else args.context or 0,
        )
        keep({"phase": "engine", "context": bench.engine.context, "kv_tokens": bench.engine.config.kv_tokens})
        plan = {
            "decode": [partial(bench.decode, batch) for batch in args.batches],
            "verify": [*(partial(bench.verify, rows) for rows in args.rows), partial(bench.rounds, args.rows)],
            "prefill": [bench.prefill],
            "where": [partial(bench.where, batch) for batch in args.at],
        }
        for case in TIMED:
            for make in plan[case] if case in args.cases else ():
                keep(make())
        bench.close()
    geometry = gpu_peers.geometry_of(loaded.model.spec)
    loaded.model.ops.close()
    return geometry


def measure_peers(
    geometries: Mapping[str, str | None], args: argparse.Namespace, records: list[Record], say: Callable[..., None]
) -> None:
    """The peers of all models at once, appended to `records` as they come. geometries: of each model, None where it has none."""

    def keep(model: str, record: Record) -> None:
        records.append({"model": model} | record)
        say(line(records[-1]))

    for model, geometry in geometries.items():
        if geometry is None:
            keep(model, {"phase": "peers", "not_run": "no geometry of bench/geometries.py has these layers"})
    asked = [geometry for geometry in geometries.values() if geometry is not None]
    with closing(gpu_peers.records(asked, args.device, args.patience)) as found:
        for geometry, record in found:
            for model in (model for model, its in geometries.items() if its == geometry):
                keep(model, record)


def open_model(model: str, args: argparse.Namespace) -> Loaded:
    """The model with a `Spy` as its operation table."""
    if model in GEOMETRIES:
        ops = select(args.device, "exact", args.threads, Paths.default().kernels)
        needed = max(args.prefill + 64, 2048, args.long + args.count + 64 if args.long else 0)
        own = GEOMETRIES[model]["max_position_embeddings"]
        loaded = random_model(model, ops, args.device, needed if args.context is None else args.context or own)
    else:
        config = EngineConfig(model=model, device=args.device, threads=args.threads)
        loaded = load(config, Paths.default(), lambda *_: None)
    loaded.model.ops = Spy(loaded.model.ops)  # type: ignore[assignment]
    return loaded


def check_bits(loaded: Loaded) -> Record:
    different = bits.check(loaded, text(loaded)[: bits.LENGTH // 2])
    return {"right": not any(different.values()), "rows": bits.LENGTH, "different": different}


def check_parity(model: str, loaded: Loaded, args: argparse.Namespace) -> Record:
    """Beside the same file on the CPU; weights without a file have no other reference than themselves."""
    if model in GEOMETRIES:
        return {"right": True, "not_run": "random weights have no CPU reference"}
    reference = load(
        EngineConfig(model=model, device="cpu", threads=args.threads), Paths.default(), lambda *_: None
    ).model
    divergence, same = bits.parity(loaded.model, reference, text(loaded)[: bits.LENGTH])
    reference.ops.close()
    right = divergence <= DIVERGENCE and same >= SAME
    return {"right": right, "kl": round(divergence, 6), "same": round(same, 4), "rows": bits.LENGTH}


def text(loaded: Loaded) -> list[int]:
    return loaded.tokenizer.encode((ROOT / "LICENSE").read_text(), special=False, bos=True)


def free() -> None:
    """Give the device's memory back, for the next model and for other processes."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


def line(record: Record) -> str:
    """A record in one line, or a table of operations."""
    head = f"{record['model']:12} {record['phase']:8}"
    rest: dict[str, Any] = {
        key: value for key, value in record.items() if key not in ("model", "phase", "operations", "digest", "runs")
    }
    told = "  ".join(f"{key} {value}" for key, value in rest.items())
    table = [
        f"    {row['us']:9.2f} us  {row['us'] / record['graph_us']:6.1%}  {row['calls']:4} x {row['operation']:28}"
        + (f" {row['gb_per_s']:8.1f} GB/s of weights" if row["gb_per_s"] else "")
        for row in record.get("operations", ())
    ]
    return "\n".join([f"{head} {told}", *table])


if __name__ == "__main__":
    main()
