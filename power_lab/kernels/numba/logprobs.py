"""Log-probabilities of the raw logits."""

from __future__ import annotations

from numba import njit, prange, types

from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.vector import F32, Builder, Span, Value, address


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
    return b.fadd(top, v.log(b, v.tree_sums(b, [b.load(total)])[0]))


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


@njit(parallel=True, nogil=True)
def logprobs(logits, tokens, chosen, ids, values, parts):
    """logits f32 [Q, V], tokens int32 [Q]; writes chosen f32 [Q], ids int32 [Q, top], values f32 [Q, top] with top <= V."""
    for part in prange(parts):
        for row in range(part, logits.shape[0], parts):
            norm = log_sum_exp(address(logits) + row * logits.shape[1] * 4, logits.shape[1])
            chosen[row] = logits[row, tokens[row]] - norm
            if ids.shape[1] > 0:
                _best(logits[row], ids[row], values[row])
            for i in range(ids.shape[1]):
                values[row, i] = values[row, i] - norm
