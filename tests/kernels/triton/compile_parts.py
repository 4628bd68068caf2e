"""Compiles products whose sums of splits stay apart, and what reads them, for sm_90, without a GPU, as their launches would. Run by
test_parts; prints resource use.

Fails where a kernel spills or needs more than `recorded` says, where a product still counts who came last, and where a reader fuses what
must be rounded, writes before it has waited, or sums squares in another order than it does of whole results, whose bits it promises.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import numpy as np
from triton.compiler import CompiledKernel

from power_lab.kernels.ops import Array, Batch
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton.variants import DryOps
from tests.kernels.triton.compile_moves import Compiled
from tests.kernels.triton.cubin import resources
from tests.kernels.triton.recorded import Recorded

TYPES = [QuantType[name] for name in ("BF16", "Q8_0", "Q6_K", "Q4_K", "Q4_0")]
MODELS = {"8b": (4096, 12288, 32, 8), "0.6b": (1024, 3072, 16, 8)}  # width, FFN, query and KV heads of 128
ROWS = {QuantType.BF16: (8, 64), QuantType.Q4_K: (8, 64)}  # of a step; 8 of other types
SHARED = 232448  # bytes of a block on sm_90


def orders(kernel: CompiledKernel) -> list[str]:
    """How threads share what each sum over a row or a head adds."""
    code = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    return [layouts[name] for name in re.findall(r"^\s*\}\) : \(tensor<[\dx]+xf32, (#\w+)>\) -> ", code, re.MULTILINE)]


def launch(ops: DryOps, type: QuantType, rows: int, model: str) -> None:
    """What of a layer leaves parts, and reads them: q k v and rotation, output, down, each with the norm behind."""
    width, ffn, heads, kv_heads = MODELS[model]
    empty: Callable[..., Array] = ops.empty
    operand = ops.operand((type,))
    hidden, delta, normed = (
        empty((rows, width), "float32"),
        empty((rows, width), "float32"),
        empty((rows, width), operand),
    )
    factor, index = empty((width,), "float32"), empty((rows,), "int32")
    for cols in (heads * 128, ffn):
        left = ops.parts(delta)
        ops.linear(empty((rows, cols), operand), (weight(ops, type, width, cols),), left)
        ops.add_rms_norm(hidden, left, None, factor, 1e-6, normed)
    qkv = empty((rows, (heads + 2 * kv_heads) * 128), "float32")
    left, norms = ops.parts(qkv), (empty((128,), "float32"), empty((128,), "float32"))
    ops.linear(normed, tuple(weight(ops, type, n * 128, width) for n in (heads, kv_heads, kv_heads)), left)
    batch = Batch(index, index, empty((rows,), "int64"), index, empty((rows, 16), "int32"), index)
    table, cache = empty((4096, 64, 2), "float32"), ops.kv_cache(4, kv_heads, 128)
    ops.rope_write(left, batch, table, False, heads, cache, norms, 1e-6)


def weight(ops: DryOps, type: QuantType, rows: int, cols: int) -> Array:
    return ops.weight(type, rows, cols, np.zeros(0, np.uint8))


def check(kernel: CompiledKernel, record: Recorded, of: str, whole: list[str]) -> None:
    """whole: the orders of the same kernel where it reads a whole result."""
    ptx, name = kernel.asm["ptx"], kernel.metadata.name
    use = resources(kernel)
    record.see(f"{name} {of}", use)
    shared, _, stack = use
    assert shared <= SHARED and stack == 0, f"{name} {of}: spilled, or beyond shared memory"
    if name in ("product", "middle"):
        assert "atom" not in ptx, f"{name} {of}"
        return
    waited = ptx.index("griddepcontrol.wait")
    assert "st.global" not in ptx[:waited] and "fma" not in ptx, f"{name} {of}"
    assert orders(kernel) and orders(kernel) == whole, f"{name} {of}: {orders(kernel)}, whole {whole}"


def main() -> None:
    whole: dict[tuple[str, str], list[str]] = {}
    with Recorded("parts") as record, Compiled() as compiled:
        for model, type in itertools.product(MODELS, TYPES):
            for rows in ROWS.get(type, (8,)):
                ops, first = DryOps(), len(compiled.kernels)
                ops.apart = False
                launch(ops, type, rows, model)
                whole |= {(kernel.metadata.name, model): orders(kernel) for kernel in compiled.kernels[first:]}
                ops.apart, first = True, len(compiled.kernels)
                launch(ops, type, rows, model)
                for kernel in compiled.kernels[first:]:
                    check(kernel, record, f"{model} {type.name} {rows}", whole[kernel.metadata.name, model])


if __name__ == "__main__":
    main()
