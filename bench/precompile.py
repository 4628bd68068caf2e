"""Compiles the kernels of models side by side, ahead of their first launch: on the machine with the GPU, or for an H200 that is elsewhere.

    there:  python3 bench/precompile.py MODEL...                   (into TRITON_CACHE_DIR, or Triton's default)
or
    there:  python3 bench/kernel_cache.py facts FACTS              (once; a file of a few kilobytes to bring here)
    here:   python bench/precompile.py MODEL... --facts FACTS --headers DIR --out CACHE.tar.xz
    there:  python3 bench/kernel_cache.py unpack CACHE.tar.xz

A MODEL is a geometry of `geometries` or a model file or folder, or MODEL+DRAFTER with the file of a drafter that rides along; what is
compiled is what `gpu.py` runs of it: an engine of the default configuration, for geometries that of `measure.Bench`, and the windows of
`bits`. `tests` stands for the tiny models of tests/gpu, `sums`, `middle` and `steps` for what `gpu_sums.py`,
`gpu_middle.py` and `gpu_steps.py` launch. DIR holds the headers of the other machine's Python.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
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
from power_lab.engine.speculation.drafters.neural import Trained  # noqa: E402
from power_lab.kernels.ops import Ops  # noqa: E402

LENGTH = 600  # of the text of `bits`
BENCH = EngineConfig(step_tokens=4096, max_batch=128, prefix_cache=False)
BENCH_CONTEXT = 4096 + 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument(
        "--facts", type=Path, help="of the other machine; without them kernels are compiled for this one"
    )
    parser.add_argument("--headers", type=Path, help="of its Python; without them launchers are left to it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "kernels", help="kept between calls")
    parser.add_argument("-j", "--jobs", type=int, default=usable_cores())
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process that compiles its share
    if "--worker" in sys.argv:
        arguments = [argument for argument in sys.argv[1:] if argument != "--worker"]
        raise SystemExit(worker(parser.parse_args([*arguments[:-1], "--folder", arguments[-1]])))
    args = parser.parse_args()
    if args.facts:
        args.cache.mkdir(parents=True, exist_ok=True)
        os.environ["TRITON_CACHE_DIR"] = str(args.cache.absolute())
    start = time.perf_counter()
    with Compilers(("bench.precompile", *sys.argv[1:], "--worker"), args.jobs) as compilers:
        fault = compilers.wait(functools.partial(_say, []))
    print(f"\n{time.perf_counter() - start:.1f} s", fault or "")
    if args.out:
        print(kernel_cache.pack(kernel_cache.default_cache(), args.out), "files,", args.out.stat().st_size, "bytes")
    raise SystemExit(bool(fault))


def worker(args: argparse.Namespace) -> int:
    from power_lab.kernels.triton.variants import Variants

    found: dict[str, Callable[[], object]] = {}
    if not args.facts:
        variants = Variants(90)
    elif args.headers:
        facts = kernel_cache.Facts.read(args.facts)
        facts.assume()
        launchers = kernel_cache.Launchers(facts, args.headers, kernel_cache.default_cache())
        variants = Variants(90, launchers)
        found["utilities"] = launchers.utilities
    else:
        kernel_cache.Facts.read(args.facts).assume()
        variants = Variants(90, None)
    with variants:
        for model in args.models:
            run(model)
    return compile_share(found | {variant.key: variant.compile for variant in variants}, args.folder)


def run(model: str) -> None:
    """All launches of a model in `gpu.py`, or in tests/gpu."""
    from power_lab.kernels.triton.variants import DryOps

    ops = DryOps()
    decoder: Decoder
    trained: Trained | None = None
    if model == "tests":
        run_tests(ops)
        return
    if model == "sums":
        from bench import gpu_sums

        gpu_sums.rehearse(ops)
        return
    if model == "steps":
        from bench import gpu_steps

        gpu_steps.rehearse(ops)
        return
    if model == "middle":
        from bench import gpu_middle

        gpu_middle.rehearse()
        return
    if model in GEOMETRIES:
        decoder, engines = random_model(model, ops, "meta", BENCH_CONTEXT).model, ((BENCH, BENCH_CONTEXT),)
    else:
        name, _, drafter = model.partition("+")
        path = Path(drafter).expanduser() if drafter else None
        decoder, trained = read(Path(name).expanduser(), ops, BENCH_CONTEXT, drafter=path)
        context = decoder.spec.context
        engines = ((EngineConfig(), context), (BENCH, context))
    for config, context in engines:
        rehearse(decoder, bounds(config, context), trained=trained)
    rehearse(decoder, Sizes(LENGTH, LENGTH, 8, LENGTH), graphs=False)


def run_tests(ops: Ops) -> None:
    """The tiny models of tests/gpu: engines with and without graphs, two sizes of pool, and whole texts at once."""
    from tests import drafters, tiny
    from tests.engine.test_exactness import AXES
    from tests.gpu.test_engine import SHAPES

    for shape in {*AXES["model"], *SHAPES}:
        decoder = tiny.loaded(shape, ops).model
        for graphs in (True, False):
            for context in (tiny.CONTEXT, tiny.CONTEXT // 2):
                rehearse(decoder, Sizes(512, 256, 50, context), graphs)
        rehearse(decoder, Sizes(300, 300, 1, 320), graphs=False)
    for equip in drafters.KINDS.values():
        loaded = equip(tiny.Shape(), ops)
        for graphs in (True, False):
            rehearse(loaded.model, Sizes(512, 256, 50, tiny.CONTEXT), graphs, loaded.trained)


def _say(last: list[tuple[int, int]], stage: str, done: int, total: int) -> None:
    if last != [(done, total)]:
        last[:] = [(done, total)]
        print(f"\r{stage}: {done} of {total}", end="", flush=True)


if __name__ == "__main__":
    main()
