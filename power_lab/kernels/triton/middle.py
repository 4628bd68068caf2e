"""The kernel of matrix products of 17 to 128 rows of plain values, tiles brought by the copy engine.

It adds what `product` adds, in that order, so a row's bits are the same. What is asked of memory is there before the kernel ahead has
ended: copies of tiles wait for X, but lines of weights are called into the L2 cache.
"""

# pyright: reportPossiblyUnbound=false
# What a branch on constants leaves out is not compiled.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from power_lab.kernels.triton import chain
from power_lab.kernels.triton.planes import DeviceWeight, arguments
from power_lab.kernels.triton.product import ahead, pick, place, stacked, store
from power_lab.kernels.triton.wide import sums

MOST = 3  # weights side by side: those of q k v


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is launched. None of it decides bits.

    Attributes:
        bn, bm, bk: columns and rows of a tile, depth of a step.
        warps, stages: of a program, and steps whose loads are in flight.
        ahead: cache lines of each column that are called before the kernel ahead has ended.
        held: one program goes through all splits and holds their sums in registers; else they run side by side and meet in the scratch.
    """

    bn: int
    bm: int
    bk: int
    warps: int
    stages: int
    ahead: int = 8
    held: bool = False


@triton.jit
def _split(
    X, weight, n, r, K, span, split,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, HELD: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """f32 [BN, BM] sums of one split, or of the first HELD, added in order."""
    acc, _ = sums(
        X, weight, weight, n, r, split * span, tl.minimum(K, (split + 1) * span), BN, BM, BK, False, INTERPRET
    )
    for s in range(1, HELD):
        more, _ = sums(X, weight, weight, n, r, s * span, tl.minimum(K, (s + 1) * span), BN, BM, BK, False, INTERPRET)
        acc += more
    return acc


@triton.jit(do_not_specialize=["R"])
def middle(
    X, one, two, three, weights, Out, Bias, Partials, Counters, R, K, columns, pitch, span,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, HELD: tl.constexpr, ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr, AHEAD: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Out[R, columns], its rows `pitch` apart, of X [R, K] and up to three weights side by side, or two that are gated.

    one, two, three: descriptors of tiles of `weights`, of which each is its values and N; more than there are weights are not read. Program
    (tile, split): of one tile of columns all tiles of rows are neighbours. Sums of splits are added by the program that HELD all of
    them, or meet in `Partials` as those of `product`.
    """
    chain.begin(PDL)
    GATED: tl.constexpr = ACTIVATION > 0
    ADDED: tl.constexpr = SPLITS if HELD else 1
    tl.static_assert(SPLITS == 1 or not GATED, "gates need whole sums")
    pid, split = tl.program_id(0), tl.program_id(1)
    high = tl.cdiv(R, BM)
    tile, row = pid // high, pid % high * BM
    if GATED:
        values, N, first, column = weights[0], weights[0][-1], 0, 0
    else:
        values = stacked(weights, tile, BN)
        N = pick(weights, -1, tile, BN)
        first, column = place(weights, tile, BN)
    left = (tile - first) * BN
    n = left + tl.arange(0, BN)
    r = row + tl.arange(0, BM)
    mask = (n < N)[:, None] & (r < R)[None, :]
    out_column = column + n[:, None]
    at = r.to(tl.int64)[None, :] * pitch + out_column
    if AHEAD > 0:
        ahead(values, n, N, K, split * span, None, AHEAD, PDL)
        if GATED:
            ahead(weights[1], n, N, K, 0, None, AHEAD, PDL)
    chain.wait(PDL)
    beside = tl.zeros((BN, BM), tl.float32)
    if GATED:
        acc, beside = sums(X, one, two, left, row, 0, K, BN, BM, BK, True, INTERPRET)
    elif len(weights) == 1:
        acc = _split(X, one, left, row, K, span, split, BN, BM, BK, ADDED, INTERPRET)
    else:  # a descriptor is no value that could be chosen
        acc = beside
        second = tl.cdiv(weights[0][-1], BN)
        if first == 0:
            acc = _split(X, one, left, row, K, span, split, BN, BM, BK, ADDED, INTERPRET)
        if first == second:
            acc = _split(X, two, left, row, K, span, split, BN, BM, BK, ADDED, INTERPRET)
        if len(weights) > 2:  # noqa: SIM102  one is a constant
            if first > second:
                acc = _split(X, three, left, row, K, span, split, BN, BM, BK, ADDED, INTERPRET)
    if SPLITS == ADDED:
        store(Out, Bias, acc, beside, at, out_column, mask, ACTIVATION, BIASED)
    else:
        size = R.to(tl.int64) * columns
        part = Partials + r.to(tl.int64)[None, :] * columns + out_column
        tl.store(part + split * size, acc, mask=mask)
        if not APART:
            tl.debug_barrier()  # every thread's sums are written before one of them says so
            if tl.atomic_add(Counters + pid, 1, sem="acq_rel") == SPLITS - 1:
                total = tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
                for i in range(1, SPLITS):
                    total += tl.load(part + i * size, mask=mask, other=0.0, cache_modifier=".cg")
                store(Out, Bias, total, total, at, out_column, mask, ACTIVATION, BIASED)
                tl.store(Counters + pid, 0)


