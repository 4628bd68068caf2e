"""Whether sums of splits are better left to their reader: a product and what reads it, timed as a pair, both ways.

    python bench/gpu_sums.py [pairs] [step] [--output FILE]

A product over several splits of K leaves sums that either the last of its programs adds up ("off"), or the norm or the rotation behind
it ("on", `power_lab/kernels/triton/parts.py`). Before anything is timed its bits are compared: what both ways leave of 1 to 300 rows
beside the first rows of 300, and logits in windows of several sizes. Where they differ it is not timed, and the exit status is 1. Cases,
both by default:
- pairs: microseconds of q k v with rotation, and of output and down with the norm behind, of 1 to 128 rows. A chain of pairs over more
  weights than the cache holds; the median of replays, twice each way in the order off, on, on, off; `floor_us` is the time in which a copy
  moves the weights. A pair whose product has one split is the same both ways and not timed. Small matrices are plain values, as at load.
- step: decode steps of the 0.6B geometry by `measure.Bench`, in the same order.

`rehearse` launches all of it on a table that computes nothing; `bench/precompile.py sums` compiles its kernels by many processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bench.bits import Sequences  # noqa: E402
from bench.floors import card, copy_bandwidth  # noqa: E402
from bench.geometries import random_model  # noqa: E402
from bench.gpu_linear import TOTAL, seconds  # noqa: E402
from bench.measure import Bench  # noqa: E402
from bench.spy import Spy  # noqa: E402
from power_lab.engine.config import EngineConfig  # noqa: E402
from power_lab.engine.loader import Loaded  # noqa: E402
from power_lab.engine.models.decoder import Decoder  # noqa: E402
from power_lab.engine.rehearsal import bounds  # noqa: E402
from power_lab.engine.rehearsal import rehearse as rehearse_model  # noqa: E402
from power_lab.kernels.ops import BLOCK, Array, Batch, Weight  # noqa: E402
from power_lab.kernels.positions import rope_table  # noqa: E402
from power_lab.kernels.quants import QuantType  # noqa: E402
from power_lab.kernels.triton import linear, planes, rope  # noqa: E402
from power_lab.kernels.triton.ops import TritonOps  # noqa: E402
from power_lab.kernels.triton.planes import DeviceWeight  # noqa: E402
from tests.kernels.triton.matrices import weight  # noqa: E402

Record = dict[str, Any]

TYPES = tuple(QuantType[name] for name in ("BF16", "Q8_0", "Q6_K", "Q4_K", "Q4_0"))
ROWS = (1, 4, 8, 16, 24, 32, 64, 128)
BATCHES = (1, 4, 8, 16, 64)
CHECKED = (1, 2, 3, 5, 8, 16, 17, 31, 33, 64, 65, 100, 128, 129, 300)
MOST = max(CHECKED)
STEP, CONTEXT = "qwen3-0.6b", 512
PROMPT, COUNT = 128, 256  # tokens of a request of `step`
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a layer: width of the residual stream and of the feed-forward part, query and KV heads, values of a head."""

    width: int
    ffn: int
    heads: int
    kv_heads: int
    dim: int = 128

    def product(self, part: str) -> tuple[tuple[int, ...], int]:
        """(N of each matrix, K)."""
        if part == "qkv":
            return tuple(heads * self.dim for heads in (self.heads, self.kv_heads, self.kv_heads)), self.width
        return (self.width,), self.ffn if part == "down" else self.heads * self.dim


LAYERS = {"8b": Layer(4096, 12288, 32, 8), "0.6b": Layer(1024, 3072, 16, 8)}
PARTS = ("qkv", "output", "down")


