"""Runs, one or many at once: their seeds, the window in which they fly, and whether they came to their own end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from power_lab.errors import HostUnavailable, QueueFull, RequestCancelled, StepFailed

if TYPE_CHECKING:
    from power_lab.engine.host.remote import RemoteRun
    from power_lab.engine.trace import RunRecord
    from power_lab.run import Run


def derived_seed(seed: int, index: int) -> int:
    """The seed of run `index` of a `generate_many` call with `seed`: SHA-256, 63 bits, the same everywhere."""
    digest = hashlib.sha256(f"power-lab/many/{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def as_finished(
    submit: Callable[[int], RemoteRun], window: int, records: list[RunRecord | None]
) -> Iterator[tuple[int, RunRecord]]:
    """Run as many as `records` has places, each record into its own; they come, with their indices, as the runs end.

    `window` runs are in flight while so many are left, however long one of them takes. Whatever ends this early cancels the others and
    waits for them; what they have by then is kept in `records` too. Raises the error of a submission.
    """
    flying: dict[int, RemoteRun] = {}
    ended: SimpleQueue[int] = SimpleQueue()

    def fly(index: int) -> None:
        run = flying[index] = submit(index)
        run.when_over(partial(ended.put, index))

    begun = 0
    try:
        while begun < len(records) or flying:
            while begun < len(records) and len(flying) < window:
                fly(begun)
                begun += 1
            index = ended.get()
            try:
                record = records[index] = flying[index].result()
            except QueueFull:  # other clients fill the queue: this one comes back when there is room
                time.sleep(0.05)
                fly(index)
                continue
            del flying[index]
            yield index, record
    finally:
        with suppress(HostUnavailable):
            for run in flying.values():
                run.cancel()
        for index, run in flying.items():
            run.settle()
            records[index] = run.record


def sound(run: Run) -> Run:
    """The run, unless the engine or somebody else ended it before its time. Raises StepFailed, RequestCancelled."""
    if run.finish == "error":
        raise StepFailed(f"Run {run.record.id} failed: {run.record.finish_detail}", "`lab.last` has its output so far.")
    if run.finish == "cancelled":
        raise RequestCancelled(f"Run {run.record.id} was cancelled from outside.", "`lab.last` has its output so far.")
    return run