def between(columns: int, cols: int, gated: bool, rows: int) -> Tiling | None:
    """The launch for 17 to 128 rows and plain weights [columns, cols]; of gated products, columns of one of both. None where `product` is
    as fast (`bench/gpu_middle.py`, on an H200), or for logits, which nobody has timed."""
    large = columns * cols > 1 << 23
    if columns > 16384:
        return None
    if gated:
        if rows <= 32 or (rows <= 64 and not large):
            return Tiling(64, 32, 128, 4, 5, 0 if large else 8)
        return None if large and rows > 64 else Tiling(64, 64, 128, 4, 4, 0 if large else 8)
    if not large:
        return Tiling(64, 32, 256, 4, 4) if rows <= 64 else Tiling(64, 64, 256, 4, 3)
    if cols >= 8192:
        return Tiling(128, 128, 128, 8, 3) if rows > 64 else None
    if rows <= 32:
        return None if 4096 < columns <= 6144 else Tiling(64, 32, 256, 4, 4)
    if rows <= 64 and columns <= 4096:
        return Tiling(64, 64, 256, 4, 3)
    return Tiling(64, 128, 128, 4, 4) if rows > 96 else None


def able(rows: int, cols: int, weights: tuple[DeviceWeight, ...]) -> bool:
    """Whether `launch` can: rows that it is for, plain values whose rows the copy engine can address."""
    return 16 < rows <= 128 and cols % 8 == 0 and len(weights) <= MOST and weights[0].form is None


def launch(
    x: torch.Tensor,
    weights: tuple[DeviceWeight, ...],
    out: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    activation: int,
    splits: tuple[int, int],
    tiling: Tiling,
    apart: bool = False,
) -> None:
    """One launch, as `linear.launch` of what is `able`.

    scratch: sums of splits and counters, as `linear.Workspace` has them. splits: how many and the depth of each, of the whole product.
    """
    rows, cols, columns, t = x.shape[0], x.shape[1], out.shape[1], tiling
    tiles = triton.cdiv(rows, t.bm) * sum(triton.cdiv(w.rows, t.bn) for w in (weights[:1] if activation else weights))
    one, two, three = (weights * MOST)[:MOST]
    middle[tiles, 1 if t.held else splits[0]](
        TensorDescriptor.from_tensor(x, [t.bm, t.bk]), *(_tiles(w, t) for w in (one, two, three)), tuple(arguments(w) for w in weights),
        out, out if bias is None else bias, *scratch, rows, cols, columns, out.stride(0), splits[1],
        BN=t.bn, BM=t.bm, BK=t.bk, SPLITS=splits[0], HELD=t.held, ACTIVATION=activation, BIASED=bias is not None, AHEAD=t.ahead,
        APART=apart, INTERPRET=triton.knobs.runtime.interpret, num_warps=t.warps, num_stages=t.stages, enable_fp_fusion=False,
        **chain.options(x.device),
    )  # fmt: skip


def _tiles(weight: DeviceWeight, tiling: Tiling) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weight.planes["values"], [tiling.bn, tiling.bk])
