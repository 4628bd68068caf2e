"""Compiles the sampler chain and log-probabilities for sm_90, without a GPU, as their launches would.

Run by test_sample; prints resource use. Fails where a kernel spills, needs more than 128 registers, or divides inexactly.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from power_lab.kernels.triton import logprobs, sample, survivors
from tests.kernels.triton.cubin import resources

POINTERS = {
    "*fp32": ("logits", "controls", "bias_values", "z", "best", "peaks", "fars", "tops", "chosen", "values", "all_largest", "all_sums"),
    "*i32": ("history", "bias_ids", "tokens", "ids", "filled", "arrived"),
    "*i64": ("spans", "cuts", "bins", "limits", "keys", "all_keys"),
}  # fmt: skip
TYPES = {name: type for type, names in POINTERS.items() for name in names}
NUMBERS = ("vocabulary", "pitch", "peak_pitch", "top")
STACK = 32  # bytes: what a call of the division's slow path may need


def compiled(kernel: Any, constants: dict[str, int], warps: int) -> tuple[int, int, int]:
    """(shared bytes, registers, stack bytes)."""
    names = kernel.arg_names
    used = {name: value for name, value in constants.items() if name in names}
    types = {name: "constexpr" if name in used else "i32" if name in NUMBERS else TYPES[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    source = ASTSource(kernel, types, constexprs=used, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "div.full.f32" not in done.asm["ptx"], kernel
    return resources(done)


def main() -> None:
    cases = [
        (logprobs._logprobs, {"BLOCK": logprobs.BLOCK, "num_warps": logprobs.WARPS}),
        *(
            (kernel, sample.plan(rows, 262144))
            for kernel in (sample._survey, sample._histogram, sample._collect, sample._draw)
            for rows in (1, 64)
        ),
    ]
    for kernel, meta in cases:
        programs = 262144 // meta["BLOCK"]
        constants = {
            "BLOCK": meta["BLOCK"],
            "PROGRAMS": programs,
            "PEAKS": 262144 // sample.GROUP.value,
            "BINS": survivors.BINS.value,
            "LISTED": survivors.LISTED,
        }
        shared, registers, stack = compiled(kernel, constants, meta["num_warps"])
        print(f"{kernel.__name__} {meta}: shared {shared}, registers {registers}, stack {stack}")
        assert registers <= 128 and stack <= STACK, kernel.__name__


if __name__ == "__main__":
    main()
