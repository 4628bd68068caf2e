"""Compiles the products for sm_90, without a GPU. Fails where a decode tile spills registers or exceeds shared memory.

Run by test_linear; with arguments, `compile_linear.py TYPE ROWS COLUMNS K`, it prints the resource use of one variant.
"""

from __future__ import annotations

import sys

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from power_lab.kernels.quants import QuantType, row_bytes
from power_lab.kernels.triton import linear, panels
from power_lab.kernels.triton.grouped_wide import grouped_wide
from power_lab.kernels.triton.planes import FORMS, GROUPED, PLANES, form, repack
from power_lab.kernels.triton.product import product
from power_lab.kernels.triton.wide import wide
from tests.kernels.triton.cubin import resources
from tests.kernels.triton.sass import loop

SHARED = 232448  # bytes of a block on sm_90
POINTERS = {np.int16: "*i16", np.uint8: "*u8", np.int8: "*i8", np.float16: "*fp16"}
ALIGNED = [["tt.divisibility", 16]]
MOST = {
    QuantType.Q4_0: 3.6,
    QuantType.Q8_0: 4.1,
    QuantType.Q4_K: 5.2,
    QuantType.Q6_K: 6.1,
}  # instructions for a weight, one warp's


def signature(type: QuantType, grouped: bool = GROUPED) -> tuple[str, ...]:
    if type not in FORMS:
        return "*bf16", "i32"
    planes = repack(type, 1, 256, np.zeros(row_bytes(type, 256), np.uint8), grouped)
    return *(POINTERS[planes.get(name, planes["codes"]).dtype.type] for name in PLANES), "i32"


