"""A team of threads that shares the chunks of one kernel call at a time.

Why not Numba's own `prange`: a parallel region ends at a barrier that every thread must reach, so on a busy machine each
of the hundreds of regions of a token waits until the system has scheduled every thread again (measured on two cores: 5 ms
a token when they are quiet, over 100 ms beside busy neighbours). Here the caller takes chunks too and waits only for chunks
that others have begun; a thread that is not running costs nothing. Idle workers spin briefly, so that they are there for
the next kernel of the step, then sleep. OpenMP and TBB are not needed, and a fork finds no broken pool.

Protocol: the caller writes the job, then the ticket (chunks << 32). Whoever adds 1 to the ticket owns the chunk whose
number it read, if that is below the count; the job cannot change before that chunk is counted as done.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import njit, types

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.vector import I64, Builder, Value, address

# Words of the team's control block; those that threads write lie on cache lines of their own.
TICKET, DONE, STOP, WORK, SCRATCH, PITCH, THREADS, EXECUTE, JOB, BUSY, ASLEEP = 0, 8, 16, 24, 25, 26, 27, 28, 32, 64, 72
JOB_WORDS = BUSY - JOB
LINEAR, ATTENTION, NORM, ROPE, EMBED, GATHER, SOFTCAP, SAMPLE, LOGPROBS, TAP, TAKE, SCATTER, CONV, MERGE = range(14)
"""The first word of a job."""
WORDS = 8  # of a cache line
SPINS = 4000  # of an idle worker, about 0.1 ms, before it sleeps
PATIENCE = 2000  # spins of the caller before it lets the system run someone else


def _word(b: Builder, team: Value, index: Value | int) -> Value:
    offset = v.i64(index * 8) if isinstance(index, int) else b.mul(index, v.i64(8))
    return b.bitcast(v.at(b, team, offset), I64.as_pointer())


def _emit_read(b: Builder, team: Value, index: Value) -> Value:
    return b.load_atomic(_word(b, team, index), "seq_cst", 8, typ=I64)


def _emit_write(b: Builder, team: Value, index: Value, value: Value) -> None:
    b.store_atomic(value, _word(b, team, index), "seq_cst", 8)


def _emit_increment(b: Builder, team: Value, index: Value) -> Value:
    return b.atomic_rmw("add", _word(b, team, index), v.i64(1), "seq_cst")


def _emit_pause(b: Builder) -> None:
    """Tell the processor that this is a spin loop, where it has a word for it."""
    if b.module.triple.startswith("x86"):
        v.call(b, "llvm.x86.sse2.pause", ir.VoidType(), ())


def _emit_yield(b: Builder) -> None:
    v.call(b, "sched_yield", ir.IntType(32), ())


def _emit_work(b: Builder, team: Value, member: Value) -> None:
    """Call the compiled `work.participate`, whose address the block holds."""
    v.call_at(b, b.load(_word(b, team, WORK), typ=I64), team, member)


def _emit_execute(b: Builder, team: Value, index: Value, member: Value) -> None:
    """Call the compiled `work.execute`, whose address the block holds."""
    v.call_at(b, b.load(_word(b, team, EXECUTE), typ=I64), team, index, member)


i64 = types.int64
read = v.routine("team_read", i64, [i64, i64], _emit_read)
write = v.routine("team_write", types.void, [i64, i64, i64], _emit_write)
increment = v.routine("team_increment", i64, [i64, i64], _emit_increment)
pause = v.routine("team_pause", types.void, [], _emit_pause)
yield_core = v.routine("team_yield", types.void, [], _emit_yield)
work = v.routine("team_work", types.void, [i64, i64], _emit_work)
execute = v.routine("team_execute", types.void, [i64, i64, i64], _emit_execute)


@njit(nogil=True, inline="always")
def _share(at, chunks):
    write(at, DONE, 0)
    write(at, TICKET, chunks << 32)
    work(at, 0)


@njit(nogil=True)
def run(team, program, jobs):
    """Run the first `jobs` of a program, int64 [.., 1 + JOB_WORDS], one after another.

    Jobs of one chunk are not worth sharing. Workers stay awake between jobs, since nobody could wake them from in here.
    """
    at = address(team)
    write(at, BUSY, 1)
    for j in range(jobs):
        for i in range(JOB_WORDS):
            team[JOB + i] = program[j, 1 + i]
        if program[j, 0] == 1:
            execute(at, 0, 0)
        else:
            _share(at, program[j, 0])
    write(at, BUSY, 0)


@njit(nogil=True)
def share(team, job, chunks):
    """Run `job`, a tuple of int64 words, cut into `chunks`, with whoever is there; return when all are done.

    `team` is the int64 control block. Most words are addresses: the caller keeps their arrays alive.
    """
    for i in range(len(job)):
        team[JOB + i] = job[i]
    _share(address(team), chunks)


class Team:
    """The control block and its worker threads.

    Args:
        threads: members, the caller included.
    """

    def __init__(self, threads: int) -> None:
        self.block = np.zeros(ASLEEP + WORDS * (threads + 1), np.int64)
        self.block[THREADS] = threads
        self._beds = [threading.Lock() for _ in range(threads - 1)]
        self._asleep = [self.block[ASLEEP + WORDS * member :] for member in range(1, threads)]
        self._finalizer: Callable[[], object] | None = None

    def start(self, participate: Callable[[int, int], None], work: int, execute: int) -> None:
        """Hand the compiled loop, f(block address, member), to the workers, and its and the dispatcher's addresses to all."""
        self.block[WORK], self.block[EXECUTE] = work, execute
        for i, bed in enumerate(self._beds):
            bed.acquire()
            args = (self.block, i + 1, bed, participate)
            threading.Thread(target=_work, args=args, name=f"power-lab-kernel-{i + 1}", daemon=True).start()
        self._finalizer = weakref.finalize(self, _stop, self.block, self._beds, self._asleep)

    def wake(self) -> None:
        """Wake whoever sleeps; cheap when nobody does. Called before a job is shared."""
        for bed, asleep in zip(self._beds, self._asleep, strict=True):
            if asleep[0]:
                asleep[0] = 0
                bed.release()

    def close(self) -> None:
        """End the workers. The team then has one member."""
        if self._finalizer is not None:
            self._finalizer()
        self._beds, self._asleep = [], []


def _work(block: np.ndarray, member: int, bed: threading.Lock, participate: Callable[[int, int], None]) -> None:
    at = block.__array_interface__["data"][0]
    while not block[STOP]:
        participate(at, member)  # returns when idle for long, having marked this worker asleep
        if not block[STOP]:
            bed.acquire()


def _stop(block: np.ndarray, beds: list[threading.Lock], asleep: list[np.ndarray]) -> None:
    block[STOP] = 1
    for bed, mark in zip(beds, asleep, strict=True):
        if mark[0]:
            mark[0] = 0
            bed.release()
