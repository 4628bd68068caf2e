"""Which tokens of a row survive top-k, top-p and min-p: found without sorting, the same whatever the order of the work.

Survivors are a prefix of the tokens in order of (distance from the maximum upwards, id upwards). A token's `key` holds both: the bits
of the f32 distance (not negative, so they order like the number) above the id. One key, the `cut`, then tells all survivors.

Three passes find the cut. Of a row with top-p, the mass up to each of a few distances is summed first: it brackets the limit. A
histogram of what lies in the bracket names the bin in which the limit falls; of a row with top-k, it counts tokens up to a distance that
is cheap to have. The keys of that bin are collected, and one program per row bisects them. So atomics are few, and spread. Masses are
whole multiples of 2^-44: sums are exact, and atomics in any order give the same bits: fewer than 2^19 tokens of mass at most 1 stay
below 2^63.
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
CELLS = tl.constexpr(16)  # distances up to which mass is summed, evenly spaced
MOST_TOKENS = 2**19 - 1
LISTED = 8192  # keys collected per row; where more matter, the row itself is read again, slowly
STEP = tl.constexpr(512)


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
def _bin(away, by_count, low, far):
    """By count, bins are evenly spaced in the logarithm of the distance; by mass, between `low` and `far`."""
    octaves = (away.to(tl.int32, bitcast=True) >> (23 - MANTISSA)) - FIRST_BIN
    origin = tl.maximum(low, 0.0)
    scale = tl.div_rn(BINS * 1.0, tl.where((far > origin) & (far < float("inf")), far - origin, 1.0))
    even = tl.minimum(tl.maximum((away - origin) * scale, 0.0), BINS - 1.0).to(tl.int32)
    return tl.minimum(tl.maximum(tl.where(by_count, octaves, even), 0), BINS - 1)


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
def _edge(far, cell):
    return far * ((cell + 1) * (1.0 / CELLS))


@triton.jit
def add_to_cells(away, inside, far, cells):
    """Add the mass of these tokens up to each edge, and their whole mass, to a row's `CELLS` + 1 sums."""
    mass = tl.where(inside, _mass(away), 0)
    for cell in tl.static_range(CELLS):
        tl.atomic_add(cells + cell, tl.sum(tl.where(away <= _edge(far, cell), mass, 0)), sem="relaxed")
    tl.atomic_add(cells + CELLS, tl.sum(mass), sem="relaxed")


@triton.jit
def find_bracket(cells, p, low, far, limit):
    """Narrow (low, far] to the cell in which the limit falls; store the mass before it, and the mass that is wanted.

    The mass up to the last edge, `far_by_mass`, suffices.
    """
    cell = tl.arange(0, CELLS)
    sums, furthest = tl.load(cells + cell, cache_modifier=".cg"), tl.load(far)
    wanted = _share(tl.load(cells + CELLS, cache_modifier=".cg"), p)
    at = tl.minimum(tl.sum((sums < wanted).to(tl.int32)), CELLS - 1)
    tl.store(low, tl.where(at > 0, _edge(furthest, at - 1), -1.0))
    tl.store(far, _edge(furthest, at))
    tl.store(limit + 1, tl.sum(tl.where(cell == at - 1, sums, 0)))
    tl.store(limit + 2, wanted)


@triton.jit
def add_to_histogram(away, inside, low, far, by_count, bins):
    """Add to a row's bins these tokens' masses, in (low, far]; or their counts, those beyond `far` all in the last bin, summed first."""
    where = _bin(away, by_count, low, far)
    near = inside & (away > low) & (away <= far) & ((not by_count) | (where < BINS - 1))
    weight = tl.where(near, tl.where(by_count, 1, _mass(away)), 0)
    tl.atomic_add(bins + where, weight, mask=weight > 0, sem="relaxed")
    if by_count:
        rest = tl.sum((inside & (not near)).to(tl.int64))
        tl.atomic_add(bins + BINS - 1, rest, mask=rest > 0, sem="relaxed")


