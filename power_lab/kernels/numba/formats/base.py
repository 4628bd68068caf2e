"""What a storage type must say about itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.machine import Machine
from power_lab.kernels.numba.vector import F16, F32, I8, I32, Builder, Value


class Format(ABC):
    """LLVM code that reads one storage type on one machine.

    A row is a run of steps of `values` values in `size` bytes: a block, or one vector of a plain type. A step is read in `parts`
    equal parts, one after the other in a loop, so that the code of large blocks stays small.
    """

    values: ClassVar[int]
    size: int
    parts: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    @abstractmethod
    def open(self, b: Builder, pointer: Value) -> Any:
        """What all parts of the step at `pointer` need: decoded scales, addresses."""

    @abstractmethod
    def read(self, b: Builder, step: Any, part: Value) -> Iterator[Value]:
        """The values of part number `part` (int64) of an opened step, in order, as vectors of 16 floats.

        Each is emitted when it is asked for, so that few of them are alive at once.
        """


def skip(b: Builder, pointer: Value, offset: int | Value) -> Value:
    return b.gep(pointer, [v.i64(offset) if isinstance(offset, int) else offset], source_etype=I8)


def load_bytes(b: Builder, pointer: Value, offset: int | Value, count: int = v.LANES) -> Value:
    return v.load(b, skip(b, pointer, offset), v.vec(I8, count))


def halves(b: Builder, pointer: Value, offset: int = 0) -> Value:
    """The two f16 at `offset`, as f32 [2]. Read as a pair, since a lone 16-bit load needs a slow insertion."""
    return b.fpext(v.load(b, skip(b, pointer, offset), v.vec(F16, 2)), v.vec(F32, 2))


def splats(b: Builder, pair: Value) -> tuple[Value, Value]:
    """Each of two floats, in all lanes.

    They go through memory: loading a number copies it to all lanes for nothing, where a shuffle would take its place among those that
    unpack values.
    """
    local = v.opaque(b, v.variable(b, pair.type, pair))
    return v.pick(b, local, v.i64(0)), v.pick(b, local, v.i64(1))


def unsigned(b: Builder, integers: Value) -> Value:
    """Unsigned bytes as floats."""
    return b.sitofp(b.zext(integers, v.vec(I32)), v.vec(F32))


def signed(b: Builder, integers: Value) -> Value:
    """Signed bytes as floats."""
    return b.sitofp(b.sext(integers, v.vec(I32)), v.vec(F32))
