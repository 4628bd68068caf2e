"""`TritonOps` through Triton's interpreter: arrays on the CPU, no streams, no graphs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from power_lab.kernels.ops import Activation, Array, Fetched, Staging, Weight
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton.ops import TritonOps
from power_lab.kernels.triton.variants import DryOps


class InterpretedOps(DryOps):
    """What a GPU would do, in numpy's arithmetic.

    Args:
        apart: as of `TritonOps`.

    Attributes:
        left: of how many products the sums of splits were left to their reader.
    """

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        self.device, self.apart, self.left = torch.device("cpu"), apart, 0
        self._scratch = torch.empty(0)

    def asarray(self, host: np.ndarray) -> Array:
        return torch.from_numpy(np.array(host))

    def tohost(self, array: Array) -> np.ndarray:
        return TritonOps.tohost(self, array)

    def weight(self, type: QuantType, rows: int, cols: int, host: np.ndarray, operand: str = "") -> Weight:
        return TritonOps.weight(self, type, rows, cols, host, operand)

    def staging(self, raw: Array) -> Staging:
        return _Sent(raw.numpy(), np.zeros(raw.shape, np.uint8))

    def fetch(self, *arrays: Array) -> Fetched:
        return _Here(tuple(self.tohost(array).copy() for array in arrays))

    def linear(self, x: Array, weights: tuple[Weight, ...], out: Array, bias: Array | None = None) -> None:
        """Scratch is poisoned before each product: whoever reads sums of the one before too late reads NaN."""
        self._workspace().partials.fill_(torch.nan)
        super().linear(x, weights, out, bias)
        self.left += getattr(out, "splits", 1) > 1

    def gate_up(self, x: Array, gate: Weight, up: Weight, out: Array, activation: Activation = "silu") -> None:
        self._workspace().partials.fill_(torch.nan)
        super().gate_up(x, gate, up, out, activation)


@dataclass(frozen=True, slots=True)
class _Sent:
    raw: np.ndarray
    memory: np.ndarray

    def open(self) -> np.ndarray:
        return self.memory

    def send(self, nbytes: int) -> None:
        self.raw[:nbytes] = self.memory[:nbytes]


@dataclass(frozen=True, slots=True)
class _Here:
    hosts: tuple[np.ndarray, ...]
    seconds: float = 0.0

    def get(self) -> tuple[np.ndarray, ...]:
        return self.hosts
