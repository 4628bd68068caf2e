"""Compiles what drafters add to a step for sm_90, without a GPU, as its launches would. Run by test_moves; prints resource use.

Fails where a kernel spills, needs more than `recorded` says, writes before it has waited, or sums squares in another order than the norm
whose bits it promises.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.compiler import CompiledKernel

from power_lab.kernels.ops import Array, Batch, Moved, Onward
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton.variants import DryOps, Variants
from tests.kernels.triton.cubin import resources
from tests.kernels.triton.recorded import Recorded

WIDTHS = (576, 1536, 4096, 8192)


class Compiled(Variants):
    """Compiles what is launched, at once."""

    def __init__(self) -> None:
        super().__init__(90, None)
        self.kernels: list[CompiledKernel] = []

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        self.kernels.append(compile_fn())
        return super().submit(key, compile_fn, finalize_fn)


def check(kernel: CompiledKernel, record: Recorded, of: str) -> None:
    ptx, use = kernel.asm["ptx"], resources(kernel)
    record.see(f"{kernel.metadata.name} {of}", use)
    _, registers, stack = use
    assert registers <= 128 and stack == 0, kernel.metadata.name
    if kernel.metadata.name == "_barrier":  # out of the chain, so that those behind see what was written before it
        assert "griddepcontrol" not in ptx
        return
    waited = ptx.index("griddepcontrol.wait")
    if kernel.metadata.name == "_resume":  # what comes behind reads before it waits: nothing may begin
        assert "griddepcontrol.launch_dependents" not in ptx and "st.global" not in ptx[:waited]
        return
    begun = ptx.index("griddepcontrol.launch_dependents")
    assert begun < waited and "st.global" not in ptx[:waited] and "st.global" in ptx[waited:], kernel.metadata.name
    assert "div.full" not in ptx and "fma" not in ptx, kernel.metadata.name


def sums(kernel: CompiledKernel) -> list[str]:
    """How the threads share what each sum adds."""
    code = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    return [layouts[name] for name in re.findall(r"^\s*\}\) : \(tensor<\d+xf32, (#\w+)>\) -> f32", code, re.MULTILINE)]


def launched(
    compiled: Compiled, ops: DryOps, width: int, layers: int, operand: str
) -> tuple[list[CompiledKernel], list[str]]:
    """What a drafter of this width launches, and the order of the sums of squares of a layer's norm, whose result is an operand."""
    empty: Callable[..., Array] = ops.empty
    x, delta, post = empty((8, width), "float32"), empty((8, width), "float32"), empty((width,), "float32")
    before = len(compiled.kernels)
    ops.add_rms_norm(x, delta, post, post, 1e-5, empty((8, width), operand))
    orders = [sum for kernel in compiled.kernels[before:] for sum in sums(kernel)]
    before = len(compiled.kernels)
    table, slots = empty((1000, layers * width), operand), empty((8,), "int64")
    for tapped in ((x, None, None), (x, delta, None), (x, delta, post)):
        for places in (None, slots):
            ops.tap(*tapped, 1e-5, table, width, places)
    ops.take(table, slots, empty((8, layers * width), operand))
    ids, both = empty((8,), "int32"), empty((8, 2 * width), operand)
    weights = ops.weight(QuantType.F32, 1000, width, np.zeros((1000, width), np.float32), operand)
    for states, places in ((x, None), (empty((1000, width), operand), slots)):
        ops.merge(weights, ids, 1.0, ids, post, states, places, post, 1e-5, both)
    ops.scatter_columns(empty((8, 16384), "float32"), empty((16384,), "int32"), empty((8, 49152), "float32"))
    ops.add_rms_norm(empty((8, 49152), "float32"), empty((8, 49152), "float32"), None, None, 0.0, x)
    coef, base, previous = empty((8, width // 4), "float32"), empty((2, 2, width), "float32"), empty((8,), "int32")
    narrow = empty((8, width), operand)
    ops.dynamic_conv(narrow, coef, base, 0, previous, empty((8, width), operand))
    ops.dynamic_conv(x, coef, base, 1, previous, delta)
    batch = Batch(previous, previous, slots, previous, empty((9, 130), "int32"), previous, slots)
    onward, marks = Onward(empty((9, 3), "int32"), empty((9,), "int32"), previous), empty((9, 2), "int64")
    ops.note(ids, previous, slots, previous)
    ops.recall(ids, batch.tables, onward.came, marks, 3, onward.windows, ids, onward.windows)
    ops.mark(batch, onward, previous, marks)
    moved = Moved(previous, previous, slots, slots, slots, previous, previous)
    ops.resume(batch, onward, marks, previous, slots, moved)
    ops.resume(batch, onward, marks, previous, slots, moved, previous, previous)
    return compiled.kernels[before:], orders


def main() -> None:
    with Recorded("moves") as record, Compiled() as compiled:
        ops = DryOps()
        for width, operand in itertools.product(WIDTHS, ("bfloat16", "float16")):
            kernels, orders = launched(compiled, ops, width, 4, operand)
            for kernel in kernels:
                check(kernel, record, f"{width} {operand}")
            found = [sum for kernel in kernels for sum in sums(kernel) if kernel.metadata.name == "_tap"]
            assert len(found) == 2 and set(found) == set(orders), (width, found, orders)


if __name__ == "__main__":
    main()
