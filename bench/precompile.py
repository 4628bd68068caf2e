"""Compiles the kernels of models for an H200, here, without a GPU, into one file that the machine with the GPU unpacks.

    there:  python3 bench/kernel_cache.py facts FACTS              (once; a file of a few kilobytes to bring here)
    here:   python bench/precompile.py MODEL... --facts FACTS --headers DIR --out CACHE.tar.xz
    there:  python3 bench/kernel_cache.py unpack CACHE.tar.xz      (into TRITON_CACHE_DIR, or Triton's default)

A MODEL is a geometry of `geometries` or a model file or folder; what is compiled is what `gpu.py` runs of it: an engine of the default
configuration, for geometries that of `measure.Bench`, and the windows of `bits`. DIR holds the headers of the other machine's Python.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import kernel_cache  # noqa: E402
from bench.geometries import GEOMETRIES, random_model  # noqa: E402
from power_lab.engine.compilers import Compilers  # noqa: E402
from power_lab.engine.config import EngineConfig, usable_cores  # noqa: E402
from power_lab.engine.models.decoder import Decoder  # noqa: E402
from power_lab.engine.rehearsal import bounds, compile_share, read, rehearse  # noqa: E402
from power_lab.engine.runner import Sizes  # noqa: E402

LENGTH = 600  # of the text of `bits`
BENCH = EngineConfig(step_tokens=4096, max_batch=128, prefix_cache=False)
BENCH_CONTEXT = 4096 + 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--facts", type=Path, required=True, help="of the other machine")
    parser.add_argument("--headers", type=Path, help="of its Python; without them launchers are left to it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "kernels", help="kept between calls")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process that compiles its share
    if "--worker" in sys.argv:
        arguments = [argument for argument in sys.argv[1:] if argument != "--worker"]
        raise SystemExit(worker(parser.parse_args([*arguments[:-1], "--folder", arguments[-1]])))
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(args.cache.absolute())
    start = time.perf_counter()
    with Compilers(("bench.precompile", *sys.argv[1:], "--worker"), args.jobs) as compilers:
        fault = compilers.wait(functools.partial(_say, []))
    print(f"\n{time.perf_counter() - start:.1f} s", fault or "")
    print(kernel_cache.pack(args.cache, args.out), "files,", args.out.stat().st_size, "bytes")
    raise SystemExit(bool(fault))


def worker(args: argparse.Namespace) -> int:
    from power_lab.kernels.triton.variants import Variants

    facts = kernel_cache.Facts.read(args.facts)
    facts.assume()
    launchers = kernel_cache.Launchers(facts, args.headers, kernel_cache.default_cache()) if args.headers else None
    with Variants(90, launchers) as variants:
        for model in args.models:
            run(model)
    found = {variant.key: variant.compile for variant in variants}
    return compile_share(found | ({"utilities": launchers.utilities} if launchers else {}), args.folder)


def run(model: str) -> None:
    """All launches of a model in `gpu.py`."""
    from power_lab.kernels.triton.variants import DryOps

    ops = DryOps()
    decoder: Decoder
    if model in GEOMETRIES:
        decoder, engines = random_model(model, ops, "meta", BENCH_CONTEXT).model, ((BENCH, BENCH_CONTEXT),)
    else:
        decoder = read(Path(model).expanduser(), ops, BENCH_CONTEXT)
        context = decoder.spec.context
        engines = ((EngineConfig(), context), (BENCH, context))
    for config, context in engines:
        rehearse(decoder, bounds(config, context))
    rehearse(decoder, Sizes(LENGTH, LENGTH, 8, LENGTH), graphs=False)


def _say(last: list[tuple[int, int]], stage: str, done: int, total: int) -> None:
    if last != [(done, total)]:
        last[:] = [(done, total)]
        print(f"\r{stage}: {done} of {total}", end="", flush=True)


if __name__ == "__main__":
    main()
