"""Steps as CUDA graphs: thousands of small launches become one. Elsewhere, and where recording fails, the same step runs as it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

Step = Callable[[dict[str, Tensor]], None]
"""Reads its inputs, and changes tensors that outlive it; without host decisions about device values."""


class Graphs:
    """A step, recorded once for each shape of its inputs.

    A shape's first step runs as it is: kernels are loaded, optimisers make their state. The second is recorded and replayed.

    Args:
        device: on a GPU every step runs on a stream of its own, on which it can be recorded.

    Attributes:
        enabled: whether steps are recorded and replayed.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.device, self.enabled = device, cuda
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._pool = torch.cuda.graph_pool_handle() if cuda else None
        self._met: set[Hashable] = set()
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]] = {}

    @property
    def recorded(self) -> int:
        """Shapes whose step is recorded."""
        return len(self._recorded)

    def run(self, step: Step, inputs: dict[str, np.ndarray], *, key: Hashable = None) -> None:
        """One step. key: whatever else than the inputs' shapes decides what the step does."""
        if self._stream is None:
            step({name: torch.from_numpy(values) for name, values in inputs.items()})
            return
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            self._run(step, inputs, (key, *(values.shape for values in inputs.values())))
        caller.wait_stream(self._stream)

    def _run(self, step: Step, inputs: dict[str, np.ndarray], shape: Hashable) -> None:
        if self.enabled and shape in self._met and shape not in self._recorded:
            self._record(step, inputs, shape)
        if self.enabled and shape in self._recorded:
            graph, held = self._recorded[shape]
            for name, values in inputs.items():
                held[name].copy_(torch.from_numpy(values))
            graph.replay()
        else:
            self._met.add(shape)
            step({name: torch.from_numpy(values).to(self.device) for name, values in inputs.items()})

    def _record(self, step: Step, inputs: dict[str, np.ndarray], shape: Hashable) -> None:
        held = {name: torch.from_numpy(values).to(self.device) for name, values in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                step(held)
        except RuntimeError as error:
            self.enabled = False
            torch.cuda.synchronize(self.device)
            tqdm.write(f"steps are not recorded, and slower: {error}")
        else:
            self._recorded[shape] = graph, held