def compiled(
    type: QuantType, rows: int, columns: int, cols: int, activation: int = 0, parts: int = 1, grouped: bool = GROUPED
) -> CompiledKernel:
    """The variant that such a product launches."""
    s = linear.shape(columns, cols, type, activation > 0, rows, grouped)
    weights = tuple(signature(type, grouped) for _ in range(2 if activation else parts))
    constants = {
        "FORM": form(type, grouped), "BN": s.bn, "BM": s.bm, "BK": s.bk,
        "SPLITS": linear.reduction(columns, cols, activation > 0, type in FORMS)[0], "ACTIVATION": activation, "BIASED": False,
        "EVEN": cols % s.bk == 0, "STREAM": rows <= s.bm, "BAND": linear.BAND, "AHEAD": s.ahead, "WARPS": s.warps, "PDL": True,
        "INTERPRET": False,
    }  # fmt: skip
    types: dict[str, object] = {
        "X": "*bf16", "weights": weights, "Out": "*bf16" if activation else "*fp32", "Bias": "*fp32", "Partials": "*fp32",
        "Counters": "*i32", "R": "i32", "K": "i32", "columns": "i32", "pitch": "i32", "span": "i32",
    }  # fmt: skip
    aligned = {(i,): ALIGNED for i in (0, 2, 3, 4, 5, 7, 8, 9, 10)}
    aligned |= {(1, w, i): ALIGNED for w, items in enumerate(weights) for i in range(len(items))}
    source = ASTSource(
        fn=product, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants, attrs=aligned
    )
    options = {"num_warps": s.warps, "num_stages": s.stages, "enable_fp_fusion": False, "launch_pdl": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    own = "mma.sync" if s.warps < 4 else "wgmma.mma_async"
    assert s.bn < 64 or own in kernel.asm["ptx"], f"{type.name} {s}: not the matrix unit's own instructions"
    return kernel


def compiled_wide(columns: int, rows: int, splits: int, activation: int, held: bool) -> tuple[int, int, int]:
    """As `compiled`, of a product of many rows."""
    bn, bm, bk, warps, stages = linear.tiling(rows, columns, activation > 0, held)
    constants = {
        "BN": bn, "BM": bm, "BK": bk, "SPLITS": splits, "HELD": held, "ACTIVATION": activation, "BIASED": False, "BAND": linear.BAND,
        "PDL": True, "INTERPRET": False,
    }  # fmt: skip
    tile = f"tensordesc<bf16[{bn},{bk}]>"
    types = {
        "X": f"tensordesc<bf16[{bm},{bk}]>", "one": tile, "two": tile, "Out": "*bf16" if activation else "*fp32",
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


def main() -> None:
    if len(sys.argv) > 1:
        type, rows, columns, cols = QuantType[sys.argv[1]], *map(int, sys.argv[2:5])
        for activation in (0, 1):
            print(type.name, rows, columns, cols, activation, linear.shape(columns, cols, type, activation > 0, rows))
            print("shared bytes, registers, stack bytes:", *resources(compiled(type, rows, columns, cols, activation)))
        return
    for case in (
        (4096, 512, 1, 0, False), (1024, 512, 1, 1, False), (4096, 4096, 4, 0, False), (6144, 4096, 1, 0, False),
        (12288, 4096, 1, 1, False), (4096, 4096, 8, 0, True), (12288, 4096, 4, 1, True),
    ):  # fmt: skip
        shared, registers, stack = compiled_wide(*case)
        print("wide", case, shared, registers, stack, flush=True)
        assert shared <= SHARED, f"wide {case}: {shared} bytes of shared memory"
        between = 256 if case[2] > 1 and not case[4] else 0  # splits, where sums are read back
        assert stack <= between, f"wide {case}: {stack} bytes of registers spilled"
    for type in (QuantType.BF16, *FORMS):
        cases = [(16, 12288, 4096, 1, 1), (128, 4096, 4096, 0, 1)]
        if type in (QuantType.BF16, QuantType.Q4_K):
            cases += [
                (16, 6144, 4096, 0, 3),
                *((rows, 3072, 1024, activation, 1) for rows in (32, 64, 128) for activation in (0, 2)),
            ]
        if type in (QuantType.BF16, QuantType.Q4_1, QuantType.Q5_0, QuantType.Q8_0):
            cases += [(16, 960, 576, 0, 1), (16, 2048, 640, 2, 1)]
        for case in cases:
            shared, registers, stack = resources(compiled(type, *case))
            print(type.name, case, shared, registers, stack, flush=True)
            assert shared <= SHARED, f"{type.name} {case}: {shared} bytes of shared memory"
            some = 64 if GROUPED else 0  # of gated products of five bits and minima
            assert stack <= some or case[0] > 64, f"{type.name} {case}: {stack} bytes of registers spilled"
    grouped()


def grouped() -> None:
    """Products whose sums are scaled group by group: no spills, and no more instructions for a weight than were counted on."""
    for type, most in MOST.items():
        stored = form(type, True)
        assert stored is not None
        for case in ((16, 4096, 4096, 0, 1), (16, 12288, 4096, 1, 1)):
            s = linear.shape(case[1], case[2], type, case[3] > 0, case[0], True)
            kernel = compiled(type, *case, grouped=True)
            shared, registers, stack = resources(kernel)
            each = sum(loop(kernel).values()) / (s.bn * stored.tile * (1 + case[3]) / (32 * s.warps))
            print(
                type.name,
                case,
                "grouped",
                shared,
                registers,
                stack,
                f"{each:.2f} instructions for a weight",
                flush=True,
            )
            assert stack == 0, f"{type.name} {case}: {stack} bytes of registers spilled"
            assert each <= most, f"{type.name} {case}: {each} instructions for a weight"
    for group, affine, gated in ((32, False, False), (32, True, False), (32, True, True), (16, False, True)):
        kernel = compiled_panels(group, affine, gated)
        shared, registers, stack = resources(kernel)
        names = loop(kernel)
        print("panels", group, affine, gated, shared, registers, stack, sum(names.values()), names["FFMA"], flush=True)
        assert "wgmma.mma_async" in kernel.asm["ptx"]
        assert "cp.async.bulk.tensor" in kernel.asm["ptx"], "tiles that the copy engine does not bring"
        assert stack <= 64, f"panels {group} {affine} {gated}: {stack} bytes of registers spilled"


def compiled_panels(group: int, affine: bool, gated: bool) -> CompiledKernel:
    """The kernel of many rows, of splits."""
    stored = form(QuantType.Q6_K if group == 16 else QuantType.Q4_K if affine else QuantType.Q4_0, True)
    assert stored is not None
    t = panels.tile(4096, stored)
    constants = {
        "GROUP": group, "TURN": t.turn, "AFFINE": affine, "BN": t.bn, "BM": panels.ROWS, "SPLITS": 4, "ACTIVATION": int(gated),
        "BIASED": False, "BAND": panels.BAND, "PDL": True, "INTERPRET": False,
    }  # fmt: skip
    tile = f"tensordesc<bf16[{t.bn},{group}]>"
    types = {
        "X": f"tensordesc<bf16[{panels.ROWS},{group}]>", "panel": tile, "Factors": "*fp32", "Sums": "*fp32",
        "Out": "*bf16" if gated else "*fp32", "Bias": "*fp32", "R": "i32", "N": "i32", "height": "i32", "K": "i32", "pitch": "i32",
        "padded": "i32", "span": "i32",
    }  # fmt: skip
    source = ASTSource(
        fn=grouped_wide,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): ALIGNED for i in (*range(2, 6), *range(7, 13))},
    )
    options = {"num_warps": t.warps, "num_stages": t.stages, "enable_fp_fusion": False, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    main()
