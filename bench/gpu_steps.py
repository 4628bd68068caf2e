"""Launches of few rows, chosen by whole decode steps: a launch that is faster alone can be slower in the step.

    python bench/gpu_steps.py [MODEL...] [--parts PART...] [--batch 1] [--output FILE]

MODEL: geometries of `geometries`, by default all that `MODELS` names. For each, one product of its layers after the other, then
attention, then the way to the device; or only the PARTs that are named. Every candidate's step of `--batch` requests is timed as
`measure.Bench.decode` does, and the fastest graph is kept while the next product is tried. What the requests say has to be the same with
all of them; where it is not, the candidate is marked `wrong`, is not chosen, and the exit status is 1. The launches that the engine makes
now are timed first and last.

`rehearse` names all launches on arrays without memory; `bench/precompile.py steps` compiles their kernels by many processes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.floors import card, copy_bandwidth  # noqa: E402
from bench.geometries import GEOMETRIES, random_model  # noqa: E402
from bench.measure import Bench  # noqa: E402
from bench.spy import Spy  # noqa: E402
from power_lab.engine.config import EngineConfig  # noqa: E402
from power_lab.engine.rehearsal import bounds  # noqa: E402
from power_lab.engine.rehearsal import rehearse as rehearse_model  # noqa: E402
from power_lab.kernels.ops import BLOCK, Batch  # noqa: E402
from power_lab.kernels.quants import QuantType  # noqa: E402
from power_lab.kernels.triton import attention, host, linear  # noqa: E402
from power_lab.kernels.triton.linear import Shape  # noqa: E402
from power_lab.kernels.triton.ops import TritonOps  # noqa: E402
from power_lab.kernels.triton.planes import DeviceWeight  # noqa: E402

Record = dict[str, Any]
Product = tuple[int, int, bool]  # columns (of one of two gated weights), K, gated

CONTEXT = 4160
PROMPT, COUNT = 128, 128  # tokens of a request
PROGRAMS = (132, 198, 264)  # of a candidate with tiles that are partly empty, about: 132 multiprocessors


PARTS = ("gate up", "q k v", "down", "output")
MODELS = dict.fromkeys(("qwen3-0.6b", "smollm2-bf16", "gemma3-270m-bf16"), PARTS) | {"qwen3-8b": ("q k v", "output")}
"""Products that are tried, by geometry: of the large one those that have few programs."""


def heads_of(name: str) -> tuple[int, int, int]:
    """Query heads, KV heads and width of a geometry."""
    config = GEOMETRIES[name]
    heads = config["num_attention_heads"]
    return heads, config["num_key_value_heads"], config.get("head_dim", config["hidden_size"] // heads)


def products_of(name: str) -> dict[str, Product]:
    """Of a layer of a geometry, those that are tried."""
    (heads, kv_heads, dim), width, ffn = (
        heads_of(name),
        *map(GEOMETRIES[name].get, ("hidden_size", "intermediate_size")),
    )
    all_of_them = {
        "gate up": (ffn, width, True),
        "q k v": ((heads + 2 * kv_heads) * dim, width, False),
        "down": (width, ffn, False),
        "output": (width, heads * dim, False),
    }
    return {part: all_of_them[part] for part in MODELS[name]}


@dataclass(slots=True)
class Change:
    """What is launched instead of what the tables say. attention: fields of its plan. carried: bytes that a kernel carries at most."""

    shapes: dict[Product, Shape] = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=dict)
    carried: int = host.MOST

    def told(self) -> Record:
        shapes = {" ".join(map(str, key)): asdict(shape) for key, shape in self.shapes.items()}
        return {"shapes": shapes, "attention": self.attention, "carried": self.carried}


def candidates(product: Product, rows: int) -> list[Shape]:
    """Whole tiles, and tiles that are partly empty, so that as many programs are made as there are multiprocessors, or one and a half
    times, or twice as many; with two depths of the pipeline, and for gated products both kinds of tiles."""
    columns, cols, gated = product
    own = linear.shape(columns, cols, QuantType.BF16, gated, rows)
    splits = linear.reduction(columns, cols, gated, False)[0]
    found: list[Shape] = []
    for paired in (True, False) if gated else (False,):
        whole = replace(own, paired=paired, used=0)
        counts = {used: splits * -(-columns // replace(whole, used=used).step) for used in range(8, 64, 8)}
        sizes = {0, *(min(counts, key=lambda used: abs(counts[used] - most)) for most in PROGRAMS)}
        found += [replace(whole, used=used, stages=stages) for used in sorted(sizes) for stages in (4, 6)]
    return [shape for shape in dict.fromkeys(found) if shape != own]


ATTENTION: tuple[dict[str, Any], ...] = (
    {"bare": True, "described": True, "stages": 2},
    {"bare": True, "described": False, "stages": 1},
    {"bare": False, "described": True, "stages": 3},
    {"bare": False, "described": False, "stages": 1},
)


@contextmanager
def launched(change: Change, batch: int) -> Iterator[None]:
    """The engine's launches of so many rows are those of `change`."""
    shape, plan, most = linear.shape, attention.plan, host.MOST

    def shaped(columns: int, cols: int, type: QuantType, gated: bool, rows: int) -> Shape:
        other = change.shapes.get((columns, cols, gated)) if rows == batch else None
        return other or shape(columns, cols, type, gated, rows)

    def planned(*sizes: int) -> attention.Plan:
        made = plan(*sizes)
        return replace(made, **change.attention) if sizes[0] == batch else made

    linear.shape, attention.plan, host.MOST = shaped, planned, change.carried  # type: ignore[assignment]
    try:
        yield
    finally:
        linear.shape, attention.plan, host.MOST = shape, plan, most  # type: ignore[assignment]