@triton.jit
def find_limit(bins, by_count, k, limit):
    """Store the bin in which the limit falls, the weight of all before it, and the weight that is wanted."""
    index = tl.arange(0, BINS)
    weight = tl.load(bins + index, cache_modifier=".cg")
    base = tl.where(by_count, 0, tl.load(limit + 1))
    wanted = tl.where(by_count, k.to(tl.int64), tl.load(limit + 2))
    at = tl.minimum(tl.sum((base + tl.cumsum(weight, 0) < wanted).to(tl.int64)), BINS - 1)
    tl.store(limit, at)
    tl.store(limit + 1, base + tl.sum(tl.where(index < at, weight, 0)))
    tl.store(limit + 2, wanted)


@triton.jit
def _matters(away, which):
    """In the limit's bin; `whole`: or before it. which: (bin, whole, by_count, low, far)."""
    at, whole, by_count, low, far = which
    where = _bin(away, by_count, low, far)
    return (by_count | ((away > low) & (away <= far))) & ((where == at) | (whole & (where < at)))


@triton.jit
def collect(away, token, inside, which, keys, filled, LISTED: tl.constexpr):
    """Append the keys that matter to a row's list, in any order; `filled` counts them even where the list is full."""
    chosen = (inside & _matters(away, which)).to(tl.int32)
    count = tl.sum(chosen)
    if count > 0:
        slot = tl.atomic_add(filled, count, sem="relaxed") + tl.cumsum(chosen, 0) - chosen
        tl.store(keys + slot, key(away, token), mask=(chosen > 0) & (slot < LISTED))


@triton.jit
def _listed(index, listing):
    """Keys of the list. listing: (keys, how many, whether they are all that matter)."""
    keys, count, complete = listing
    return tl.load(keys + index, mask=complete & (index < count), other=EVERYTHING, cache_modifier=".cg")


@triton.jit
def _keys(first, listing, source, which):
    """`STEP` of the keys that matter: from the list, or from the row itself; EVERYTHING where there is none.

    source: (logits, vocabulary, maximum, temperature).
    """
    index = first + tl.arange(0, STEP)
    if listing[2]:
        found = _listed(index, listing)
    else:
        logits, vocabulary, top, temperature = source
        inside = index < vocabulary
        away = distance(tl.load(logits + index, mask=inside, other=-float("inf")), top, temperature)
        found = tl.where(inside & _matters(away, which), key(away, index), EVERYTHING)
    return found


@triton.jit
def _weight(found, by_count):
    away = (found >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(by_count, 1, _mass(away))


@triton.jit
def _look(found, middle, by_count):
    """The weight of keys up to `middle`, the last of them, and the first key after."""
    under = found <= middle
    weight = tl.sum(tl.where(under, _weight(found, by_count), 0))
    return weight, tl.max(tl.where(under, found, -1)), tl.min(tl.where(under, EVERYTHING, found))


@triton.jit
def _limit_key(high, base, wanted, by_count, listing, source, which):
    """The least key, at most `high`, with base + the weight of all keys up to it >= wanted.

    Each look halves what is left, and shrinks it to keys that exist.
    """
    low = tl.full([], -1, tl.int64)
    few = listing[2] & (listing[1] <= STEP)
    some = _listed(tl.arange(0, STEP), listing)
    while high - low > 1:
        middle = low + (high - low) // 2
        weight, below, above = _look(some, middle, by_count)
        if not few:
            weight, below, above = tl.full([], 0, tl.int64), low, high
            for first in range(0, tl.where(listing[2], listing[1], source[1]), STEP):
                more, last, next = _look(_keys(first, listing, source, which), middle, by_count)
                weight, below, above = weight + more, tl.maximum(below, last), tl.minimum(above, next)
        enough = base + weight >= wanted
        high = tl.where(enough, tl.maximum(below, low), high)
        low = tl.where(enough, low, tl.minimum(above, high) - 1)
    return high


@triton.jit
def find_cut(p, limit, listing, source, which):
    """The last survivor's key by top-k, then top-p over what it left."""
    whole, by_count = which[1], which[2]
    base, wanted = tl.where(whole, 0, tl.load(limit + 1)), tl.load(limit + 2)
    cut = tl.full([], EVERYTHING - 1, tl.int64)
    cut = _limit_key(cut, base, wanted, by_count, listing, source, which)
    if whole:
        total = tl.full([], 0, tl.int64)
        for first in range(0, tl.where(listing[2], listing[1], source[1]), STEP):
            total += _look(_keys(first, listing, source, which), cut, False)[0]
        cut = _limit_key(cut, tl.full([], 0, tl.int64), _share(total, p), False, listing, source, which)
    return cut
