"""Compiles rotation and attention for sm_90, without a GPU. Fails where decode spills registers, a launch exceeds shared memory, or a
variant needs more than `recorded` says.

Run by test_attention; with arguments, `compile_attention.py ROWS Q_HEADS KV_HEADS HEAD_DIM [STAGES]`, it prints one variant's
resources.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from power_lab.kernels.ops import BLOCK
from power_lab.kernels.triton import attention, rope
from power_lab.kernels.triton.attend import attend_many, list_groups
from power_lab.kernels.triton.attention import Plan
from power_lab.kernels.triton.share import attend_few, combine
from tests.kernels.triton.cubin import resources
from tests.kernels.triton.recorded import RENEW, Recorded

SHARED = 232448  # bytes of a block on sm_90
STACK = 128  # bytes of spilled registers that are put up with
PAGES = 512
POINTERS = {
    **dict.fromkeys(("positions", "table_of", "tables", "groups", "counters"), "*i32"),
    **dict.fromkeys(("qkv", "stats", "parts", "temperature", "sinks", "rope", "q_norm", "k_norm"), "*fp32"),
    **dict.fromkeys(("queries", "narrow", "keys", "values", "out"), "*bf16"),
    "slots": "*i64",
}
SCALARS = {
    **dict.fromkeys(("rows", "pages", "splits", "window"), "i32"),
    **dict.fromkeys(("scale", "cap", "eps"), "fp32"),
}
HEADS = [(9, 3, 64), (4, 1, 256), (32, 8, 128), (6, 2, 80), (4, 2, 16), (40, 1, 64)]


def build(
    fn: triton.JITFunction, constants: dict[str, object], described: dict[str, str] | None = None, **options: int
) -> CompiledKernel:
    """`fn` for sm_90; arguments that `constants` does not hold have the types that launches give them."""
    types = {n: "constexpr" if n in constants else (POINTERS | SCALARS | (described or {}))[n] for n in fn.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(fn.arg_names) if types[n].startswith("*")}
    source = ASTSource(fn=fn, signature=types, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False, **options})


def attend(
    cut: Plan, heads: tuple[int, int, int], rows: int, window: bool = False, capped: bool = False, heated: bool = False
) -> CompiledKernel:
    (q_heads, kv_heads, dim), width = heads, attention._width(heads[2])
    constants: dict[str, object] = {
        "Q_HEADS": q_heads, "KV_HEADS": kv_heads, "PITCH": (q_heads + 2 * kv_heads) * dim,
        "D": dim, "WIDTH": width, "VALUES": min(width, attention.VALUES),
        "PAGE": BLOCK, "TILES": attention.split(dim) // BLOCK,
        "M": attention.LINES, "HEADS": cut.heads, "ROWS": cut.rows, "HEAD_BLOCKS": cut.head_blocks,
        "BARE": cut.bare, "WINDOWED": window, "CAPPED": capped, "INTERPRET": False, "PDL": True,
    }  # fmt: skip
    if not heated:
        constants |= {"temperature": None} | ({} if cut.programs else {"sinks": None})
    tiles = {
        "key_tiles": f"tensordesc<bf16[{BLOCK}, {width}]>",
        "value_tiles": f"tensordesc<bf16[{BLOCK}, {min(width, attention.VALUES)}]>",
    }
    if not cut.described:
        constants |= dict.fromkeys(tiles)
    kernel = attend_many
    if cut.programs:
        constants |= {"LISTED": triton.next_power_of_2(rows)}
        kernel = attend_few
    built = build(kernel, constants, tiles, num_warps=attention.WARPS, num_stages=cut.stages)
    assert "wgmma.mma_async" in built.asm["ptx"], f"{heads} {cut}: not the matrix unit's own instructions"
    return built


def check_attention(record: Recorded) -> None:
    for heads in HEADS:
        for rows, pages in ((1, PAGES), (1, 16), (8, PAGES), (64, 4), (64, 16), (4096, PAGES)):
            cut = attention.plan(rows, *heads, pages)
            for rules in ((False, False, False), (True, True, True)) if rows == 1 else ((False, False, False),):
                shared, _, stack = use = resources(attend(cut, heads, rows, *rules))
                record.see(f"attention {heads} {rows} rows {pages} pages{' all rules' if any(rules) else ''}", use)
                assert shared <= SHARED, f"{heads} {rows} {cut}: {shared} bytes of shared memory"
                assert stack <= STACK or heads[2] > 128, f"{heads} {rows} {cut}: {stack} bytes of registers spilled"
    constants: dict[str, object] = {
        "sinks": None, "Q_HEADS": 32, "D": 128, "WIDTH": 128, "SPLIT": 128, "WINDOWED": False, "AHEAD": attention.AHEAD, "PDL": True,
    }  # fmt: skip
    record.see("combine", resources(build(combine, constants, num_warps=4)))
    listed: dict[str, object] = {"ROWS": 16, "AT_ONCE": attention.LISTED, "PDL": True}
    record.see("list_groups", resources(build(list_groups, listed, num_warps=4)))


def check_rotation(record: Recorded) -> None:
    for q_heads, kv_heads, norms in ((32, 8, True), (32, 8, False), (0, 8, False), (0, 8, True), (32, 0, True)):
        constants: dict[str, object] = {
            "Q_HEADS": q_heads, "KV_HEADS": kv_heads, "D": 128, "HALF": 64, "HALF_BLOCK": 64, "REST_BLOCK": 0, "D_BLOCK": 128,
            "HEADS": 32 if norms else 4,
            "PAGE": BLOCK, "INTERLEAVED": not norms, "WIDE": norms, "bias": None, "SPLITS": 1, "PDL": True,
        }  # fmt: skip
        if not norms:
            constants |= {"q_norm": None, "k_norm": None}
        use = resources(build(rope._rope_write, constants, num_warps=8 if norms else 4))
        record.see(f"rope {q_heads} {kv_heads}{' normed' if norms else ''}", use)
        assert use[2] == 0, "registers spilled"


def main() -> None:
    if sys.argv[1:] not in ([], [RENEW]):
        rows, *heads = map(int, sys.argv[1:5])
        cut = attention.plan(rows, *heads, PAGES)
        if len(sys.argv) > 5:
            cut = replace(cut, stages=int(sys.argv[5]))
        print(cut, "shared, registers, stack:", resources(attend(cut, (heads[0], heads[1], heads[2]), rows)))
        return
    with Recorded("attention") as record:
        check_rotation(record)
        check_attention(record)


if __name__ == "__main__":
    main()
