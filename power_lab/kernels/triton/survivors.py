"""Which tokens of a row survive top-k, top-p and min-p: found without sorting, the same whatever the order of the work.

Survivors are a prefix of the tokens in order of (distance from the maximum upwards, id upwards). A token's `key` holds both: the bits
of the f32 distance (not negative, so they order like the number) above the id. One key, the `cut`, then tells all survivors.

A histogram over the distance's leading bits, of tokens for top-k or of their mass for top-p, names the bin in which the limit
falls; the keys that matter are collected, and one program per row bisects them. Tokens further away than a bound that is cheap to
have are only counted together: atomics are few. Masses are whole multiples of 2^-44, so sums are
exact and atomics in any order give the same bits: fewer than 2^19 tokens of mass at most 1 stay below 2^63.
"""

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.triton.elementary import exp

BINS = tl.constexpr(2048)
MANTISSA = tl.constexpr(6)  # 64 bins an octave, for distances from 2^-12 to 2^20
FIRST_BIN = tl.constexpr((127 - 12) << 6)
UNIT = tl.constexpr(2.0**44)  # mass of the most likely token
EVERYTHING = tl.constexpr((0x7F800000 << 32) | 0x7FFFFFFF)  # a cut above all keys: an infinite distance, no such id
MOST_TOKENS = 2**19 - 1
LISTED = 8192  # keys collected per row; where more matter, the row itself is read again, slowly
STEP = tl.constexpr(1024)


@triton.jit
def load(raw, z, penalised, token, inside):
    """A row's logits: raw, or as penalties left them."""
    if penalised:
        x = tl.load(z + token, mask=inside, other=-float("inf"))
    else:
        x = tl.load(raw + token, mask=inside, other=-float("inf"))
    return x


@triton.jit
def distance(x, top, temperature):
    """(top - x) / temperature as f32 >= 0, rounded as the CPU rounds (x - top) / temperature."""
    return 0.0 - tl.div_rn(x - top, temperature)


