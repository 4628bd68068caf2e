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


def halves(b: Builder, pointer: Value, offset: int = 0) -> tuple[Value, Value]:
    """The two f16 at `offset`, each as f32 in all lanes. Read as a pair: a lone 16-bit load needs a slow insertion."""
    pair = b.fpext(v.load(b, skip(b, pointer, offset), v.vec(F16, 2)), v.vec(F32, 2))
    return v.shuffle(b, pair, pair, [0] * v.LANES), v.shuffle(b, pair, pair, [1] * v.LANES)


def unsigned(b: Builder, integers: Value) -> Value:
    """Unsigned bytes or words as floats."""
    return b.sitofp(b.zext(integers, v.vec(I32)) if integers.type.element != I32 else integers, v.vec(F32))


def signed(b: Builder, integers: Value) -> Value:
    """Signed bytes as floats."""
    return b.sitofp(b.sext(integers, v.vec(I32)), v.vec(F32))
