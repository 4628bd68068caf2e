"""The sampler's noise for a few tokens, on the host: Philox4x32-10 as `kernels/reference.py` defines it, over numpy arrays."""

from __future__ import annotations

import numpy as np

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85


def gumbel(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """f64 of the tokens' shape: standard Gumbel noise, keyed by (seed, position, token)."""
    tokens = tokens.astype(np.uint64)
    lanes = tokens // np.uint64(64) * np.uint64(16) + tokens % np.uint64(16)
    c0, c1 = lanes, np.zeros_like(lanes)
    c2, c3 = (np.full_like(lanes, word) for word in (position & 0xFFFFFFFF, position >> 32))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    words = np.stack([c0, c1, c2, c3])
    chosen = np.take_along_axis(words, (tokens // np.uint64(16) % np.uint64(4)).astype(np.int64)[None], 0)[0]
    u = (chosen.astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log1p(-u))
