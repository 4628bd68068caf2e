"""Times of the CPU kernels on SmolLM2-135M's shapes, or of every storage type.

    python bench/kernels.py [--threads 2] [--seconds 0.4] [--rows 1 2 4 8 16 64 512] [--types all | Q4_K Q6_K ...]

Every layer has weights of its own, so that a step streams them from memory as a model does. A line gives the best tenth and the median of
a time window; other programs on the machine show in the median.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from power_lab.engine.config import Paths
from power_lab.kernels.ops import BLOCK, Batch, Ops, SampleRows, Weight
from power_lab.kernels.probe import random_weight
from power_lab.kernels.quants import QuantType, row_bytes
from power_lab.kernels.table import select

LAYERS, WIDTH, FFN, Q_HEADS, KV_HEADS, DIM, VOCABULARY = 30, 576, 1536, 9, 3, 64, 49152
QKV = (Q_HEADS + 2 * KV_HEADS) * DIM
LARGER_THAN_CACHE = 64 << 20


class Layer(NamedTuple):
    qkv: tuple[Weight, ...]
    output: tuple[Weight, ...]
    gate: Weight
    up: Weight
    down: tuple[Weight, ...]


def make_layer(ops: Ops, rng: np.random.Generator) -> Layer:
    def weight(rows: int, cols: int) -> Weight:
        return random_weight(ops, QuantType.Q4_1, rows, cols, rng)

    kv = KV_HEADS * DIM
    qkv = (weight(WIDTH, WIDTH), weight(kv, WIDTH), weight(kv, WIDTH))
    return Layer(qkv, (weight(WIDTH, WIDTH),), weight(FFN, WIDTH), weight(FFN, WIDTH), (weight(WIDTH, FFN),))


def measure(run: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Seconds of one call: the best tenth and the median."""
    run()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    times.sort()
    return times[len(times) // 10], times[len(times) // 2]


def show(name: str, times: tuple[float, float], calls: int, weights: list[Weight], rows: int) -> None:
    stored = sum(w.data.nbytes for w in weights)
    work = 2 * rows * sum(w.rows * w.cols for w in weights)
    best, median = (t / calls for t in times)
    print(
        f"  {name:22} {best * 1e6:10.1f} us {median * 1e6:10.1f} us {stored / best / 1e9:7.1f} GB/s {work / best / 1e9:7.1f} GFLOP/s"
    )


def linears(ops: Ops, layers: list[Layer], head: Weight, rows: int, seconds: float) -> None:
    rng = np.random.default_rng(0)
    x, wide = (rng.standard_normal((rows, width), dtype=np.float32) for width in (WIDTH, FFN))
    qkv, out, act = (np.empty((rows, width), np.float32) for width in (QKV, WIDTH, FFN))
    sampled = min(rows, 8)  # a step wants the logits of few rows
    logits = np.empty((sampled, VOCABULARY), np.float32)
    kinds: dict[str, tuple[Callable[[Layer], None], Callable[[Layer], list[Weight]]]] = {
        f"qkv {QKV}x{WIDTH}": (lambda w: ops.linear(x, w.qkv, qkv), lambda w: list(w.qkv)),
        f"output {WIDTH}x{WIDTH}": (lambda w: ops.linear(x, w.output, out), lambda w: list(w.output)),
        f"gate+up 2x{FFN}x{WIDTH}": (lambda w: ops.gate_up(x, w.gate, w.up, act), lambda w: [w.gate, w.up]),
        f"down {WIDTH}x{FFN}": (lambda w: ops.linear(wide, w.down, out), lambda w: list(w.down)),
    }

    def step() -> None:
        for layer in layers:
            for run, _ in kinds.values():
                run(layer)

    def every(run: Callable[[Layer], None]) -> None:
        for layer in layers:
            run(layer)

    for name, (run, parts) in kinds.items():
        show(name, measure(lambda run=run: every(run), seconds / 2), LAYERS, parts(layers[0]), rows)
    whole = measure(step, seconds)
    show("all 30 layers", whole, 1, [w for layer in layers for _, parts in kinds.values() for w in parts(layer)], rows)
    top = measure(lambda: ops.linear(x[:sampled], (head,), logits), seconds / 2)
    show(f"head, {sampled} rows", top, 1, [head], sampled)
    print(f"  {'all linears':22} {(whole[0] + top[0]) * 1e3:10.2f} ms {(whole[1] + top[1]) * 1e3:10.2f} ms")


def storage_types(ops: Ops, types: list[QuantType], all_rows: list[int], seconds: float) -> None:
    """Matrices of each type, together larger than the last cache, so that one row's rate is that of reading them from memory."""
    rng = np.random.default_rng(0)
    for n, k in ((2048, 768), (640, 2048)):
        print(
            f"{n} x {k}: GB/s of stored weights (GFLOP/s), best tenth, at "
            + ", ".join(f"{r}" for r in all_rows)
            + " rows"
        )
        for type in types:
            count = LARGER_THAN_CACHE // (n * row_bytes(type, k)) + 1
            weights = [random_weight(ops, type, n, k, rng) for _ in range(count)]
            rates = (_rates(ops, weights, rows, seconds) for rows in all_rows)
            print(f"  {type.name:7}" + " ".join(f"{gb:7.1f} ({gflop:5.1f})" for gb, gflop in rates))


def _rates(ops: Ops, weights: list[Weight], rows: int, seconds: float) -> tuple[float, float]:
    n, k, stored = weights[0].rows, weights[0].cols, weights[0].data.nbytes
    x, out = np.random.default_rng(0).standard_normal((rows, k), dtype=np.float32), np.empty((rows, n), np.float32)
    weights = weights if rows <= 8 else weights[:4]

    def step() -> None:
        for weight in weights:
            ops.linear(x, (weight,), out)

    recorded = ops.capture(step)
    best, _ = measure(step if recorded is None else lambda: ops.replay(recorded[0]), seconds)
    best /= len(weights)
    return stored / best / 1e9, 2 * rows * n * k / best / 1e9


def others(ops: Ops, seconds: float) -> None:
    rng = np.random.default_rng(0)
    cache, rope = ops.kv_cache(34, KV_HEADS, DIM), ops.rope_tables(2048, DIM, 1e5)
    tables = np.arange(1, 33, dtype=np.int32)[None]
    x, weight = rng.standard_normal((1, WIDTH), dtype=np.float32), np.ones(WIDTH, np.float32)
    delta, out = np.zeros_like(x), np.empty_like(x)
    line("add + norm, 1 row", measure(lambda: ops.add_rms_norm(x, delta, weight, 1e-5, out), seconds))
    for rows, position in ((1, 100), (1, 500), (1, 2000), (8, 500), (512, 0)):
        positions = np.arange(position, position + rows)
        slots = positions.astype(np.int64) + BLOCK
        none = np.zeros(0, np.int32)
        batch = Batch(none, positions.astype(np.int32), slots, np.zeros(rows, np.int32), tables, none)
        qkv, heads = rng.standard_normal((rows, QKV), dtype=np.float32), np.empty((rows, Q_HEADS * DIM), np.float32)
        name = f"{rows} rows from {position}"
        line(f"rope, {name}", measure(lambda b=batch, q=qkv: ops.rope_write(q, b, rope, True, Q_HEADS, cache), seconds))
        line(
            f"attention, {name}",
            measure(lambda b=batch, q=qkv, h=heads: ops.attention(q, b, Q_HEADS, 0.125, cache, h), seconds),
        )
    logits = 3 * rng.standard_normal((8, VOCABULARY), dtype=np.float32)
    for name, chain in (
        ("greedy", (0.0, 0, 1.0)),
        ("temperature", (0.8, 0, 1.0)),
        ("top-k 40", (0.8, 40, 1.0)),
        ("top-p 0.95", (0.8, 0, 0.95)),
    ):
        for rows in (1, 8):
            tokens, controls = np.zeros(rows, np.int32), sampling(rows, *chain)
            line(
                f"{name}, {rows} rows",
                measure(lambda r=rows, c=controls, t=tokens: ops.sample(logits[:r], c, t), seconds),
            )
    line("logprobs 5, 1 row", measure(lambda: ops.logprobs(logits[:1], np.zeros(1, np.int32), 5), seconds))


def line(name: str, times: tuple[float, float]) -> None:
    print(f"  {name:30} {times[0] * 1e6:10.1f} us {times[1] * 1e6:10.1f} us")


def sampling(rows: int, temperature: float, top_k: int, top_p: float) -> SampleRows:
    def full(value: float, type: str) -> np.ndarray:
        return np.full(rows, value, type)

    zero, one = full(0, "float32"), full(1, "float32")
    controls = (full(temperature, "float32"), full(top_k, "int32"), full(top_p, "float32"), zero, one, zero)
    keys = (full(7, "uint64"), np.arange(rows))
    history = (np.zeros(0, np.int32), np.zeros((rows, 3), np.int64))
    return SampleRows(
        *controls, *keys, *history, np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros((rows, 2), np.int64)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.4, help="window of one measurement")
    parser.add_argument("--mode", choices=["exact", "fast"], default="exact")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 64, 512])
    parser.add_argument("--types", nargs="*", help="time these storage types, or `all`, instead of the model's shapes")
    args = parser.parse_args()
    ops = select("cpu", args.mode, args.threads, Paths.default().kernels)
    start = time.perf_counter()
    ops.warm_up()
    print(
        f"{ops.name} {ops.mode}, {args.threads} threads; warm-up {time.perf_counter() - start:.2f} s; best tenth, median"
    )
    if args.types:
        types = list(QuantType) if args.types == ["all"] else [QuantType[name] for name in args.types]
        storage_types(ops, types, args.rows, args.seconds)
        return
    rng = np.random.default_rng(0)
    layers = [make_layer(ops, rng) for _ in range(LAYERS)]
    head = random_weight(ops, QuantType.Q8_0, VOCABULARY, WIDTH, rng)
    for rows in args.rows:
        print(f"{rows} rows")
        linears(ops, layers, head, rows, args.seconds)
    others(ops, args.seconds / 4)


if __name__ == "__main__":
    main()
