"""Compiles the sampler chain, log-probabilities and the small kernels of a step for sm_90, without a GPU, as their launches would.

Run by test_sample; prints resource use. Fails where a kernel spills, needs more than 128 registers or than `recorded` says, or divides
inexactly.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from power_lab.kernels.triton import logprobs, norm, penalties, sample, survivors
from tests.kernels.triton.cubin import resources
from tests.kernels.triton.recorded import Recorded

CONTROLS = sample.Controls(
    temperature="*fp32", top_k="*i32", top_p="*fp32", min_p="*fp32", repetition="*fp32", presence="*fp32", seeds="*i64", positions="*i64",
    history="*i32", history_span="*i64", bias_ids="*i32", bias_values="*fp32", bias_span="*i64",
)  # fmt: skip
SCRATCH = sample.Scratch(
    z="*fp32", changed="*i32", seen="*i32", best="*fp32", ids="*i32", peaks="*fp32", lows="*fp32", fars="*fp32", cells="*i64", tops="*fp32",
    cuts="*i64", bins="*i64", limits="*i64", keys="*i64", filled="*i32", arrived="*i32",
)  # fmt: skip
POINTERS = {
    "*fp32": ("logits", "chosen", "values", "all_largest", "all_sums", "x", "delta", "post", "weight"),
    "*bf16": ("out", "X", "Out"),
    "*i32": ("tokens", "ids", "arrived", "rows", "Rows", "seen", "means"),
    "*i64": ("all_keys",),
}  # fmt: skip
TYPES: dict[str, Any] = {name: type for type, names in POINTERS.items() for name in names} | {
    "c": CONTROLS,
    "s": SCRATCH,
}
NUMBERS = {"fp32": ("eps", "cap"), "i32": ("vocabulary", "pitch", "peak_pitch", "top", "count", "words")}
TYPES |= {name: type for type, names in NUMBERS.items() for name in names}
ALIGNED = [["tt.divisibility", 16]]
STACK = 32  # bytes: what a call of the division's slow path may need


def compiled(kernel: Any, constants: dict[str, Any], warps: int) -> tuple[int, int, int]:
    """(shared bytes, registers, stack bytes)."""
    names = kernel.arg_names
    used = {name: value for name, value in constants.items() if name in names}
    types = {name: "constexpr" if name in used else TYPES[name] for name in names}
    aligned = {(i,): ALIGNED for i, name in enumerate(names) if types[name][0] == "*" and name not in ("c", "s")}
    if "s" in names:
        aligned |= {(names.index("s"), i): ALIGNED for i in range(len(SCRATCH))}
    source = ASTSource(kernel, types, constexprs=used, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False, "launch_pdl": True}
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = done.asm["ptx"]
    assert "div.full.f32" not in ptx, kernel
    begun, waited = ptx.index("griddepcontrol.launch_dependents"), ptx.index("griddepcontrol.wait")
    early = ptx[:waited].count("ld.global")
    weights = sum(types.get(name, "")[:1] == "*" for name in ("post", "weight"))
    assert begun < waited and "st." not in ptx[:waited] and (early > 0) == (weights > 0), kernel
    return resources(done)


def main() -> None:
    passes = (sample._survey, sample._weigh, sample._histogram, sample._collect, sample._draw)
    flags: dict[str, Any] = {"RANDOM": True, "LIMITED": True, "means": None}
    cases = [
        (logprobs._logprobs, {"BLOCK": logprobs.BLOCK, "num_warps": logprobs.WARPS}),
        (penalties.mark, {"BLOCK": 0, "num_warps": 4}),
        (sample._survey, {**sample.plan(1, 262144), "RANDOM": False, "LIMITED": False, "means": None}),
        *(
            (kernel, sample.plan(1, 16384) | {"RANDOM": True, "LIMITED": False})
            for kernel in (sample._survey, sample._draw)
        ),
        *((kernel, sample.plan(rows, 262144) | flags) for kernel in passes for rows in (1, 64)),
        (norm._softcap, {"BLOCK": norm.CAPPED, "num_warps": 4}),
        *(
            (
                norm._norm_rows,
                {"D": width, "BLOCK": triton.next_power_of_2(width), "num_warps": norm.warps(width)} | parts,
            )
            for width in (576, 2048, 4096, 8192)
            for parts in ({"rows": None}, {"post": None}, {"rows": None, "post": None, "delta": None})
        ),
    ]
    with Recorded("sample") as record:
        for kernel, meta in cases:
            check(kernel, meta, record)


def check(kernel: Any, meta: dict[str, Any], record: Recorded) -> None:
    programs = 262144 // (meta["BLOCK"] or 1024)
    constants = {
        **meta,
        "PROGRAMS": programs,
        "PEAKS": 262144 // sample.GROUP.value,
        "BINS": survivors.BINS.value,
        "LISTED": survivors.LISTED,
        "bias": None,
        "SPLITS": 1,
        "PDL": True,
    }
    use = compiled(kernel, constants, meta["num_warps"])
    told = ", ".join(f"{key} {value}" for key, value in meta.items() if key != "num_warps")
    record.see(f"{kernel.__name__} {told}", use)
    _, registers, stack = use
    assert registers <= 128 and stack <= STACK, kernel.__name__


if __name__ == "__main__":
    main()
