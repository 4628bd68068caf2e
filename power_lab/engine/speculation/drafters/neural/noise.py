"""The sampler for a few candidates, on the host: filters and Philox4x32-10 as `kernels/reference.py` defines them, over numpy arrays."""

from __future__ import annotations

import numpy as np

from power_lab.engine.request import SamplingParams

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85


def choose(scores: np.ndarray, ids: np.ndarray, params: SamplingParams, position: int) -> int:
    """Index of the candidate that the sampler draws at a position as if all others were impossible; of equals the lowest id.

    scores: [K], biases included; ids: [K], their tokens. Top-k, top-p and min-p count among the candidates alone.
    """
    if not params.temperature:
        return int(np.lexsort((ids, -scores))[0])
    z = (scores.astype(np.float64) - scores.max()) / params.temperature
    kept = survivors(z, ids, params)
    noisy = z[kept] + gumbel(params.seed or 0, position, ids[kept])
    return int(kept[np.lexsort((ids[kept], -noisy))[0]])


def survivors(z: np.ndarray, ids: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Indices of what top-k, then top-p over what top-k left, then min-p keep; at least one."""
    order = np.lexsort((ids, -z))
    if params.top_k:
        order = order[: params.top_k]
    mass = np.exp(z[order])
    mass /= mass.sum()
    kept = mass >= params.min_p * mass[0]
    if params.top_p < 1:
        kept &= mass.cumsum() - mass < params.top_p
    return order[kept] if kept.any() else order[:1]


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