@triton.jit
def key(away, token):
    return (away.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token


@triton.jit
def min_p_cut(min_p):
    """Cut of probabilities below min_p times the largest."""
    away = 0.0 - tl.log(tl.where(min_p > 0, min_p, 1.0).to(tl.float64)).to(tl.float32)
    return tl.where(min_p > 0, key(away, 0x7FFFFFFF), EVERYTHING)


@triton.jit
def _bin(away):
    where = (away.to(tl.int32, bitcast=True) >> (23 - MANTISSA)) - FIRST_BIN
    return tl.minimum(tl.maximum(where, 0), BINS - 1)


@triton.jit
def _mass(away):
    return (exp(0.0 - away) * UNIT).to(tl.int64)


@triton.jit
def _share(total, p):
    """The least whole mass that is >= total * p, and at least 1, so that one token always survives."""
    product = total.to(tl.float64) * p.to(tl.float64)
    whole = product.to(tl.int64)
    return tl.maximum(whole + (whole.to(tl.float64) < product).to(tl.int64), 1)


@triton.jit
def far_by_count(peaks, count, k, top, temperature, PEAKS: tl.constexpr):
    """The distance of the k-th largest of `count` maxima of groups of tokens: at least k tokens are no further away."""
    index = tl.arange(0, PEAKS)
    peak = tl.load(peaks + index, mask=index < count, other=-float("inf"), cache_modifier=".cg")
    bits = distance(peak, top, temperature).to(tl.int32, bitcast=True)
    low, high = tl.full([], -1, tl.int32), tl.full([], 0x7F800000, tl.int32)
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        enough = tl.sum((bits <= middle).to(tl.int32)) >= k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high.to(tl.float32, bitcast=True)


@triton.jit
def far_by_mass(vocabulary, p):
    """A distance beyond which all tokens together have less than 1 - p of the mass; with room for rounding."""
    return tl.log(tl.div_rn(vocabulary.to(tl.float32), tl.maximum(1.0 - p, 2.0**-24))) + 1.0


@triton.jit
def add_to_histogram(away, inside, far, by_count, bins):
    """Add these tokens' counts or masses to a row's bins; what lies beyond `far`, whatever its bin, to the last one, summed first."""
    where = _bin(away)
    weight = tl.where(inside, tl.where(by_count, 1, _mass(away)), 0)
    near = (away <= far) & (where < BINS - 1)
    tl.atomic_add(bins + where, weight, mask=(weight > 0) & near, sem="relaxed")
    rest = tl.sum(tl.where(near, 0, weight))
    tl.atomic_add(bins + BINS - 1, rest, mask=rest > 0, sem="relaxed")


@triton.jit
def find_limit(bins, by_count, k, p, limit):
    """Store the bin in which the limit falls, the weight of the bins before it, and the weight that is wanted."""
    index = tl.arange(0, BINS)
    weight = tl.load(bins + index, cache_modifier=".cg")
    wanted = tl.where(by_count, k.to(tl.int64), _share(tl.sum(weight), p))
    at = tl.minimum(tl.sum((tl.cumsum(weight, 0) < wanted).to(tl.int64)), BINS - 1)
    tl.store(limit, at)
    tl.store(limit + 1, tl.sum(tl.where(index < at, weight, 0)))
    tl.store(limit + 2, wanted)


@triton.jit
def _matters(away, at, whole):
    """In the limit's bin; `whole`: or before it."""
    where = _bin(away)
    return (where == at) | (whole & (where < at))


@triton.jit
def collect(away, token, inside, at, whole, keys, filled, LISTED: tl.constexpr):
    """Append the keys that matter to a row's list, in any order; `filled` counts them even where the list is full."""
    chosen = (inside & _matters(away, at, whole)).to(tl.int32)
    count = tl.sum(chosen)
    if count > 0:
        slot = tl.atomic_add(filled, count, sem="relaxed") + tl.cumsum(chosen, 0) - chosen
        tl.store(keys + slot, key(away, token), mask=(chosen > 0) & (slot < LISTED))


@triton.jit
def _keys(index, count, listed, keys, raw, z, penalised, vocabulary, top, temperature, at, whole):
    """Some of the keys that matter: from the list, or from the row itself. EVERYTHING where there is none."""
    if listed:
        found = tl.load(keys + index, mask=index < count, other=EVERYTHING, cache_modifier=".cg")
    else:
        inside = index < vocabulary
        away = distance(load(raw, z, penalised, index, inside), top, temperature)
        found = tl.where(inside & _matters(away, at, whole), key(away, index), EVERYTHING)
    return found


@triton.jit
def _weight(found, by_count):
    away = (found >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(by_count, 1, _mass(away))


@triton.jit
def _limit_key(
    high, base, wanted, by_count, count, listed, keys, raw, z, penalised, vocabulary, top, temperature, at, whole
):
    """The least key, at most `high`, with base + the weight of all keys up to it >= wanted.

    Each look halves what is left, and shrinks it to keys that exist.
    """
    low = tl.full([], -1, tl.int64)
    while high - low > 1:
        middle = low + (high - low) // 2
        weight, below, above = base, low, high
        for first in range(0, tl.where(listed, count, vocabulary), STEP):
            index = first + tl.arange(0, STEP)
            found = _keys(index, count, listed, keys, raw, z, penalised, vocabulary, top, temperature, at, whole)
            under = found <= middle
            weight += tl.sum(tl.where(under, _weight(found, by_count), 0))
            below = tl.maximum(below, tl.max(tl.where(under, found, -1)))
            above = tl.minimum(above, tl.min(tl.where(under, EVERYTHING, found)))
        enough = weight >= wanted
        high = tl.where(enough, below, high)
        low = tl.where(enough, low, above - 1)
    return high


@triton.jit
def _mass_up_to(last, count, listed, keys, raw, z, penalised, vocabulary, top, temperature, at, whole):
    total = tl.full([], 0, tl.int64)
    for first in range(0, tl.where(listed, count, vocabulary), STEP):
        index = first + tl.arange(0, STEP)
        found = _keys(index, count, listed, keys, raw, z, penalised, vocabulary, top, temperature, at, whole)
        total += tl.sum(tl.where(found <= last, _weight(found, False), 0))
    return total


@triton.jit
def find_cut(by_count, p, limit, filled, keys, raw, z, penalised, vocabulary, top, temperature, LISTED: tl.constexpr):
    """The last survivor's key by top-k, then top-p over what it left."""
    at, base, wanted = tl.load(limit), tl.load(limit + 1), tl.load(limit + 2)
    count = tl.load(filled, cache_modifier=".cg")
    listed = count <= LISTED
    whole = by_count & (p < 1)
    base = tl.where(whole, 0, base)
    cut = tl.full([], EVERYTHING - 1, tl.int64)
    cut = _limit_key(
        cut, base, wanted, by_count, count, listed, keys, raw, z, penalised, vocabulary, top, temperature, at, whole
    )
    if whole:
        total = _mass_up_to(cut, count, listed, keys, raw, z, penalised, vocabulary, top, temperature, at, whole)
        zero = tl.full([], 0, tl.int64)
        cut = _limit_key(
            cut,
            zero,
            _share(total, p),
            False,
            count,
            listed,
            keys,
            raw,
            z,
            penalised,
            vocabulary,
            top,
            temperature,
            at,
            whole,
        )
    return cut
