"""A device that runs behind its host, on the CPU: operations wait in a queue until somebody waits for a result.

What a GPU does in its own time happens here as late as it may: copies from staging memory read what is there when they run, a graph runs on
what its arrays hold then. An engine that reads, overwrites or frees too early says something else than on `NumbaOps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from power_lab.kernels.ops import Array, Graph, Ops

Job = Callable[[], Any]
RECORDED = (
    "embed", "rms_norm", "add_rms_norm", "linear", "gate_up", "rope_write", "attention", "softcap", "gather_rms_norm", "tap", "take",
    "merge", "scatter_columns", "dynamic_conv",
)  # fmt: skip
"""Operations that are jobs of a recorded program."""
QUEUED = (*RECORDED, "sample", "mark", "resume", "note", "recall")


@dataclass(frozen=True, eq=False)
class Recorded:
    jobs: list[Job]
    nbytes: int = 1000


class Lagged:
    """The operations of `ops`, late. Everything else is its own."""

    asynchronous = True
    row_buckets = (1, 2, 4, 8, 12, 24, 48, 64, 128, 192, 256)

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._queue: list[Job] = []

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._ops, name)
        if name not in QUEUED:
            return target
        return lambda *args, **options: self._queue.append(partial(target, *args, **options))

    def wait(self) -> None:
        while self._queue:
            self._queue.pop(0)()

    def asarray(self, host: np.ndarray) -> Array:
        return self._ops.asarray(host.copy())

    def tohost(self, array: Array) -> np.ndarray:
        self.wait()
        return self._ops.tohost(array).copy()

    def staging(self, raw: Array) -> Staging:
        return Staging(self, raw)

    def fetch(self, *arrays: Array) -> Fetched:
        hosts = tuple(np.empty_like(array) for array in arrays)
        for host, array in zip(hosts, arrays, strict=True):
            self._queue.append(partial(np.copyto, host, array))
        return Fetched(self, hosts)

    def logprobs(self, logits: Array, tokens: Array, top: int) -> tuple[Array, Array, Array]:
        count, top = logits.shape[0], min(top, logits.shape[1])
        results = np.empty(count, np.float32), np.empty((count, top), np.int32), np.empty((count, top), np.float32)

        def job() -> None:
            for result, value in zip(results, self._ops.logprobs(logits, tokens, top), strict=True):
                result[...] = value

        self._queue.append(job)
        return results

    def capture(self, forward: Callable[[], Array]) -> tuple[Graph, Array]:
        waiting, self._queue = self._queue, []
        try:
            result = forward()
            return Recorded(self._joined(self._queue)), result
        finally:
            self._queue = waiting

    def _joined(self, jobs: list[Job]) -> list[Job]:
        """Neighbours that `ops` can record as one job, as a graph of its own has them: Python walks them once, not at each replay."""
        joined: list[Job] = []
        for recorded, group in groupby(jobs, lambda job: isinstance(job, partial) and job.func.__name__ in RECORDED):
            if recorded:
                captured = self._ops.capture(lambda group=group: [job() for job in group])
                assert captured is not None
                joined.append(partial(self._ops.replay, captured[0]))
            else:
                joined += group
        return joined

    def replay(self, graph: Recorded) -> None:
        self._queue += graph.jobs


class Staging:
    def __init__(self, ops: Lagged, raw: Array) -> None:
        self._ops, self._raw = ops, raw
        self._hosts = [np.full_like(raw, 0xFF) for _ in range(2)]
        self._on_way: list[Job | None] = [None, None]
        self._turn = 0

    def open(self) -> np.ndarray:
        if self._on_way[self._turn] in self._ops._queue:
            self._ops.wait()
        return self._hosts[self._turn]

    def send(self, nbytes: int) -> None:
        host = self._hosts[self._turn]
        job = self._on_way[self._turn] = partial(np.copyto, self._raw[:nbytes], host[:nbytes])
        self._ops._queue.append(job)
        self._turn ^= 1


@dataclass(frozen=True, eq=False)
class Fetched:
    ops: Lagged
    hosts: tuple[np.ndarray, ...]
    seconds: float = 0.0

    def get(self) -> tuple[np.ndarray, ...]:
        self.ops.wait()
        return self.hosts
