"""Counter-based noise: Philox4x32-10 (Salmon et al. 2011), keyed by (seed, position, token) as in `reference.noise_word`.

Key = (seed low, seed high), counter = (64-token group * 16 + lane, 0, position low, position high); output word w of lane l of
group g belongs to token 64 g + 16 w + l. The Gumbel noise has the same bits as the CPU's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.triton.elementary import log

ROUNDS = tl.constexpr(10)
MULTIPLIER0, MULTIPLIER1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
WEYL0, WEYL1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
BELOW_ONE = tl.constexpr(1 - 2.0**-24)  # the largest f32 below 1


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds on uint32 words."""
    for turn in tl.static_range(ROUNDS):
        if turn > 0:
            k0, k1 = k0 + WEYL0, k1 + WEYL1
        high0, low0 = tl.umulhi(c0, MULTIPLIER0), c0 * MULTIPLIER0
        high1, low1 = tl.umulhi(c2, MULTIPLIER1), c2 * MULTIPLIER1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


@triton.jit
def words(counter, seed, position):
    """The four words of each counter (int32: group * 16 + lane) under int64 `seed` and `position`."""
    zero = tl.zeros(counter.shape, tl.uint32)
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    return philox(counter.to(tl.uint32), zero, zero + low, zero + high, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))


@triton.jit
def word(token, seed, position):
    """The word of each token (int32, any order)."""
    four = words(token // 64 * 16 + token % 16, seed, position)
    w = token // 16 % 4
    return tl.where(w < 2, tl.where(w == 0, four[0], four[1]), tl.where(w == 2, four[2], four[3]))


@triton.jit
def gumbel(word):
    """Standard Gumbel noise of uint32 words: -ln(-ln(1 - u)), u = (word + 1/2) / 2^32 in f32."""
    u = (word.to(tl.float32) + 0.5) * 2.0**-32
    u = tl.where(u < BELOW_ONE, u, BELOW_ONE)  # words that round up to 1
    rest = 1.0 - u
    lost = (1.0 - rest) - u  # what 1 - u lost by rounding: mostly nothing, which division takes its long way for
    lost = tl.where(lost == 0, 0.0, tl.div_rn(tl.where(lost == 0, 1.0, lost), rest))
    return log((log(rest) + lost) * -1.0) * -1.0  # `-x` is 0 - x to Triton, which loses the sign of 0
