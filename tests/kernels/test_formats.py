"""Reading of stored blocks: any bytes, on processors with and without the instructions that this one has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import gguf
import numpy as np
import pytest
from llvmlite import ir

from power_lab.kernels import reference
from power_lab.kernels.numba import machine, objects
from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.formats import FORMATS
from power_lab.kernels.numba.machine import Machine
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.numba.tiles import Tile, Unpack
from power_lab.kernels.quants import GEOMETRY, QuantType, row_bytes
from tests.kernels import data

BLOCKS = sorted(type for type, (values, _) in GEOMETRY.items() if values > 1)
HOST = machine.host()
X86 = HOST.triple.startswith("x86")
MACHINES = {
    "avx2": Machine(HOST.triple, "haswell", "+avx2,+fma,+f16c,+ssse3"),
    "no byte shuffle": Machine(HOST.triple, "haswell", "+avx2,+fma,+f16c"),
}


def any_bytes(type: QuantType, n: int, k: int) -> np.ndarray:
    """Blocks of any bits: scales of every size, denormal, negative, infinite, NaN."""
    raw = np.random.default_rng(type).integers(0, 256, (n, row_bytes(type, k)), dtype=np.uint8)
    raw[:3] = [[0], [255], [128]]
    return raw


def same(values: np.ndarray, want: np.ndarray) -> bool:
    """Equal bits, but for the many bits of NaN."""
    numbers = ~np.isnan(want)
    return bool(np.isnan(values[~numbers]).all()) and values[numbers].tobytes() == want[numbers].tobytes()


def test_every_type_has_a_reader() -> None:
    assert set(FORMATS) == set(QuantType) == set(GEOMETRY)
    for type in QuantType:
        kind = gguf.GGMLQuantizationType(int(type))
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (type.name, GEOMETRY[type])


@pytest.mark.parametrize("type", BLOCKS)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_any_bytes_mean_what_they_mean_to_gguf(ops: NumbaOps, type: QuantType) -> None:
    n, k = 600, 512
    raw = any_bytes(type, n, k)
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(int(type)))
    out = data.poison(n, k)
    ops.embed(ops.weight(type, n, k, raw), np.arange(n, dtype=np.int32), out)
    assert same(out, want)
    assert same(reference.dequantize(type, raw, n, k).numpy(), want)
    assert (np.abs(want[np.isfinite(want) & (want != 0)]) < 2.0**-14).any(), "denormal scales were among them"


def compiled(type: QuantType, target: Machine) -> Callable[..., None]:
    """Call a function of the type's, compiled for that machine, by name."""
    reader = FORMATS[type](target)
    module = ir.Module(type.name)
    module.triple = target.triple
    for name, emitter in {"row": Unpack(reader, 1), "tile": Tile(reader, 4, 4)}.items():
        v.define(module, name, [v.I64] * emitter.arguments, ir.VoidType(), emitter.emit)
    linked = objects.Linked(type.name, objects.compile_module(module, target), ("row", "tile"))

    def call(name: str, *args: int) -> None:
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(args))(linked.address(name))(*args)

    return call


CODEBOOKS = (QuantType.IQ4_NL, QuantType.IQ4_XS, QuantType.MXFP4)


@pytest.mark.skipif(not X86, reason="the machines without AVX-512 that are compiled for are x86")
@pytest.mark.parametrize(
    ("target", "type"), [("avx2", type) for type in QuantType] + [("no byte shuffle", type) for type in CODEBOOKS]
)
def test_lesser_machines_have_the_same_bits(ops: NumbaOps, type: QuantType, target: str) -> None:
    n, k = data.SHAPES[type][0]
    weight, values = data.weight(type, n, k)
    call, stored = compiled(type, MACHINES[target]), weight.data
    at, pitch = stored.ctypes.data, stored.strides[0]
    out = data.poison(n, -(-k // 16) * 16)
    call("row", at, pitch, n, k, out.ctypes.data)
    assert out[:, :k].tobytes() == values.numpy().tobytes()
    x, sums, want = data.normal(4, k), data.poison(4, n), data.poison(4, n)
    call("tile", x.ctypes.data, k * 4, 4, at, pitch, n, k, sums.ctypes.data, n * 4)
    ops.linear(x, (weight,), want)
    assert sums.tobytes() == want.tobytes()
