"""The arithmetic of ordinary GPU engines, on this machine: a library's products of bfloat16 numbers, summed in f32, rounded to bfloat16.

`mode="fast"` calls the same library and rounds nothing. Both let a row's bits depend on how many rows there are; bfloat16 has 65,536 times
fewer steps between two powers of two, so that what is a difference in the last digit becomes, now and then, another token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.loader import Loaded, load
from power_lab.kernels.ops import Activation, Array, Weight


def load_ordinary(model: str = "smollm2", *, paths: Paths | None = None, **settings: Any) -> Loaded:
    """A model in fast mode whose matrix products round as those of ordinary engines do. For `Microscope` or `Engine(loaded=...)`."""
    config = EngineConfig.of({"model": model, **settings, "mode": "fast", "device": "cpu"})
    loaded = load(config, paths or Paths.default(), lambda *_: None)
    ops = loaded.model.ops
    products = _Products(ops)
    ops.linear, ops.gate_up = products.linear, products.gate_up  # of this operation table, which nobody else has
    return loaded


class _Products:
    """Matrix products with operands and results rounded to bfloat16, as tensor cores make them."""

    def __init__(self, ops: Any) -> None:
        import torch

        self._torch, self._ops = torch, ops
        self._matrices: dict[tuple[Weight, ...], Any] = {}

    def linear(self, x: Array, weights: tuple[Weight, ...], out: Array, bias: Array | None = None) -> None:
        result = self._torch.from_numpy(out)
        result.copy_(self._product(x, weights))
        if bias is not None:
            result += self._torch.from_numpy(bias)

    def gate_up(self, x: Array, gate: Weight, up: Weight, out: Array, activation: Activation = "silu") -> None:
        both, functional = self._product(x, (gate, up)), self._torch.nn.functional
        gates = both[:, : gate.rows]
        active = functional.silu(gates) if activation == "silu" else functional.gelu(gates, approximate="tanh")
        self._torch.from_numpy(out).copy_(active * both[:, gate.rows :])

    def _product(self, x: Array, weights: tuple[Weight, ...]) -> Any:
        operand = self._torch.from_numpy(x).bfloat16().float()
        return (operand @ self._matrix(weights).T).bfloat16().float()

    def _matrix(self, weights: tuple[Weight, ...]) -> Any:
        """The stacked weights [sum N, K], rounded."""
        if weights not in self._matrices:
            parts = []
            for weight in weights:
                host = np.empty((weight.rows, weight.cols), np.float32)
                self._ops.embed(weight, np.arange(weight.rows, dtype=np.int32), host)
                parts.append(self._torch.from_numpy(host).bfloat16().float())
            self._matrices[weights] = self._torch.cat(parts)
        return self._matrices[weights]
