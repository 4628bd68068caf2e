"""The `fast` mode of the CPU: torch's matrix products in place of ours.

torch chooses its reduction order by the number of rows, so a token's bits depend on its company: this mode is here to measure what
exactness costs and to show what goes wrong without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.ops import Activation, Array, Graph, Weight


class TorchFastOps(NumbaOps):
    """`NumbaOps` with linears through torch, on weights unpacked once to f32. Not row invariant."""

    mode = "fast"

    def __init__(self, cache_dir: Path, threads: int) -> None:
        import torch

        super().__init__(cache_dir, threads)
        torch.set_num_threads(threads)
        self._torch = torch
        self._unpacked: dict[tuple[Weight, ...], Any] = {}
        self._digest = hashlib.sha256(
            f"power-lab/arithmetic/torch-fast/1|{torch.__version__}|{super().digest()}".encode()
        ).hexdigest()

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(matrix.nbytes for matrix in self._unpacked.values())

    def close(self) -> None:
        """End the worker threads and free the unpacked weights; a later product unpacks its own again."""
        super().close()
        self._unpacked.clear()

    def linear(self, x: Array, weights: tuple[Weight, ...], out: Array, bias: Array | None = None) -> None:
        result = self._torch.from_numpy(out)
        self._torch.mm(self._torch.from_numpy(x), self._matrix(weights).T, out=result)
        if bias is not None:
            result += self._torch.from_numpy(bias)

    def gate_up(self, x: Array, gate: Weight, up: Weight, out: Array, activation: Activation = "silu") -> None:
        both, functional = self._torch.from_numpy(x) @ self._matrix((gate, up)).T, self._torch.nn.functional
        gates = both[:, : gate.rows]
        active = functional.silu(gates) if activation == "silu" else functional.gelu(gates, approximate="tanh")
        self._torch.from_numpy(out).copy_(active * both[:, gate.rows :])

    def capture(self, forward: Callable[[], Array]) -> tuple[Graph, Array] | None:
        """torch's calls cannot be recorded."""
        return None

    def _matrix(self, weights: tuple[Weight, ...]) -> Any:
        """The stacked weights as an f32 tensor [sum N, K]."""
        if weights not in self._unpacked:
            host = np.empty((sum(w.rows for w in weights), weights[0].cols), np.float32)
            start = 0
            for weight in weights:
                self.embed(weight, np.arange(weight.rows, dtype=np.int32), host[start : start + weight.rows])
                start += weight.rows
            self._unpacked[weights] = self._torch.from_numpy(host)
        return self._unpacked[weights]
