"""Sampling one token per row of logits.

The chain: repetition and presence penalties, bias, temperature, top-k, top-p over what top-k left, min-p, then Gumbel-max:
the survivor with the largest ((logit - maximum) / temperature + Gumbel noise) is an exact draw from their softmax. The noise
is keyed by (seed, position, token); the maximum goes first so that noise of order 1 is not lost beside huge quotients.

Survivors are a prefix of the tokens sorted by (value downwards, id upwards), so they are told by one `cut`: the value and the
id of the last one. It is found by a histogram over the distance from the maximum; only the bin in which a limit falls is
sorted.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types

from power_lab.kernels.numba import noise
from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.team import SAMPLE, share
from power_lab.kernels.numba.vector import (
    F32,
    I32,
    I64,
    Builder,
    Span,
    Value,
    address,
    f32_pointer,
    f64_pointer,
    i32_pointer,
    i64_pointer,
)

BINS = 2048
PER_UNIT = 64  # bins per unit of logit
BAD = -1  # a token id that says: these logits cannot be sampled
INFINITY = float("inf")


class _Best:
    """Running argmax in registers: the lowest id wins ties; a NaN anywhere, or a maximum that is not finite, gives BAD."""

    def __init__(self, b: Builder) -> None:
        self.b = b
        self.value = v.variable(b, v.vec(F32), v.const(v.vec(F32), -INFINITY))
        self.id = v.variable(b, v.vec(I32), v.const(v.vec(I32), BAD))
        self.nan = v.variable(b, v.vec(I32))

    def see(self, value: Value, ids: Value, raw: Value) -> None:
        """Take 16 candidates in; `raw` is checked for NaN."""
        b = self.b
        better = b.fcmp_ordered(">", value, b.load(self.value))
        b.store(b.select(better, value, b.load(self.value)), self.value)
        b.store(b.select(better, ids, b.load(self.id)), self.id)
        b.store(b.or_(b.load(self.nan), b.sext(b.fcmp_unordered("uno", raw, raw), v.vec(I32))), self.nan)

    def result(self) -> Value:
        b = self.b
        value, ids, nan = b.load(self.value), b.load(self.id), b.load(self.nan)
        for half in (8, 4, 2, 1):
            turn = [(i + half) % v.LANES for i in range(v.LANES)]
            v2, i2 = v.shuffle(b, value, value, turn), v.shuffle(b, ids, ids, turn)
            tie = b.and_(b.fcmp_ordered("==", v2, value), b.icmp_unsigned("<", i2, ids))
            take = b.or_(b.fcmp_ordered(">", v2, value), tie)
            value, ids = b.select(take, v2, value), b.select(take, i2, ids)
            nan = b.or_(nan, v.shuffle(b, nan, nan, turn))
        clean = b.icmp_signed("==", v.lane(b, nan, 0), v.const(I32, 0))
        ok = b.and_(clean, b.fcmp_ordered("<", v.lane(b, value, 0), v.const(F32, INFINITY)))
        return b.sext(b.select(ok, v.lane(b, ids, 0), v.const(I32, BAD)), I64)


def _ids(b: Builder, first: Value) -> Value:
    return b.add(v.splat(b, b.trunc(first, I32)), _lane_numbers())


def _lane_numbers() -> Value:
    return v.ir.Constant(v.vec(I32), list(range(v.LANES)))


def _emit_argmax(b: Builder, logits: Value, count: Value) -> Value:
    best = _Best(b)

    def body(span: Span) -> None:
        value = span.load(logits)
        best.see(span.only(value, v.const(v.vec(F32), -INFINITY)), _ids(b, span.index), value)

    v.sweep(b, count, body)
    return best.result()


def _emit_draw(
    b: Builder,
    logits: Value,
    count: Value,
    top: Value,
    temperature: Value,
    cut: Value,
    last: Value,
    seed: Value,
    position: Value,
) -> Value:
    """Gumbel-max over tokens whose (logit - top) / temperature is above `cut`, or equal to it with an id of at most `last`."""
    best = _Best(b)
    maximum = v.splat(b, top)
    divisor, edge, last_id = v.splat(b, temperature), v.splat(b, cut), v.splat(b, b.trunc(last, I32))
    low = v.const(v.vec(F32), -INFINITY)
    groups = b.udiv(b.add(count, v.i64(noise.GROUP - 1)), v.i64(noise.GROUP))
    with v.loop(b, groups) as g:
        for w, word in enumerate(noise.group_words(b, g, seed, position)):
            first = b.add(b.mul(g, v.i64(noise.GROUP)), v.i64(w * v.LANES))
            span = Span(b, first, v.first_lanes(b, b.sub(count, first)))
            raw, ids = span.load(logits), _ids(b, first)
            scaled = b.fdiv(b.fsub(raw, maximum), divisor)
            tie = b.and_(b.fcmp_ordered("==", scaled, edge), b.icmp_signed("<=", ids, last_id))
            alive = b.and_(span.mask, b.or_(b.fcmp_ordered(">", scaled, edge), tie))
            best.see(b.select(alive, b.fadd(scaled, noise.gumbel(b, word)), low), ids, raw)
    return best.result()


def _emit_scale(b: Builder, logits: Value, count: Value, top: Value, temperature: Value, out: Value) -> None:
    maximum, divisor = v.splat(b, top), v.splat(b, temperature)
    v.sweep(b, count, lambda span: span.store(b.fdiv(b.fsub(span.load(logits), maximum), divisor), out))


argmax = v.routine("argmax", types.int64, [types.int64] * 2, _emit_argmax)
draw = v.routine("draw", types.int64, [types.int64] * 2 + [types.float32] * 3 + [types.int64] * 3, _emit_draw)
exp = v.routine("exp", types.float32, [types.float32], v.exp)
scale = v.routine("scale", types.void, [types.int64] * 2 + [types.float32] * 2 + [types.int64], _emit_scale)


@njit(nogil=True, error_model="numpy", inline="always")
def _penalise(logits, z, history, spans, repetition, presence, bias_ids, bias_values):
    """z = logits with penalties and bias. Every penalty starts from the raw logit, so a token seen twice is penalised once."""
    for t in range(logits.shape[0]):
        z[t] = logits[t]
    start, generated, end, bias_start, bias_end = spans
    for i in range(start, end):
        raw = logits[history[i]]
        z[history[i]] = raw / repetition if raw > 0 else raw * repetition
    for i in range(generated, end):
        raw = logits[history[i]]
        z[history[i]] = (raw / repetition if raw > 0 else raw * repetition) - presence
    for i in range(bias_start, bias_end):
        z[bias_ids[i]] += bias_values[i]


@njit(nogil=True, error_model="numpy", inline="always")
def _worse(values, a, c):
    """Whether token a sorts behind token c."""
    return values[a] < values[c] or (values[a] == values[c] and a > c)


@njit(nogil=True, error_model="numpy", inline="always")
def _sort(ids, count, values):
    """Heap sort of ids[:count] by (value downwards, id upwards), in place."""
    for step in range(count // 2 + count - 1):
        if step < count // 2:
            root, end = count // 2 - 1 - step, count
        else:
            end = count - 1 - (step - count // 2)
            ids[0], ids[end] = ids[end], ids[0]
            root = 0
        while 2 * root + 1 < end:
            child = 2 * root + 1
            if child + 1 < end and _worse(values, ids[child + 1], ids[child]):
                child += 1
            if not _worse(values, ids[child], ids[root]):
                break
            ids[root], ids[child] = ids[child], ids[root]
            root = child


@njit(nogil=True, error_model="numpy", inline="always")
def _bin(distance):
    """Bin of a distance from the maximum; the last one takes the rest, -inf included."""
    return int(distance * PER_UNIT) if distance < np.float32((BINS - 1) / PER_UNIT) else BINS - 1


@njit(nogil=True, error_model="numpy")
def _members(y, top, wanted, ids):
    """Sorted tokens of one bin."""
    count = 0
    for t in range(y.shape[0]):
        if _bin(top - y[t]) == wanted:
            ids[count] = t
            count += 1
    _sort(ids, count, y)
    return count


@njit(nogil=True, error_model="numpy")
def _top_k(y, top, counts, masses, k, ids):
    """(value, id) of the k-th token, and the mass of the first k."""
    seen, mass, where = 0, 0.0, 0
    while seen + counts[where] < k:
        seen += counts[where]
        mass += masses[where]
        where += 1
    _members(y, top, where, ids)
    for i in range(k - seen):
        mass += exp(y[ids[i]] - top)
    return y[ids[k - seen - 1]], ids[k - seen - 1], mass


@njit(nogil=True, error_model="numpy")
def _top_p(y, top, counts, masses, wanted, ids):
    """(value, id) of the first token at which the mass reaches `wanted`; the last token where rounding lets none reach it."""
    mass, where = 0.0, 0
    while where < BINS - 1 and mass + masses[where] < wanted:
        mass += masses[where]
        where += 1
    while counts[where] == 0:
        where -= 1
    count = _members(y, top, where, ids)
    for i in range(count):
        mass += exp(y[ids[i]] - top)
        if mass >= wanted:
            return y[ids[i]], ids[i]
    return y[ids[count - 1]], ids[count - 1]


@njit(nogil=True, error_model="numpy", inline="always")
def _cut(y, top, k, p, min_p, ids, counts, masses):
    """The last survivor of top-k, top-p and min-p as (value, id). y f32 [V] is (logit - maximum) / temperature."""
    value, last = np.float32(-INFINITY), y.shape[0]
    if k > 0 or p < 1:
        for i in range(BINS):
            counts[i], masses[i] = 0, 0.0
        for t in range(y.shape[0]):
            where = _bin(top - y[t])
            counts[where] += 1
            masses[where] += exp(y[t] - top)
        total = 0.0
        for i in range(BINS):
            total += masses[i]
        if 0 < k < y.shape[0]:
            value, last, total = _top_k(y, top, counts, masses, k, ids)
        if p < 1:
            at, token = _top_p(y, top, counts, masses, total * p, ids)
            if at > value or (at == value and token < last):
                value, last = at, token
    if min_p > 0:
        at = np.float32(top + np.log(np.float64(min_p)))
        if at > value:
            value, last = at, y.shape[0]
    return value, last


@njit(nogil=True, error_model="numpy", inline="always")
def _draw_row(logits, temperature, k, p, min_p, seed, position, y, ids, counts, masses):
    vocabulary = logits.shape[0]
    best = argmax(address(logits), vocabulary)
    if best == BAD or temperature == 0:
        return best
    value, last = np.float32(-INFINITY), vocabulary
    if k > 0 or p < 1 or min_p > 0:
        scale(address(logits), vocabulary, logits[best], temperature, address(y))
        value, last = _cut(y, y[best], k, p, min_p, ids, counts, masses)
    return draw(address(logits), vocabulary, logits[best], temperature, value, last, seed, position)


@njit(nogil=True, error_model="numpy")
def chunk(job, row, member):
    """One row; `job` int64 words as written by `sample`. Each member of the team has scratch of its own."""
    all_logits, vocabulary, all_controls, all_keys, all_spans, history, bias_ids, bias_values, tokens = job[1:10]
    all_z, all_ids, all_counts, all_masses = job[10:14]
    logits = carray(f32_pointer(all_logits + row * vocabulary * 4), vocabulary)
    temperature, k, p, min_p, repetition, presence = carray(f32_pointer(all_controls + row * 6 * 4), 6)
    seed, position = carray(i64_pointer(all_keys + row * 2 * 8), 2)
    spans = carray(i64_pointer(all_spans + row * 5 * 8), 5)
    z = carray(f32_pointer(all_z + member * 2 * vocabulary * 4), (2, vocabulary))
    source = logits
    if repetition != 1 or presence != 0 or spans[3] != spans[4]:
        source = z[0]
        past = carray(i32_pointer(history), spans[2])
        ids, values = carray(i32_pointer(bias_ids), spans[4]), carray(f32_pointer(bias_values), spans[4])
        _penalise(logits, source, past, spans, repetition, presence, ids, values)
    sorted_ids = carray(i32_pointer(all_ids + member * vocabulary * 4), vocabulary)
    counts = carray(i64_pointer(all_counts + member * BINS * 8), BINS)
    masses = carray(f64_pointer(all_masses + member * BINS * 8), BINS)
    token = _draw_row(source, temperature, int(k), p, min_p, seed, position, z[1], sorted_ids, counts, masses)
    carray(i32_pointer(tokens), row + 1)[row] = token


@njit(nogil=True, error_model="numpy")
def sample(team, logits, controls, keys, history, spans, bias_ids, bias_values, tokens, z, ids, counts, masses):
    """Arguments:
    logits f32 [Q, V], tokens int32 [Q];
    controls f32 [Q, 6]: temperature, top-k, top-p, min-p, repetition, presence;
    keys int64 [Q, 2]: seed, position; spans int64 [Q, 5]: of history, then of biases;
    scratch of each member: z f32 [2, V], ids int32 [V], counts int64 [BINS], masses f64 [BINS].
    """
    rows = (address(logits), logits.shape[1], address(controls), address(keys), address(spans))
    lists = (address(history), address(bias_ids), address(bias_values), address(tokens))
    scratch = (address(z), address(ids), address(counts), address(masses))
    share(team, (SAMPLE, *rows, *lists, *scratch), logits.shape[0])
