"""Compiles the products for sm_90, without a GPU. Fails where a decode tile spills registers or exceeds shared memory, and
where a variant needs more than `recorded` says.

Run by test_linear; with arguments, `compile_linear.py TYPE ROWS COLUMNS K`, it prints the resource use of one variant.
"""

from __future__ import annotations

import itertools
import re
import sys

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from bench import gpu_middle
from power_lab.kernels.quants import QuantType, row_bytes
from power_lab.kernels.triton import linear
from power_lab.kernels.triton.middle import Tiling, middle
from power_lab.kernels.triton.planes import FORMS, PLANES, repack
from power_lab.kernels.triton.product import product
from power_lab.kernels.triton.wide import wide
from tests.kernels.triton.cubin import resources
from tests.kernels.triton.recorded import RENEW, Recorded

SHARED = 232448  # bytes of a block on sm_90
POINTERS = {np.int16: "*i16", np.uint8: "*u8", np.int8: "*i8", np.float16: "*fp16"}
ALIGNED = [["tt.divisibility", 16]]


def operand(type: QuantType) -> str:
    """What matrices of a type are multiplied by, in Triton's words; F16 stands for plain values beside stored codes."""
    return "bf16" if type == QuantType.BF16 else "fp16"


def signature(type: QuantType) -> tuple[str, ...]:
    if type not in FORMS:
        return f"*{operand(type)}", "i32"
    planes = repack(type, 1, 256, np.zeros(row_bytes(type, 256), np.uint8))
    return *(POINTERS[planes.get(name, planes["codes"]).dtype.type] for name in PLANES), "i32"


def compiled(
    type: QuantType, rows: int, columns: int, cols: int, activation: int = 0, parts: int = 1
) -> tuple[int, int, int]:
    """(shared bytes, registers, stack bytes) of the variant that such a product launches."""
    s = linear.shape(columns, cols, type, activation > 0, rows)
    weights = tuple(signature(type) for _ in range(2 if activation else parts))
    constants = {
        "FORM": FORMS.get(type), "BN": s.bn, "USED": s.used or s.bn, "BM": s.bm, "BK": s.bk,
        "SPLITS": linear.reduction(columns, cols, activation > 0, type in FORMS)[0], "ACTIVATION": activation, "BIASED": False,
        "EVEN": cols % s.bk == 0, "STREAM": rows <= s.bm, "BAND": linear.BAND, "AHEAD": s.ahead, "LEAN": s.lean,
        "APART": False, "PDL": True, "INTERPRET": False,
    }  # fmt: skip
    types: dict[str, object] = {
        "X": f"*{operand(type)}", "weights": weights, "Out": f"*{operand(type)}" if activation else "*fp32", "Bias": "*fp32",
        "Partials": "*fp32", "Counters": "*i32", "R": "i32", "K": "i32", "columns": "i32", "pitch": "i32", "span": "i32",
    }  # fmt: skip
    aligned = {(i,): ALIGNED for i in (0, 2, 3, 4, 5, 7, 8, 9, 10)}
    aligned |= {(1, w, i): ALIGNED for w, items in enumerate(weights) for i in range(len(items))}
    source = ASTSource(
        fn=product, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants, attrs=aligned
    )
    options = {"num_warps": s.warps, "num_stages": s.stages, "enable_fp_fusion": False, "launch_pdl": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert s.bn < 64 or "wgmma.mma_async" in kernel.asm["ptx"], (
        f"{type.name} {s}: not the matrix unit's own instructions"
    )
    check_pairs(kernel)
    return resources(kernel)


def check_pairs(kernel: CompiledKernel) -> None:
    """Words that are unpacked together are neighbours of one row: the first step from register to register is one column."""
    code = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    for name in re.findall(r"packed_element = 2 .*? : tensor<\w+, (#\w+)>", code):
        found = re.search(r"register = \[\[0, 1\]|sizePerThread = \[1, (?:2|4|8|16)\].*order = \[1, 0\]", layouts[name])
        assert found, f"words in other places than their assembly expects: {layouts[name]}"


def compiled_wide(
    type: QuantType, columns: int, rows: int, splits: int, activation: int, held: bool
) -> tuple[int, int, int]:
    """As `compiled`, of a product of many rows."""
    bn, bm, bk, warps, stages = linear.tiling(rows, columns, activation > 0, held)
    constants = {
        "BN": bn, "BM": bm, "BK": bk, "SPLITS": splits, "HELD": held, "ACTIVATION": activation, "BIASED": False, "BAND": linear.BAND,
        "PDL": True, "INTERPRET": False,
    }  # fmt: skip
    tile = f"tensordesc<{operand(type)}[{bn},{bk}]>"
    types = {
        "X": f"tensordesc<{operand(type)}[{bm},{bk}]>", "one": tile, "two": tile, "Out": f"*{operand(type)}" if activation else "*fp32",
        "Bias": "*fp32", "R": "i32", "N": "i32", "K": "i32", "pitch": "i32", "span": "i32",
    }  # fmt: skip
    source = ASTSource(
        fn=wide,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): ALIGNED for i in (3, 4, *range(6, 10))},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False, "launch_pdl": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"], "tiles that the copy engine does not bring"
    return resources(kernel)


