"""Log-probabilities of the raw logits."""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.program import Job, f32, i32
from power_lab.kernels.numba.team import LOGPROBS
from power_lab.kernels.numba.vector import F32, Builder, Span, Value, f32_pointer, i32_pointer


def _emit_log_sum_exp(b: Builder, logits: Value, count: Value) -> Value:
    """max + ln(sum exp(x - max)); NaN if any logit is NaN."""
    low = v.const(v.vec(F32), float("-inf"))
    best, total = v.variable(b, v.vec(F32), low), v.variable(b, v.vec(F32))

    def largest(span: Span) -> None:
        value, old = span.only(span.load(logits), low), b.load(best)
        b.store(b.select(b.fcmp_ordered(">", value, old), value, old), best)

    v.sweep(b, count, largest)
    top = v.tree_max(b, b.load(best))

    def add(span: Span) -> None:
        e = v.exp(b, b.fsub(span.load(logits), v.splat(b, top)))
        b.store(b.fadd(b.load(total), span.only(e, v.const(v.vec(F32), 0.0))), total)

    v.sweep(b, count, add)
    whole = v.tree_sums(b, [b.load(total)])[0]
    return b.select(
        b.fcmp_unordered("uno", whole, whole), whole, b.fadd(top, v.log(b, whole))
    )  # `log` takes NaN for a number


log_sum_exp = v.routine("log_sum_exp", types.float32, [types.int64] * 2, _emit_log_sum_exp)


@njit(nogil=True)
def _best(logits, ids, values):
    """The largest logits in order, the lowest id first among equals, by insertion."""
    top, filled = ids.shape[0], 0
    for t in range(logits.shape[0]):
        if filled == top and not logits[t] > values[top - 1]:
            continue
        at = filled if filled < top else top - 1
        while at > 0 and logits[t] > values[at - 1]:
            ids[at], values[at] = ids[at - 1], values[at - 1]
            at -= 1
        ids[at], values[at] = t, logits[t]
        filled = min(filled + 1, top)


@njit(nogil=True)
def chunk(job, row, scratch):
    """One row; `job` as made by `job`."""
    all_logits, vocabulary, tokens, chosen, all_ids, all_values, top = job[1:8]
    at = all_logits + row * vocabulary * 4
    logits = carray(f32_pointer(at), vocabulary)
    norm = log_sum_exp(at, vocabulary)
    token = carray(i32_pointer(tokens), row + 1)[row]
    carray(f32_pointer(chosen), row + 1)[row] = logits[token] - norm if 0 <= token < vocabulary else np.float32(np.nan)
    if top > 0:
        ids, values = (
            carray(i32_pointer(all_ids + row * top * 4), top),
            carray(f32_pointer(all_values + row * top * 4), top),
        )
        _best(logits, ids, values)
        for i in range(top):
            values[i] = values[i] - norm


def job(logits: np.ndarray, tokens: np.ndarray, chosen: np.ndarray, ids: np.ndarray, values: np.ndarray) -> Job:
    """logits f32 [Q, V], tokens int32 [Q]; writes chosen f32 [Q], ids int32 [Q, top], values f32 [Q, top] with top <= V.

    A token that is not in 0..V-1 gets NaN; so does everything in a row that holds NaN.
    """
    rows, vocabulary = logits.shape
    return rows, LOGPROBS, f32(logits), vocabulary, i32(tokens), f32(chosen), i32(ids), f32(values), ids.shape[1]
