"""Gated products of few rows and plain values in which a tile holds columns of both weights, so that twice as many programs share them.

A tile's 64 lines take turns by eight: gate, up. A column's two sums then lie in the same thread. Lines beyond
2 * COLUMNS are empty. Sums are those of `product.product`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.triton import chain
from power_lab.kernels.triton.operand import to_operand, whole
from power_lab.kernels.triton.product import activate, dot, x_tile


@triton.jit(do_not_specialize=["R"])
def paired(
    X, Gate, Up, Out, R, N, K, pitch,
    COLUMNS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, STREAM: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Out[R, N] = f(X Gate^T) * (X Up^T), its rows `pitch` apart. Program (COLUMNS columns, of 32 at most, BM rows)."""
    chain.begin(PDL)
    POLICY: tl.constexpr = "evict_first" if STREAM else ""
    line, rk = tl.arange(0, 64), tl.arange(0, BK)
    end = tl.minimum(N, (tl.program_id(0) + 1) * COLUMNS)
    n = tl.program_id(0) * COLUMNS + line // 16 * 8 + line % 8
    there = (n < end)[:, None]
    n = tl.minimum(n, end - 1)
    start = tl.where(line // 8 % 2 == 0, Gate + n.to(tl.int64) * K, Up + n.to(tl.int64) * K)
    if AHEAD > 0:
        k = tl.minimum(tl.arange(0, AHEAD) * 64, K - 1)
        chain.prefetch(start[:, None] + k[None, :], PDL)
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    chain.wait(PDL)
    acc = tl.zeros((64, BM), tl.float32)
    for k in range(0, K, BK):
        x = x_tile(X, r, r < R, K, k, BK, EVEN)
        mask = there if EVEN else there & (rk[None, :] + k < K)
        w = tl.load(start[:, None] + rk[None, :] + k, mask=mask, other=0.0, eviction_policy=POLICY)
        acc = dot(w, x, acc, INTERPRET)
    acc = whole(acc, X.dtype.element_ty)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (4, 2, 8, BM)), (0, 2, 3, 1)))
    result = tl.reshape(activate(gate, ACTIVATION) * up, (32, BM))
    n = tl.program_id(0) * COLUMNS + tl.arange(0, 32)
    at = r.to(tl.int64)[None, :] * pitch + n[:, None]
    tl.store(Out + at, to_operand(result, Out.dtype.element_ty), mask=(n < end)[:, None] & (r < R)[None, :])