def compiled_middle(t: Tiling, splits: int, activation: int, parts: int, apart: bool = False) -> tuple[int, int, int]:
    """As `compiled`, of a product of 17 to 128 rows by descriptors."""
    return resources(middle_kernel(t, splits, activation, parts, apart))


def middle_kernel(t: Tiling, splits: int, activation: int, parts: int, apart: bool = False) -> CompiledKernel:
    constants = {
        "BN": t.bn, "BM": t.bm, "BK": t.bk, "SPLITS": splits, "HELD": t.held, "ACTIVATION": activation, "BIASED": False, "AHEAD": t.ahead,
        "APART": apart, "PDL": True, "INTERPRET": False,
    }  # fmt: skip
    tile = f"tensordesc<bf16[{t.bn},{t.bk}]>"
    weights = tuple(signature(QuantType.BF16) for _ in range(2 if activation else parts))
    types: dict[str, object] = {
        "X": f"tensordesc<bf16[{t.bm},{t.bk}]>", "one": tile, "two": tile, "three": tile, "weights": weights,
        "Out": "*bf16" if activation else "*fp32", "Bias": "*fp32", "Partials": "*fp32", "Counters": "*i32", "R": "i32", "K": "i32",
        "columns": "i32", "pitch": "i32", "span": "i32",
    }  # fmt: skip
    aligned = {(i,): ALIGNED for i in (5, 6, 7, 8, 10, 11, 12, 13)}
    aligned |= {(4, w, i): ALIGNED for w, items in enumerate(weights) for i in range(len(items))}
    source = ASTSource(
        fn=middle, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants, attrs=aligned
    )
    options = {"num_warps": t.warps, "num_stages": t.stages, "enable_fp_fusion": False, "launch_pdl": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"], "tiles that the copy engine does not bring"
    assert "wgmma.mma_async" in kernel.asm["ptx"], f"{t}: not the matrix unit's own instructions"
    return kernel


def main() -> None:
    if sys.argv[1:] not in ([], [RENEW]):
        type, rows, columns, cols = QuantType[sys.argv[1]], *map(int, sys.argv[2:5])
        for activation in (0, 1):
            print(type.name, rows, columns, cols, activation, linear.shape(columns, cols, type, activation > 0, rows))
            print("shared bytes, registers, stack bytes:", *compiled(type, rows, columns, cols, activation))
        return
    with Recorded("linear") as record:
        check(record)


def check(record: Recorded) -> None:
    for type, case in itertools.product((QuantType.BF16, QuantType.F16), (
        (4096, 512, 1, 0, False), (1024, 512, 1, 1, False), (4096, 4096, 4, 0, False), (6144, 4096, 1, 0, False),
        (12288, 4096, 1, 1, False), (4096, 4096, 8, 0, True), (12288, 4096, 4, 1, True),
    )):  # fmt: skip
        shared, _, stack = use = compiled_wide(type, *case)
        record.see(f"wide {type.name} {case}", use)
        assert shared <= SHARED, f"wide {case}: {shared} bytes of shared memory"
        between = 256 if case[2] > 1 and not case[4] else 0  # splits, where sums are read back
        assert stack <= between, f"wide {case}: {stack} bytes of registers spilled"
    check_middle(record)
    for type in (QuantType.BF16, QuantType.F16, *FORMS):
        cases = [(16, 12288, 4096, 1, 1), (128, 4096, 4096, 0, 1)]
        if type in (QuantType.BF16, QuantType.Q4_K):
            cases += [
                (16, 6144, 4096, 0, 3),
                *((rows, 3072, 1024, activation, 1) for rows in (32, 64, 128) for activation in (0, 2)),
            ]
        if type in (QuantType.BF16, QuantType.Q4_1, QuantType.Q5_0, QuantType.Q8_0):
            cases += [(16, 960, 576, 0, 1), (16, 2048, 640, 2, 1)]
        for case in cases:
            shared, _, stack = use = compiled(type, *case)
            record.see(f"product {type.name} {case}", use)
            assert shared <= SHARED, f"{type.name} {case}: {shared} bytes of shared memory"
            assert stack == 0 or case[0] > 64, f"{type.name} {case}: {stack} bytes of registers spilled"


def check_middle(record: Recorded) -> None:
    """All candidates of `bench/gpu_middle.py`, and stacked weights by one of each shape of tile. Of stages the most counts."""
    seen: set[object] = set()
    for (gated, splits), rows in itertools.product(((False, 1), (False, 4), (True, 1)), gpu_middle.ROWS):
        for t in gpu_middle.candidates(gated, splits, rows):
            name = f"middle {t.bn} x {t.bm} x {t.bk}, {t.warps} warps, {'gated' if gated else f'splits {splits}'}"
            shapes = {(t, gated, splits, 1)} | (set() if gated or name in seen else {(t, gated, splits, 3)})
            for shape in shapes - seen:
                shared, _, stack = use = compiled_middle(t, splits, int(gated), shape[-1])
                record.see(name + (", held" if t.held else ""), use)
                assert shared <= SHARED, f"{name}: {shared} bytes of shared memory"
                assert stack == 0, f"{name}: {stack} bytes of registers spilled"
            seen |= shapes | {name}


if __name__ == "__main__":
    main()
