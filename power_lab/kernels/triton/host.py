"""The way to the device and back, through page-locked memory.

Small arrays are carried by a kernel that reads or writes the host's memory itself: a copy by the copy engine between two steps takes
longer to begin than to run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

CARRIED = 1024  # words of one program
MOST = 1 << 20  # bytes that are carried by a kernel; more are left to the copy engine


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "to"])
def _carry(source, to, count, WORDS: tl.constexpr):
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(to + at, tl.load(source + at, mask=at < count, volatile=True), mask=at < count)


def carry(source: torch.Tensor, to: torch.Tensor, count: int) -> None:
    """The first `count` int32 values of one contiguous array into another; either may be page-locked memory of the host.

    It is outside of the chain of kernels: an event has to follow before anything else does.
    """
    if 4 * count > MOST:
        to.view(-1)[:count].copy_(source.view(-1)[:count], non_blocking=True)
    else:
        _carry[(triton.cdiv(count, CARRIED),)](source, to, count, CARRIED, num_warps=4)


def tensor_of(host: np.ndarray) -> torch.Tensor:
    """The array's own memory, to be copied from. torch knows no memory that is only read, as a mapped file's, and warns of it."""
    return torch.from_numpy(host if host.flags.writeable else np.asarray(_Unlocked(host)))


class _Unlocked:
    """An array whose memory is said to be writable; nobody writes to it."""

    def __init__(self, host: np.ndarray) -> None:
        self._host = host
        self.__array_interface__: dict[str, Any] = host.__array_interface__ | {"data": (host.ctypes.data, False)}


class Pinned:
    """Two pieces of page-locked memory in turn: one is written while the other's copy may still be on its way."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._raw = raw.view(torch.int32)
        self._hosts = [torch.zeros(self._raw.shape, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._memories = [host.numpy().view(np.uint8) for host in self._hosts]
        self._sent = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def open(self) -> np.ndarray:
        self._sent[self._turn].synchronize()
        return self._memories[self._turn]

    def send(self, nbytes: int) -> None:
        carry(self._hosts[self._turn], self._raw, -(-nbytes // 4))
        self._sent[self._turn].record()
        self._turn ^= 1


@dataclass(frozen=True, slots=True, eq=False)
class Arriving:
    """`Fetched` arrays, and the events between which their step ran. What was taken gives its memory to the next."""

    hosts: tuple[torch.Tensor, ...]
    began: torch.cuda.Event
    ended: torch.cuda.Event
    landed: deque[torch.Tensor]
    taken: list[np.ndarray] = field(default_factory=list)

    def get(self) -> tuple[np.ndarray, ...]:
        self.ended.synchronize()
        if not self.taken:
            self.taken.extend(host.numpy().copy() for host in self.hosts)
            self.landed.extend(self.hosts)
        return tuple(self.taken)

    @property
    def seconds(self) -> float:
        return self.began.elapsed_time(self.ended) / 1e3