class Descent:
    """One model's launches, the fastest so far kept."""

    def __init__(self, name: str, batch: int, rate: float, keep: Callable[[Record], None]) -> None:
        self._name, self._batch, self._rate, self._keep = name, batch, rate, keep
        self._loaded = random_model(name, TritonOps(), "cuda", CONTEXT)
        self._loaded.model.ops = Spy(self._loaded.model.ops)  # type: ignore[assignment]
        self._text: list[Any] | None = None
        self.good = True

    def run(self, parts: Sequence[str]) -> None:
        """All parts, or those that are named."""
        best = Change()
        fastest = self._time("now", best)
        for part, product in products_of(self._name).items():
            for shape in candidates(product, self._batch) if not parts or part in parts else ():
                change = replace(best, shapes={**best.shapes, product: shape})
                fastest, best = min((fastest, best), (self._time(part, change), change), key=itemgetter(0))
        for fields in ATTENTION if not parts or "attention" in parts else ():
            change = replace(best, attention=fields)
            fastest, best = min((fastest, best), (self._time("attention", change), change), key=itemgetter(0))
        if not parts or "copied" in parts:
            self._time("copied", replace(best, carried=0))
        self._time("best", best)
        self._time("now", Change())

    def _time(self, what: str, change: Change) -> float:
        """Seconds of the graph; infinite where what it says is not what the first said."""
        with launched(change, self._batch):
            bench = Bench(
                self._loaded,
                "cuda",
                self._rate,
                1.0,
                prompt=PROMPT,
                count=COUNT,
                batch=self._batch,
                prefill=PROMPT,
                context=CONTEXT,
            )
            try:
                text = [record.tokens for record in bench._requests(self._batch, 0)]
                made = bench.decode(self._batch)
            finally:
                bench.close()
                torch.cuda.synchronize()
        self._text = text if self._text is None else self._text
        record = {"model": self._name, "batch": self._batch, "what": what} | change.told()
        record |= {name: made[name] for name in ("ms", "graph_ms", "device_ms", "floor_fraction")}
        if text != self._text:
            record["wrong"], self.good = True, False
        self._keep(record)
        return float("inf") if text != self._text else made["graph_ms"]


def rehearse(ops: TritonOps) -> None:
    """All products and attentions, on arrays without memory."""
    work = linear.Workspace.on("meta")
    config = EngineConfig(step_tokens=PROMPT, max_batch=1, prefix_cache=False)
    for name in MODELS:
        rehearse_model(random_model(name, ops, "meta", CONTEXT).model, bounds(config, CONTEXT))
        for product in products_of(name).values():
            columns, cols, gated = product
            one = DeviceWeight(QuantType.BF16, columns, cols, {"values": ops.empty((columns, cols), "bfloat16")})
            x, out = ops.empty((1, cols), "bfloat16"), ops.empty((1, columns), "bfloat16" if gated else "float32")
            splits = linear.reduction(columns, cols, gated, False)[0]
            for shape in candidates(product, 1):
                linear.launch(x, (one,) * (2 if gated else 1), out, work, None, int(gated), shape, apart=splits > 1)
        heads = q_heads, kv_heads, dim = heads_of(name)
        cache = ops.kv_cache(9, kv_heads, dim)
        qkv, out = ops.empty((1, (q_heads + 2 * kv_heads) * dim), "float32"), ops.empty((1, q_heads * dim), "bfloat16")
        ints, tables = ops.empty((1,), "int32"), ops.empty((1, CONTEXT // BLOCK), "int32")
        batch = Batch(ints, ints, ops.empty((1,), "int64"), ints, tables, ints)
        plan = attention.plan(1, *heads, tables.shape[1])
        scratch = ops.empty((1 << 20,), "float32")
        for fields in ATTENTION:
            for window in (0, 512) if dim == 256 else (0,):
                cut = replace(plan, **fields)
                attention.attention(
                    qkv, batch, q_heads, 0.1, cache.keys, cache.values, out, window, 0.0, None, scratch, cut
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--parts", nargs="+", default=[], metavar="PART", help="names of products, attention, copied")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--commit", default="", help="what is measured, where there is no repository")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    names = args.models or list(MODELS)
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(MODELS)}")
    rate = copy_bandwidth("cuda")
    run = {"command": " ".join(sys.argv), "card": card("cuda"), "commit": args.commit, "copy_bytes_per_s": rate}
    records: list[Record] = []

    def keep(record: Record) -> None:
        records.append(record)
        print(json.dumps(record), flush=True)
        if args.output:
            args.output.write_text(json.dumps({"run": run, "records": records}, indent=1) + "\n")

    good = True
    for name in names:
        descent = Descent(name, args.batch, rate, keep)
        descent.run(args.parts)
        good &= descent.good
        del descent
        torch.cuda.empty_cache()
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