class Pair:
    """A product and what reads it, on arrays of up to MOST rows.

    Args:
        ops: whose arrays and weights they are.
        layer, part: which product. type: how its matrices are stored.
        copies: of the weights; 0: as many as exceed the cache together.
    """

    def __init__(self, ops: TritonOps, layer: Layer, part: str, type: QuantType, copies: int = 1) -> None:
        self._ops, self._layer, self._part = ops, layer, part
        sizes, cols = layer.product(part)
        operand = ops.operand((type,))
        first = tuple(matrix(ops, type, rows, cols, operand) for rows in sizes)
        self.nbytes = sum(w.data.nbytes for w in first)
        count = copies or min(60, max(2, TOTAL // self.nbytes))
        self.weights = [first, *(tuple(map(copied, first)) for _ in range(count - 1))]
        self.splits = linear.reduction(sum(sizes), cols, False, first[0].data.form is not None)[0]
        self._x = normal(ops, (MOST, cols), operand)
        self._hidden = normal(ops, (MOST, layer.width), "float32")
        self._factor = normal(ops, (layer.width,), "float32")
        self._bias = normal(ops, (sum(sizes),), "float32")
        self._norms = normal(ops, (layer.dim,), "float32"), normal(ops, (layer.dim,), "float32")
        self._table = ops.asarray(rope_table(MOST, [1e4 ** (-i / 64) for i in range(layer.dim // 2)], 1.0))
        self._cache = ops.kv_cache(MOST // BLOCK + 2, layer.kv_heads, layer.dim)
        numbers = np.arange(MOST)
        self._positions, self._slots = ops.asarray(numbers.astype(np.int32)), ops.asarray(numbers + BLOCK)
        self._out = ops.empty((MOST, sum(sizes)), "float32")
        self._normed = ops.empty((MOST, layer.width), operand)

    def launch(self, rows: int, weights: tuple[Weight, ...], *, biased: bool = False, apart: bool) -> None:
        """The product of the first rows, and its reader, which adds to the residual stream or writes keys, values and queries."""
        ops, out = self._ops, self._out[:rows]
        ops.apart = apart
        left = ops.parts(out)
        ops.linear(self._x[:rows], weights, left, self._bias if biased else None)
        if self._part != "qkv":
            ops.add_rms_norm(self._hidden[:rows], left, None, self._factor, EPS, self._normed[:rows])
            return
        positions = self._positions[:rows]
        batch = Batch(positions, positions, self._slots[:rows], positions, positions, positions)
        ops.rope_write(left, batch, self._table, False, self._layer.heads, self._cache, self._norms, EPS)

    def result(self, rows: int, *, biased: bool, apart: bool) -> tuple[bytes, ...]:
        """Bits of what the pair leaves of each row, its memory poisoned before."""
        kept = self._hidden.clone()
        scratch = self._ops.parts(self._out).scratch
        for array in (self._out, self._normed, self._cache.keys, self._cache.values, scratch):
            array.fill_(torch.nan)
        self.launch(rows, self.weights[0], biased=biased, apart=apart)
        if self._part == "qkv":
            written = [array.transpose(1, 2).flatten(0, 1)[BLOCK:] for array in (self._cache.keys, self._cache.values)]
            turned = rope.queries(self._out[:rows], self._layer.heads, self._layer.dim)
            found = [turned, *(array[:rows] for array in written)]
        else:
            found = [self._hidden[:rows].clone(), self._normed[:rows]]
        self._hidden.copy_(kept)
        whole = np.concatenate([array.float().reshape(rows, -1).cpu().numpy() for array in found], axis=1)
        if np.isnan(whole).any():
            raise SystemExit("a result was not written, or is no number")
        return tuple(row.tobytes() for row in whole)

    def microseconds(self, rows: int, *, apart: bool) -> float:
        calls: list[Callable[[], Any]] = [partial(self.launch, rows, w, apart=apart) for w in self.weights]
        return seconds((calls * 20)[: max(16, len(calls))]) * 1e6


def normal(ops: TritonOps, shape: tuple[int, ...], dtype: str) -> Array:
    array = ops.empty(shape, dtype)
    return array if array.is_meta else array.normal_()


def matrix(ops: TritonOps, type: QuantType, rows: int, cols: int, operand: str) -> Weight:
    """As it is held at load; of stored codes few rows differ, which is made fast and as good for bits and times."""
    if ops.device.type == "meta":
        return ops.weight(type, rows, cols, np.zeros(0, np.uint8), operand)
    if planes.valued(type, rows, cols, operand):
        values = torch.empty((rows, cols), dtype=getattr(torch, operand), device=ops.device).normal_(0, 0.02)
        return Weight(type, rows, cols, DeviceWeight(planes.PLAIN_OF[operand], rows, cols, {"values": values}), operand)
    few, _ = weight(type, 64, cols, device=str(ops.device))
    held = {name: plane.repeat_interleave(rows // 64, dim=1).contiguous() for name, plane in few.planes.items()}
    return Weight(type, rows, cols, DeviceWeight(type, rows, cols, held), operand)


def copied(stored: Weight) -> Weight:
    held = {name: plane.clone() for name, plane in stored.data.planes.items()}
    return replace(stored, data=replace(stored.data, planes=held))


def pairs_of(ops: TritonOps, copies: int) -> Iterator[tuple[Record, Pair]]:
    for name, part, type in itertools.product(LAYERS, PARTS, TYPES):
        pair = Pair(ops, LAYERS[name], part, type, copies)
        yield {"layer": name, "product": part, "type": type.name, "splits": pair.splits}, pair


# --- bits -----------------------------------------------------------------------------------------------------------------------------


def bits(ops: TritonOps) -> Iterator[Record]:
    for what, pair in pairs_of(ops, 1):
        yield {"case": "bits", **what, "different": different(pair)}


def different(pair: Pair) -> list[str]:
    """Rows and ways that differ from the first rows of all."""
    found = []
    for biased in (False, True):
        want = pair.result(MOST, biased=biased, apart=False)
        for rows, apart in itertools.product(CHECKED, (False, True)):
            if pair.result(rows, biased=biased, apart=apart) != want[:rows]:
                found.append(f"{rows} rows, {'on' if apart else 'off'}{', biased' if biased else ''}")
    return found


def step_bits(model: Decoder, ops: TritonOps) -> Iterator[Record]:
    """Logits of one text, in one prefill and in windows of few rows."""
    length = 300
    text = np.random.default_rng(0).integers(0, 256, length).tolist()
    found: dict[str, str] = {}
    wanted: np.ndarray | None = None
    for window, apart in itertools.product((length, 128, 16, 5, 1), (False, True)):
        ops.apart = apart
        sequences = Sequences(model, 1, length, window)
        rows = [sequences.run([(0, at, text[at : at + window])])[0].copy() for at in range(0, length, window)]
        logits = np.concatenate(rows)
        wanted = logits if wanted is None else wanted
        if count := int((logits.view(np.uint32) != wanted.view(np.uint32)).any(axis=1).sum()):
            found[f"windows of {window}, {'on' if apart else 'off'}"] = f"{count} rows"
    yield {"case": "bits", "step": STEP, "different": found}


# --- times ----------------------------------------------------------------------------------------------------------------------------

ORDER = (False, True, True, False)


def pairs(ops: TritonOps, rate: float) -> Iterator[Record]:
    for what, pair in pairs_of(ops, 0):
        for rows in ROWS if pair.splits > 1 else ():
            times = [pair.microseconds(rows, apart=apart) for apart in ORDER]
            off, on = sides(times)
            floor = pair.nbytes / rate * 1e6
            yield {
                "case": "pairs", **what, "rows": rows, "floor_us": round(floor, 2), "off_us": round(off, 2), "on_us": round(on, 2),
                "saved_us": round(off - on, 2), "runs_us": [round(time, 2) for time in times],
            }  # fmt: skip
        del pair
        torch.cuda.empty_cache()


def sides(times: list[float]) -> tuple[float, float]:
    """Means of both ways."""
    by = {side: [time for time, apart in zip(times, ORDER, strict=True) if apart == side] for side in (False, True)}
    return sum(by[False]) / len(by[False]), sum(by[True]) / len(by[True])


def step(loaded: Loaded, ops: TritonOps, rate: float) -> Iterator[Record]:
    """Decode steps, whole, and their graphs alone; before them, whether captured steps have said the same."""
    found: dict[int, list[Record]] = {batch: [] for batch in BATCHES}
    texts: list[Any] = []
    for apart in ORDER:
        ops.apart = apart
        bench = Bench(
            loaded, "cuda", rate, 1.0, prompt=PROMPT, count=COUNT, batch=max(BATCHES), prefill=PROMPT, context=CONTEXT
        )
        for batch in BATCHES:
            found[batch].append(bench.decode(batch))
        texts.append([record.tokens for record in bench._requests(max(BATCHES), 0)])
        bench.close()
        torch.cuda.synchronize()  # a step that was begun ahead runs on a stream of its own
    yield {
        "case": "bits",
        "step": f"{STEP}, captured",
        "different": [] if texts.count(texts[0]) == len(ORDER) else texts,
    }
    for batch, records in found.items():
        made: Record = {"case": "step", "step": STEP, "batch": batch}
        for name in ("ms", "graph_ms", "floor_fraction"):
            runs = [record[name] for record in records]
            off, on = sides(runs)
            made |= {f"off_{name}": round(off, 4), f"on_{name}": round(on, 4), f"runs_{name}": runs}
        yield made


# --- all of it ------------------------------------------------------------------------------------------------------------------------


def rehearse(ops: TritonOps) -> None:
    """Every launch, on arrays without memory."""
    for _, pair in pairs_of(ops, 1):
        for rows, apart, biased in itertools.product(CHECKED, (False, True), (False, True)):
            pair.launch(rows, pair.weights[0], biased=biased, apart=apart)
    model = random_model(STEP, ops, "meta", CONTEXT).model
    config = EngineConfig(step_tokens=PROMPT, max_batch=max(BATCHES), prefix_cache=False)
    for apart in (False, True):
        ops.apart = apart
        rehearse_model(model, bounds(config, CONTEXT))


def said(record: Record) -> str:
    words = " ".join(str(record[name]) for name in ("layer", "product", "type", "step") if name in record)
    rest = {
        k: v for k, v in record.items() if k not in ("case", "layer", "product", "type", "step") and "runs" not in k
    }
    return f"{record['case']:6} {words:18} " + "  ".join(f"{name} {value}" for name, value in rest.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="pairs or step; both by default")
    parser.add_argument("--commit", default="", help="what is measured, where there is no repository")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if unknown := {*args.cases} - {"pairs", "step"}:
        parser.error(f"{min(unknown)!r} is no case")
    run = {
        "command": " ".join(sys.argv),
        "card": card("cuda"),
        "commit": args.commit,
        "copy_bytes_per_s": copy_bandwidth("cuda"),
    }
    records: list[Record] = []

    def keep(found: Iterator[Record]) -> bool:
        """Records as they come; whether none tells of other bits."""
        good = True
        for record in found:
            records.append(record)
            good &= not record.get("different")
            print(said(record), flush=True)
            if args.output:
                args.output.write_text(json.dumps({"run": run, "records": records}, indent=1) + "\n")
        return good

    ops, rate, good = TritonOps(), run["copy_bytes_per_s"], True
    if "pairs" in (args.cases or ["pairs"]):
        good &= keep(bits(ops)) and keep(pairs(ops, rate))
    if "step" in (args.cases or ["step"]):
        loaded = random_model(STEP, ops, "cuda", CONTEXT)
        loaded.model.ops = Spy(ops)  # type: ignore[assignment]
        good &= keep(step_bits(loaded.model, ops)) and keep(step(loaded, ops, rate))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
