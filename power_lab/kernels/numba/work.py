"""What a member of the team does: take chunks of the current job until there are none."""

from __future__ import annotations

from numba import carray, njit

from power_lab.kernels.numba import attention, conv, embed, linear, logprobs, moves, norm, rope, sample
from power_lab.kernels.numba import team as t
from power_lab.kernels.numba.vector import i64_pointer

linear_chunk, attention_chunk, norm_chunk, rope_chunk = linear.chunk, attention.chunk, norm.chunk, rope.chunk
embed_chunk, gather_chunk, softcap_chunk = embed.chunk, embed.gather_chunk, attention.softcap_chunk
sample_chunk, logprobs_chunk, conv_chunk = sample.chunk, logprobs.chunk, conv.chunk
tap_chunk, take_chunk, scatter_chunk = moves.tap_chunk, moves.take_chunk, moves.scatter_chunk
merge_chunk = embed.merge_chunk


def execute(team, index, member):
    """One chunk of the job in the block."""
    block = carray(i64_pointer(team), t.ASLEEP)
    job, scratch = block[t.JOB :], block[t.SCRATCH] + member * block[t.PITCH]
    if job[0] == t.LINEAR:
        linear_chunk(job, index, scratch)
    elif job[0] == t.ATTENTION:
        attention_chunk(job, index, scratch)
    elif job[0] == t.NORM:
        norm_chunk(job, index, scratch)
    elif job[0] == t.ROPE:
        rope_chunk(job, index, scratch)
    elif job[0] == t.EMBED:
        embed_chunk(job, index, scratch)
    elif job[0] == t.GATHER:
        gather_chunk(job, index, scratch)
    elif job[0] == t.SOFTCAP:
        softcap_chunk(job, index, scratch)
    elif job[0] == t.SAMPLE:
        sample_chunk(job, index, member)
    elif job[0] == t.LOGPROBS:
        logprobs_chunk(job, index, scratch)
    elif job[0] == t.TAP:
        tap_chunk(job, index, scratch)
    elif job[0] == t.TAKE:
        take_chunk(job, index, scratch)
    elif job[0] == t.SCATTER:
        scatter_chunk(job, index, scratch)
    elif job[0] == t.CONV:
        conv_chunk(job, index, scratch)
    else:
        merge_chunk(job, index, scratch)


@njit(nogil=True, inline="always")
def _take(team, member):
    """Run one chunk, if any is left."""
    seen = t.read(team, t.TICKET)
    if seen & 0xFFFFFFFF >= seen >> 32:
        return False
    ticket = t.increment(team, t.TICKET)
    if ticket & 0xFFFFFFFF >= ticket >> 32:
        return False
    t.execute(team, ticket & 0xFFFFFFFF, member)
    t.increment(team, t.DONE)
    return True


def participate(team, member):
    """Take chunks. The caller (member 0) returns when all chunks of its job are done, a worker when it has been idle for long."""
    idle = 0
    while True:
        if _take(team, member):
            idle = 0
            continue
        if member == 0 and t.read(team, t.DONE) == t.read(team, t.TICKET) >> 32:
            return
        sleepy = idle > t.SPINS and not t.read(team, t.BUSY)
        if member != 0 and (sleepy or t.read(team, t.STOP)):
            t.write(team, t.ASLEEP + t.WORDS * member, 1)
            return
        idle += 1
        t.pause()
        if idle > t.PATIENCE:
            t.yield_core()
