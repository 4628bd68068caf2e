"""Many runs at once: their seeds, and the window in which they fly."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from power_lab.errors import HostUnavailable, QueueFull

if TYPE_CHECKING:
    from power_lab.engine.host.remote import RemoteRun
    from power_lab.engine.trace import RunRecord


def derived_seed(seed: int, index: int) -> int:
    """The seed of run `index` of a `generate_many` call with `seed`: SHA-256, 63 bits, the same everywhere."""
    digest = hashlib.sha256(f"power-lab/many/{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def in_order(count: int, submit: Callable[[int], RemoteRun], window: int) -> Iterator[RunRecord]:
    """Records of runs 0..count-1, at most `window` in flight. Whatever ends this early cancels and awaits the rest."""
    flying: deque[tuple[int, RemoteRun]] = deque()
    begun = 0
    try:
        while begun < count or flying:
            while begun < count and len(flying) < window:
                flying.append((begun, submit(begun)))
                begun += 1
            index, run = flying[0]
            try:
                record = run.result()
            except QueueFull:  # other clients fill the queue: this one comes back when there is room
                time.sleep(0.05)
                flying[0] = index, submit(index)
                continue
            flying.popleft()
            yield record
    finally:
        with suppress(HostUnavailable):
            for _, run in flying:
                run.cancel()
        for _, run in flying:
            run.settle()
