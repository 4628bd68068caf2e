"""Compiled variants of kernels: found without a GPU by running the engine on arrays without memory, and compiled ahead of first launches.

A process that has made `Variants` has, for Triton, a GPU of the capability that it was told, and launches nothing: a launch only says which
variant it would take. What such a launch names is what a real one names, since Triton asks an argument for its type, for
divisibility by 16 and whether it is 1: arrays on torch's `meta` device have the types and shapes, and the offsets from an aligned start.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton import AsyncCompileMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.driver import driver

from power_lab.kernels.ops import Array, Fetched, Graph, Staging, Weight
from power_lab.kernels.quants import QuantType, row_bytes
from power_lab.kernels.triton import linear, planes, recall, sample
from power_lab.kernels.triton.host import CARRIED, carry
from power_lab.kernels.triton.ops import TritonOps, settle

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as it is compiled for some of its arguments.

    Attributes:
        key: the name of its folder in Triton's cache.
        compile: compiles it into that cache, unless it is there, and what launches it.
    """

    key: str
    compile: Callable[[], None]


class Variants(AsyncCompileMode):
    """What launches inside of this context would compile, in the order in which they first come. They do nothing else.

    Kernels are remembered by their functions, so a process has one of these.

    Args:
        capability: the GPU's compute capability, as 90.
        launcher: of a compiled kernel's source and metadata, makes the C code that launches it. Triton's own needs the GPU's driver; None
            leaves it to the first launch.
    """

    def __init__(self, capability: int, launcher: Callable[[Any, Any], object] | None = CudaLauncher) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._launcher = launcher
        self._found: dict[str, Variant] = {}
        driver.set_active(_Absent(GPUTarget("cuda", capability, 32)))  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Variant]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        """Triton's call where it would compile. What it gets is what it takes for the kernel at this launch and the later ones."""
        name = base64.b32encode(hashlib.sha256(key.encode()).digest()).decode().rstrip("=")

        def compile() -> None:
            kernel = compile_fn()
            if self._launcher is not None:
                self._launcher(kernel.src, kernel.metadata)

        self._found.setdefault(name, Variant(name, compile))
        kernel = _Unlaunched()
        finalize_fn(kernel)
        return kernel


class _Unlaunched:
    """A compiled kernel whose launch does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *_: object) -> None: ...


class _Absent:
    """Triton's driver of a GPU that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class DryOps(TritonOps):
    """`TritonOps` on arrays without memory: every operation goes as far as its launches, and computes nothing. Whatever it gives to the
    host is 0."""

    def __init__(self) -> None:
        settle()
        self.device = META
        self.compiles_for = 0
        self._products: linear.Workspace | None = None
        self._scratch = torch.empty(0, dtype=torch.float32, device=META)
        self._retired: list[torch.Tensor | sample.Scratch] = []
        self._sampling: dict[int, sample.Scratch] = {}
        self._recalling: dict[tuple[int, int], recall.Scratch] = {}

    def digest(self) -> str:
        return ""

    def reasons(self) -> tuple[str, ...]:
        return ("nothing is computed",)

    def close(self) -> None:
        """Nothing is held."""

    def asarray(self, host: np.ndarray) -> Array:
        return torch.from_numpy(np.ascontiguousarray(host)).to(META)

    def tohost(self, array: Array) -> np.ndarray:
        return _zeros(array).numpy()

    def staging(self, raw: Array) -> Staging:
        words = raw.view(torch.int32)
        carry(words, words, min(len(words), CARRIED))  # as every way to and from the device
        return _Unsent(np.zeros(raw.shape, np.uint8))

    def fetch(self, *arrays: Array) -> Fetched:
        return _Nothing(tuple(map(self.tohost, arrays)))

    @contextmanager
    def step(self) -> Iterator[None]:
        yield

    def wait(self) -> None:
        """Nothing runs."""

    def free_bytes(self) -> int | None:
        return None

    def weight(self, type: QuantType, rows: int, cols: int, host: np.ndarray, operand: str = "") -> Weight:
        """As `TritonOps.weight` of a matrix of that shape; `host` is not read."""
        type = QuantType(type)
        operand = operand or self.operand((type,))
        if planes.valued(type, rows, cols, operand):
            values = torch.empty((rows, cols), dtype=getattr(torch, operand), device=META)
            held = planes.DeviceWeight(planes.PLAIN_OF[operand], rows, cols, {"values": values})
            return Weight(type, rows, cols, held, operand)
        one = planes.repack(type, 1, cols, np.zeros(row_bytes(type, cols), np.uint8))
        parts = {
            name: torch.empty((len(part), rows, *part.shape[2:]), dtype=torch.from_numpy(part).dtype, device=META)
            for name, part in one.items()
        }
        return Weight(type, rows, cols, planes.DeviceWeight(type, rows, cols, parts), operand)

    def capture(self, forward: Callable[[], Array]) -> tuple[Graph, Array] | None:
        """None: what would be captured was run before."""
        return None


@dataclass(frozen=True, slots=True)
class _Unsent:
    memory: np.ndarray

    def open(self) -> np.ndarray:
        return self.memory

    def send(self, nbytes: int) -> None:
        """Nobody receives it."""


@dataclass(frozen=True, slots=True)
class _Nothing:
    hosts: tuple[np.ndarray, ...]
    seconds: float = 0.0

    def get(self) -> tuple[np.ndarray, ...]:
        return self.hosts


def _zeros(array: torch.Tensor) -> torch.Tensor:
    return torch.zeros(
        array.shape, dtype=torch.float32 if array.dtype in (torch.bfloat16, torch.float16) else array.dtype
    )
