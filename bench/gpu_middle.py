"""Products of 17 to 128 rows of plain values by the copy engine, beside what launches them now: equal bits first, then time.

    PYTHONPATH=. python bench/gpu_middle.py [NAME...] [--output FILE]

NAME: one of `NAMES`, all by default. A case is a product and its rows. Its arms are what `linear` launches ("now"), all `candidates` with
lines called ahead, the fastest three of these with other counts of lines, and where there are several splits "now" and the fastest with
their sums left apart, which a reader would have to add ("apart"). An arm whose bits differ from those of "now" is told, not timed, and
makes the exit status 1. Arms compute on the same weights, more than the L2 cache holds; a time is that of one launch in a captured chain,
median of 7 replays. `floor_us` is the time in which a copy moves the weights. All kernels are compiled by many processes first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.gpu_linear import SHAPES, TOTAL, bandwidth, seconds  # noqa: E402
from power_lab.kernels.quants import QuantType  # noqa: E402
from power_lab.kernels.triton import linear, middle  # noqa: E402
from power_lab.kernels.triton.middle import Tiling  # noqa: E402
from power_lab.kernels.triton.ops import settle  # noqa: E402
from power_lab.kernels.triton.parts import Parts  # noqa: E402
from power_lab.kernels.triton.planes import DeviceWeight  # noqa: E402

NAMES = ("8b qkv", "8b o", "8b gu", "8b down", ".6 qkv", ".6 gu", ".6 down")
ROWS = {24: 17, 48: 33, 64: 57, 96: 65, 128: 100}  # that are timed, and that bits are compared of, too
MULTIPROCESSOR = 233472  # bytes of shared memory on Hopper
EACH = 1024  # of them that it keeps for each program
DEEPEST = 8  # stages
CALLED = 8  # lines called ahead
OTHERS = (0, 16)
FINALISTS = 3

Record = dict[str, Any]


def candidates(gated: bool, splits: int, rows: int) -> list[Tiling]:
    """All that may be fast for so many rows, of what Hopper holds.

    Tiles of 64 columns make more programs; of 128, X is read half as often. Tiles of half the rows make twice the programs, which share
    weights in the L2 cache. Stages fill a multiprocessor's shared memory by one program, by two, or by three: then the next kernel's come
    up beside the last of this one.
    """
    most = next(bm for bm in (32, 64, 128) if rows <= bm)
    found = []
    for bm in (most,) if most == 32 else (most, most // 2):
        for bn, bk, warps in ((64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 8), (128, 64, 4), (128, 128, 8)):
            if (
                warps == 4 and bn * bm * (2 if gated else 1) > 128 * 64
            ):  # sums that take more than 64 registers a thread
                continue
            step = 2 * bk * (bn * (2 if gated else 1) + bm)
            for programs in (1, 2, 3):
                stages = min(DEEPEST, (MULTIPROCESSOR // programs - 2 * EACH) // step)
                if stages >= 2 and (stages - 1) * bk >= 128:
                    found.append(Tiling(bn, bm, bk, warps, stages, CALLED))
    if splits > 1:  # weights are read once for all splits, by programs that go through all of them
        found += [replace(t, held=True) for t in found if t.bn == 64 and t.bk == 128 and t.stages > 3]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Arm:
    """tiling: None for what `linear` launches now. apart: sums of splits stay apart."""

    tiling: Tiling | None = None
    apart: bool = False


class Product:
    """Copies of one product's weights, and activations.

    Args:
        copies: 0: as many as exceed the L2 cache together.
    """

    def __init__(self, shape: tuple[int, int, bool], device: str, copies: int = 0) -> None:
        self.n, self.k, self.gated = shape
        self.nbytes = 2 * self.n * self.k * (1 + self.gated)
        count = copies or min(60, max(2, TOTAL // self.nbytes))
        self.weights = [tuple(self._weight(device) for _ in range(1 + self.gated)) for _ in range(count)]
        self.work = linear.Workspace.on(device)
        self.x = _normal(max(ROWS), self.k, device)
        self.splits = linear.reduction(self.n, self.k, self.gated, False)
        self.device = device

    def _weight(self, device: str) -> DeviceWeight:
        return DeviceWeight(QuantType.BF16, self.n, self.k, {"values": _normal(self.n, self.k, device).mul_(0.02)})

    def launch(self, arm: Arm, weights: tuple[DeviceWeight, ...], out: torch.Tensor) -> None:
        rows = len(out)
        x, activation = self.x[:rows], linear.SILU if self.gated else linear.NONE
        if arm.tiling:
            scratch = self.work.partials, self.work.counters
            middle.launch(x, weights, out, scratch, None, activation, self.splits, arm.tiling, arm.apart)
        elif arm.apart:
            linear.linear(x, weights, Parts(out, self.work.partials, apart=True), self.work)
        elif self.gated:
            linear.gate_up(x, *weights, out, self.work)
        else:
            linear.linear(x, weights, out, self.work)

    def result(self, arm: Arm, rows: int) -> torch.Tensor:
        """What an arm leaves of an output that was poisoned; of sums apart, their sum."""
        out = self.out(rows)
        self.work.partials.fill_(torch.nan)
        self.launch(arm, self.weights[0], out)
        if arm.apart:
            sums = self.work.partials[: self.splits[0] * out.numel()].view(self.splits[0], rows, self.n)
            out = sums[0].clone()
            for one in sums[1:]:
                out += one
        return out

    def out(self, rows: int) -> torch.Tensor:
        kind = torch.bfloat16 if self.gated else torch.float32
        return torch.full((rows, self.n), torch.nan, dtype=kind, device=self.device)

    def microseconds(self, arm: Arm, rows: int) -> float:
        out = self.out(rows)
        calls: list[Callable[[], Any]] = [partial(self.launch, arm, weights, out) for weights in self.weights]
        return seconds((calls * 20)[: max(16, len(calls))]) * 1e6


def _normal(rows: int, cols: int, device: str) -> torch.Tensor:
    made = torch.empty(rows, cols, dtype=torch.bfloat16, device=device)
    return made if made.is_meta else made.normal_()


def measure(product: Product, rows: int, floor: float) -> Iterator[Record]:
    """All arms of a case, in the order in which they are timed."""
    rival, found = Arm(), dict[Arm, float]()
    wanted = [(count, product.result(rival, count)) for count in (rows, ROWS[rows])]
    if any(want.isnan().any() for _, want in wanted):
        raise SystemExit(
            f"not measured: {product.n} x {product.k}, {rows} rows: what is launched now left elements unwritten"
        )

    def timed(arm: Arm) -> Record:
        record = {"rows": rows, "arm": "now" if arm.tiling is None else "middle", "apart": arm.apart}
        record |= asdict(arm.tiling) if arm.tiling else {}
        try:
            wrong = [count for count, want in wanted if not torch.equal(product.result(arm, count), want)]
        except Exception as error:  # noqa: BLE001  what cannot be launched is no reason to lose the others
            return record | {"failed": str(error)[:200]}
        if wrong:
            return record | {"different": wrong}
        found[arm] = product.microseconds(arm, rows)
        return record | {"us": round(found[arm], 2), "of_floor": round(floor / found[arm], 3)}

    def best(count: int) -> list[Tiling]:
        return [arm.tiling for arm in sorted(found, key=found.__getitem__) if arm.tiling][:count]

    yield timed(rival)
    for tiling in candidates(product.gated, product.splits[0], rows):
        yield timed(Arm(tiling))
    for tiling in best(FINALISTS):
        for lines in OTHERS:
            yield timed(Arm(replace(tiling, ahead=lines)))
    if product.splits[0] > 1:
        yield timed(Arm(apart=True))
        for tiling in [t for t in best(len(found)) if t.ahead == CALLED and not t.held][:1]:
            yield timed(Arm(tiling, apart=True))


def rehearse() -> None:
    """Every launch that `measure` could take, on arrays without memory."""
    for name in NAMES:
        product = Product(SHAPES[name], "meta", 1)
        for rows in ROWS:
            out, several = product.out(rows), product.splits[0] > 1
            arms = [Arm(), *([Arm(apart=True)] if several else [])]
            for tiling in candidates(product.gated, product.splits[0], rows):
                arms += [Arm(replace(tiling, ahead=lines)) for lines in (CALLED, *OTHERS)]
                if several and not tiling.held:
                    arms.append(Arm(tiling, apart=True))
            for arm in arms:
                product.launch(arm, product.weights[0], out)


def said(records: list[Record]) -> str:
    """What launches a case now, the fastest of what could, and what leaves sums apart."""
    (now,) = (record for record in records if record["arm"] == "now" and not record["apart"])
    line = f"{now['shape']:8} {now['rows']:4} rows  floor {now['floor_us']:6.2f}  now {now.get('us', 0):6.2f}"
    timed = sorted((record for record in records if "us" in record and record is not now), key=lambda r: r["us"])
    whole, apart = ([record for record in timed if record["apart"] == left] for left in (False, True))
    for record in (*whole[:5], *apart):
        tiling = [str(record[name]) for name in ("bn", "bm", "bk", "warps", "stages", "ahead") if name in record]
        words = ["/".join(tiling) or "now", *(word for word in ("held", "apart") if record.get(word))]
        line += f"  {record['us']:.2f} {' '.join(words)}"
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--commit", default="", help="what is measured, where there is no repository")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if unknown := {*args.names} - {*NAMES}:
        parser.error(f"{min(unknown)!r} is none of {', '.join(NAMES)}")
    # What this does not compile, its first launch does, and says why it cannot.
    subprocess.run([sys.executable, str(ROOT / "bench" / "precompile.py"), "middle"], check=False)
    began = time.perf_counter()
    settle()
    rate, records = bandwidth(), list[Record]()
    run = {
        "command": " ".join(sys.argv),
        "card": torch.cuda.get_device_name(),
        "commit": args.commit,
        "copy_bytes_per_s": rate,
    }
    for name in args.names or NAMES:
        product = Product(SHAPES[name], "cuda")
        floor = product.nbytes / rate * 1e6
        for rows in ROWS:
            case = [
                {"shape": name, "splits": product.splits[0], "floor_us": round(floor, 2)} | record
                for record in measure(product, rows, floor)
            ]
            records += case
            print(said(case), flush=True)
            for record in case:
                if "different" in record or "failed" in record:
                    print("  ", record, flush=True)
            if args.output:
                args.output.write_text(json.dumps({"run": run, "records": records}, separators=(",", ":")) + "\n")
        del product
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    return int(any("different" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
