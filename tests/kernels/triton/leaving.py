"""Interpreted operations whose products leave their sums to readers, and whose scratch holds nothing once another product begins."""

from __future__ import annotations

from collections.abc import Callable

import torch

from power_lab.kernels.ops import Activation, Array, Graph, Weight
from tests.interpreted import InterpretedOps


class LeavingOps(InterpretedOps):
    """Scratch is poisoned before each product: whoever reads sums of the one before too late reads NaN. For that no step is recorded.

    Args:
        apart: as of `TritonOps`.

    Attributes:
        left: of how many products the sums of splits were left to their reader.
    """

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        self.apart, self.left = apart, 0

    def linear(self, x: Array, weights: tuple[Weight, ...], out: Array, bias: Array | None = None) -> None:
        self._workspace().partials.fill_(torch.nan)
        super().linear(x, weights, out, bias)
        self.left += getattr(out, "splits", 1) > 1

    def gate_up(self, x: Array, gate: Weight, up: Weight, out: Array, activation: Activation = "silu") -> None:
        self._workspace().partials.fill_(torch.nan)
        super().gate_up(x, gate, up, out, activation)

    def capture(self, forward: Callable[[], Array]) -> tuple[Graph, Array] | None:
        return None
