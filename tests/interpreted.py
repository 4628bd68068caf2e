"""`TritonOps` without a GPU: its kernels run in Triton's interpreter, on the CPU's memory. Slow, for tiny models and short runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor

from power_lab.kernels.ops import Array, Fetched, Graph, Staging, Weight
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import linear, recall, sample
from power_lab.kernels.triton.ops import TritonOps

LAUNCH = GridExecutor.__call__


class InterpretedOps(TritonOps):
    """What is allocated holds NaN, and whole numbers hold -1, so that what nobody wrote shows. A graph is the launches that it recorded, on
    the arrays that they were given.

    Attributes:
        steps: of each step, the names of the kernels that ran in it.
    """

    def __init__(self) -> None:
        self.compiles_for = 0
        self.steps: list[list[str]] = []
        self._recording: _Recorded | None = None
        self.device = torch.device("cpu")
        self._products: linear.Workspace | None = None
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._retired: list[torch.Tensor | sample.Scratch] = []
        self._sampling: dict[int, sample.Scratch] = {}
        self._recalling: dict[tuple[int, int], recall.Scratch] = {}

    def digest(self) -> str:
        return "interpreted"

    def reasons(self) -> tuple[str, ...]:
        return ("Triton's interpreter",)

    def close(self) -> None:
        """Memory is the machine's."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        kind = getattr(torch, dtype)
        return torch.full(
            shape, torch.nan if kind.is_floating_point else 255 if kind == torch.uint8 else -1, dtype=kind
        )

    def asarray(self, host: np.ndarray) -> Array:
        return torch.from_numpy(np.array(host))

    def weight(self, type: QuantType, rows: int, cols: int, host: np.ndarray, operand: str = "") -> Weight:
        return super().weight(type, rows, cols, np.array(host), operand)  # as going to a device copies it

    def staging(self, raw: Array) -> Staging:
        return _Sent(raw, np.zeros(raw.shape, np.uint8))

    def fetch(self, *arrays: Array) -> Fetched:
        return _Arrived(tuple(array.numpy().copy() for array in arrays))

    @contextmanager
    def step(self) -> Iterator[None]:
        self.steps.append([])
        with patch.object(GridExecutor, "__call__", lambda *args, **options: self._launch(*args, **options)):
            yield

    def _launch(self, executor: Any, *args: Any, **options: Any) -> None:
        launch = partial(LAUNCH, executor, *args, **options)
        if self._recording is not None:
            self._recording.launches.append((executor.fn.__name__, launch))
            return
        self.steps[-1].append(executor.fn.__name__)
        launch()

    def wait(self) -> None:
        """All that was called has run."""

    def free_bytes(self) -> int | None:
        return None

    def capture(self, forward: Callable[[], Array]) -> tuple[Graph, Array] | None:
        self._recording = graph = _Recorded()
        try:
            return graph, forward()
        finally:
            self._recording = None

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, _Recorded)
        for name, launch in graph.launches:
            self.steps[-1].append(name)
            launch()


@dataclass(frozen=True, slots=True)
class _Sent:
    raw: torch.Tensor
    memory: np.ndarray

    def open(self) -> np.ndarray:
        return self.memory

    def send(self, nbytes: int) -> None:
        self.raw[:nbytes] = torch.from_numpy(self.memory[:nbytes])


@dataclass(frozen=True, slots=True)
class _Arrived:
    hosts: tuple[np.ndarray, ...]
    seconds: float = 0.0

    def get(self) -> tuple[np.ndarray, ...]:
        return self.hosts


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    launches: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    nbytes: int = 0
