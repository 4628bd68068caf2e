"""Matrix products with stored weights, and the gated activation that follows two of them.

A tile of weights is the row operand of every product, W Xᵀ, so that rows of X only widen the instruction and leave a row's sum as it is.
Stored codes become values in registers, on their way to the matrix unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
import triton
import triton.language as tl

from power_lab.kernels.ops import Activation
from power_lab.kernels.quants import QuantType, row_bytes
from power_lab.kernels.triton import unpack
from power_lab.kernels.triton.planes import FORMS, PLANES, DeviceWeight

PLAN = (
    "bf16 operands (a weight is rounded once, from its f32 value), f32 sums over k in order; reduction(N, K, type) cuts K into "
    "splits, whose sums are added in order; + bias; silu(g) = g / (1 + e^-g); gelu_tanh(g) = g / (1 + e^-2u), "
    "u = sqrt(2 / pi) (g + 0.044715 g^3); no fusion"
)
NONE, SILU, GELU_TANH = range(3)
ACTIVATIONS: dict[Activation, int] = {"silu": SILU, "gelu_tanh": GELU_TANH}
SHARED = 196608  # bytes for the stages of a plain product's tiles; Hopper has 232,448 a block
BAND = 8  # row tiles that are worked on side by side, so that their weights come from the cache
PARTIALS, COUNTERS, MIXED = 1 << 23, 1 << 16, 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Scratch of one stream's products.

    Attributes:
        partials: f32, sums of splits.
        counters: int32, one for each tile whose splits run side by side; zero between launches, each launch leaves them so.
        mixed: f32, the two halves of gated products whose weights differ in type.
    """

    partials: torch.Tensor
    counters: torch.Tensor
    mixed: torch.Tensor

    @staticmethod
    def on(device: torch.device | str) -> Workspace:
        return Workspace(
            torch.empty(PARTIALS, dtype=torch.float32, device=device),
            torch.zeros(COUNTERS, dtype=torch.int32, device=device),
            torch.empty(MIXED, dtype=torch.float32, device=device),
        )

    @property
    def nbytes(self) -> int:
        return 4 * (self.partials.numel() + self.counters.numel() + self.mixed.numel())


@dataclass(frozen=True, slots=True)
class Shape:
    """How a product is launched. `bk` and `splits` decide bits, and depend on (N, K, type) alone; the rest follows the rows."""

    bk: int
    splits: int
    bn: int
    bm: int
    warps: int
    stages: int
    fused: bool


@lru_cache(maxsize=4096)
def shape(columns: int, cols: int, type: QuantType, gated: bool, rows: int) -> Shape:
    """The launch for `rows` rows and weights [columns, cols]; of gated products, columns of one of the two."""
    bk, splits = reduction(columns, cols, type, gated)
    stored = type in FORMS
    if rows <= 128:
        bn, bm, warps = 64, next(most for most in (16, 32, 64, 128) if rows <= most), 4
    elif gated or stored or splits > 1:
        bn, bm, warps = 64 if gated and (stored or splits > 1) else 128, 128, 8
    else:
        bn, bm, warps = 128, 256, 8
    if stored:
        stages = 2 if bk == 256 and bm == 128 else 3
    else:
        stages = min(8 if bm <= 32 else 4, SHARED // (bk * (2 * bm + row_bytes(type, bn) * (2 if gated else 1))))
    return Shape(bk, splits, bn, bm, warps, stages, rows > 128)


def reduction(columns: int, cols: int, type: QuantType, gated: bool) -> tuple[int, int]:
    """(BLOCK_K, splits of K): enough programs for a decode step to draw on every memory channel, each with enough to read.

    These and the type decide a product's bits; rows are not asked.
    """
    stored = type in FORMS
    bk = FORMS[type].depth if stored else 64
    tiles = -(-columns // 64)
    most, least = (8 if tiles <= 32 else 4, 512) if stored else (8, 256)
    splits = 1
    while tiles * splits < (400 if stored else 96) and splits < most and cols // (2 * splits) >= least:
        splits *= 2
    return bk, splits


@triton.jit
def _pick(weights, ITEM: tl.constexpr, tile, BN: tl.constexpr):
    """Item ITEM of the weight that owns this tile of the stacked ones."""
    item = weights[0][ITEM]
    end = tl.cdiv(weights[0][-1], BN)
    for j in tl.static_range(1, len(weights)):
        item = tl.where(tile >= end, weights[j][ITEM], item)
        end += tl.cdiv(weights[j][-1], BN)
    return item


@triton.jit
def _place(weights, tile, BN: tl.constexpr):
    """(first tile, first column) of the weight that owns this tile."""
    first, column = 0, 0
    end, total = 0, 0
    for j in tl.static_range(len(weights)):
        first = tl.where(tile >= end, end, first)
        column = tl.where(tile >= end, total, column)
        end += tl.cdiv(weights[j][-1], BN)
        total += weights[j][-1]
    return first, column


@triton.jit
def _dot(w, x, acc, INTERPRET: tl.constexpr):
    if INTERPRET:  # the interpreter has no bf16 arithmetic
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(w.to(tl.bfloat16), x, acc)


@triton.jit
def _dense(weight, n, nm, K, k, BK: tl.constexpr, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """A [BN, BK] tile of plain values at depth k."""
    rk = tl.arange(0, BK)
    at = weight + n.to(tl.int64)[:, None] * K + rk[None, :] + k
    if EVEN:
        return tl.load(at, mask=nm[:, None], other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(at, mask=nm[:, None] & (rk[None, :] + k < K), other=0.0, eviction_policy=POLICY)


@triton.jit
def _words(plane, chunk, n, nm, N, present, POLICY: tl.constexpr):
    """int32 [BN, 32] words of a chunk."""
    j = tl.arange(0, 32)
    at = plane + chunk.to(tl.int64) * N * 32 + n[:, None] * 32 + j[None, :]
    return tl.load(at, mask=nm[:, None] & present, other=0, eviction_policy=POLICY).to(tl.int32)


@triton.jit
def _scales(planes, k, n, mask, N, GROUPS: tl.constexpr, FORM: tl.constexpr):
    """The stored scales of the groups of 32 from depth k on; two sets for each where sub-blocks are of 16."""
    stored = ()
    for q in tl.static_range(GROUPS):
        g = k // 32 + q
        if FORM[3] == 32:
            block = unpack.of_block(planes, g, n, mask, N, FORM)
        elif q == 0:  # a step begins and ends within a block, or with it
            block = unpack.of_block(planes, k // 256, n, mask, N, FORM)
        if FORM[4] == 16:
            stored = stored + (unpack.of_sub(block, planes, 2 * g, n, mask, N, FORM),)  # noqa: RUF005
            stored = stored + (unpack.of_sub(block, planes, 2 * g + 1, n, mask, N, FORM),)  # noqa: RUF005
        else:
            stored = stored + (unpack.of_sub(block, planes, g, n, mask, N, FORM),)  # noqa: RUF005
    return stored


@triton.jit
def _scaled(low, high, stored, Q: tl.constexpr, FORM: tl.constexpr):
    """f32 [BN, 32] values of the Q-th group of a step."""
    FIELD: tl.constexpr = Q % (16 // FORM[0])
    HIGH_FIELD: tl.constexpr = Q % (8 // FORM[1]) if FORM[1] else 0
    if FORM[4] == 16:
        s0, o0 = unpack.scales(stored[2 * Q], FORM)
        s1, o1 = unpack.scales(stored[2 * Q + 1], FORM)
        first = tl.arange(0, 32)[None, :] < 16
        scale = tl.where(first, s0[:, None], s1[:, None])
        offset = tl.where(first, o0[:, None], o1[:, None])
    else:
        s, o = unpack.scales(stored[Q], FORM)
        scale, offset = s[:, None], o[:, None]
    return unpack.values(low, high, scale, offset, FIELD, HIGH_FIELD, FORM)


@triton.jit
def _x(X, r, rm, K, k, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """bf16 [DEPTH, BM] of the rows r, turned."""
    rk = tl.arange(0, DEPTH)
    at = X + r.to(tl.int64)[None, :] * K + rk[:, None] + k
    if EVEN:
        return tl.load(at, mask=rm[None, :], other=0.0)
    else:
        return tl.load(at, mask=rm[None, :] & (rk[:, None] + k < K), other=0.0)


@triton.jit
def _sum(
    X, one, two, n, nm, N, r, rm, K, first, last,
    FORM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    POLICY: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """f32 [BN, BM] sums over k in first..last of weight `one`, and of `two` in gated products."""
    acc = tl.zeros((BN, BM), tl.float32)
    beside = tl.zeros((BN, BM), tl.float32)
    if FORM is not None:  # scales are fetched a step ahead: a tile's own loads are not waited for
        scales = _scales(one, first, n, nm, N, BK // 32, FORM)
        if GATED:
            scales2 = _scales(two, first, n, nm, N, BK // 32, FORM)
    for k in range(first, last, BK):
        if FORM is None:
            x = _x(X, r, rm, K, k, BK, EVEN)
            acc = _dot(_dense(one[0], n, nm, K, k, BK, EVEN, POLICY), x, acc, INTERPRET)
            if GATED:
                beside = _dot(_dense(two[0], n, nm, K, k, BK, EVEN, POLICY), x, beside, INTERPRET)
        else:
            ahead = nm & (k + BK < last)
            next_scales = _scales(one, k + BK, n, ahead, N, BK // 32, FORM)
            if GATED:
                next_scales2 = _scales(two, k + BK, n, ahead, N, BK // 32, FORM)
            for q in tl.static_range(BK // 32):
                if q % (16 // FORM[0]) == 0:
                    chunk = k // (512 // FORM[0]) + q // (16 // FORM[0])
                    present = EVEN or chunk * (512 // FORM[0]) < K
                    low = _words(one[0], chunk, n, nm, N, present, POLICY)
                    if GATED:
                        low2 = _words(two[0], chunk, n, nm, N, present, POLICY)
                if FORM[1] == 0:
                    high = low
                    if GATED:
                        high2 = low
                elif q % (8 // FORM[1]) == 0:
                    high_chunk = k // (256 // FORM[1]) + q // (8 // FORM[1])
                    high = _words(one[1], high_chunk, n, nm, N, True, POLICY)
                    if GATED:
                        high2 = _words(two[1], high_chunk, n, nm, N, True, POLICY)
                x = _x(X, r, rm, K, k + q * 32, 32, EVEN)
                acc = _dot(_scaled(low, high, scales, q, FORM), x, acc, INTERPRET)
                if GATED:
                    beside = _dot(_scaled(low2, high2, scales2, q, FORM), x, beside, INTERPRET)
            scales = next_scales
            if GATED:
                scales2 = next_scales2
    return acc, beside


@triton.jit
def activate(g, ACTIVATION: tl.constexpr):
    """silu or the tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), g (1 + tanh u) / 2 = g / (1 + e^-2u)."""
    if ACTIVATION == 1:
        return g / (1.0 + tl.exp(-g))
    else:
        return g / (1.0 + tl.exp(g * (g * g * -0.07135481282553) - g * 1.5957691216057308))


@triton.jit
def _store(Out, Bias, acc, beside, at, column, mask, ACTIVATION: tl.constexpr, BIASED: tl.constexpr):
    if ACTIVATION > 0:
        acc = activate(acc, ACTIVATION) * beside
    if BIASED:
        acc += tl.load(Bias + column, mask=mask, other=0.0)
    tl.store(Out + at, acc.to(Out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def product(
    X, weights, Out, Bias, Partials, Counters, R, K, columns, pitch, span,
    FORM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, FUSED: tl.constexpr,
    ACTIVATION: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, STREAM: tl.constexpr, BAND: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Out[R, columns], its rows `pitch` apart, of weights that lie side by side, or of two that are gated. Program (tile, split).

    Splits that run side by side leave their sums in `Partials`; the last to arrive adds them, in order. A fused program runs them itself.
    """
    GATED: tl.constexpr = ACTIVATION > 0
    POLICY: tl.constexpr = "evict_first" if STREAM else ""
    if GATED:
        tiles = tl.cdiv(columns, BN)
    else:
        tiles = 0
        for j in tl.static_range(len(weights)):
            tiles += tl.cdiv(weights[j][-1], BN)
    pid = tl.program_id(0)
    band = pid // (BAND * tiles)
    high = tl.minimum(tl.cdiv(R, BM) - band * BAND, BAND)
    row = band * BAND + (pid % (BAND * tiles)) % high
    tile = (pid % (BAND * tiles)) // high
    if GATED:
        one, two, N, first, column = weights[0], weights[1], weights[0][-1], 0, 0
    else:
        one = _stacked(weights, tile, BN)
        two = one
        N = _pick(weights, -1, tile, BN)
        first, column = _place(weights, tile, BN)
    n = (tile - first) * BN + tl.arange(0, BN)
    nm = n < N
    r = row * BM + tl.arange(0, BM)
    rm = r < R
    mask = nm[:, None] & rm[None, :]
    out_column = column + n[:, None]
    at = r.to(tl.int64)[None, :] * pitch + out_column
    if SPLITS == 1:
        acc, beside = _sum(X, one, two, n, nm, N, r, rm, K, 0, K, FORM, BN, BM, BK, EVEN, GATED, POLICY, INTERPRET)
        _store(Out, Bias, acc, beside, at, out_column, mask, ACTIVATION, BIASED)
    elif FUSED:
        acc = tl.zeros((BN, BM), tl.float32)
        beside = tl.zeros((BN, BM), tl.float32)
        for s in range(SPLITS):
            a, b = _sum(
                X,
                one,
                two,
                n,
                nm,
                N,
                r,
                rm,
                K,
                s * span,
                tl.minimum(K, (s + 1) * span),
                FORM,
                BN,
                BM,
                BK,
                EVEN,
                GATED,
                POLICY,
                INTERPRET,
            )
            acc += a
            beside += b
        _store(Out, Bias, acc, beside, at, out_column, mask, ACTIVATION, BIASED)
    else:
        s = tl.program_id(1)
        a, b = _sum(
            X,
            one,
            two,
            n,
            nm,
            N,
            r,
            rm,
            K,
            s * span,
            tl.minimum(K, (s + 1) * span),
            FORM,
            BN,
            BM,
            BK,
            EVEN,
            GATED,
            POLICY,
            INTERPRET,
        )
        size = R.to(tl.int64) * columns
        sums = Partials + r.to(tl.int64)[None, :] * columns + out_column
        tl.store(sums + s * size, a, mask=mask)
        if GATED:
            tl.store(sums + (SPLITS + s) * size, b, mask=mask)
        tl.debug_barrier()  # every thread's sums are written before one of them says so
        if tl.atomic_add(Counters + pid, 1, sem="acq_rel") == SPLITS - 1:
            acc = tl.zeros((BN, BM), tl.float32)
            beside = tl.zeros((BN, BM), tl.float32)
            for i in range(SPLITS):
                acc += tl.load(sums + i * size, mask=mask, other=0.0, cache_modifier=".cg")
                if GATED:
                    beside += tl.load(sums + (SPLITS + i) * size, mask=mask, other=0.0, cache_modifier=".cg")
            _store(Out, Bias, acc, beside, at, out_column, mask, ACTIVATION, BIASED)
            tl.store(Counters + pid, 0)


@triton.jit
def _stacked(weights, tile, BN: tl.constexpr):
    """The planes of the weight that owns this tile."""
    if len(weights) == 1:
        return weights[0]
    elif len(weights[0]) == 2:
        return (_pick(weights, 0, tile, BN), 0)
    else:
        return (
            _pick(weights, 0, tile, BN), _pick(weights, 1, tile, BN), _pick(weights, 2, tile, BN), _pick(weights, 3, tile, BN),
            _pick(weights, 4, tile, BN), _pick(weights, 5, tile, BN), 0,
        )  # fmt: skip


@triton.jit(do_not_specialize=["size"])
def _gate(Gate, Up, Out, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Out = f(Gate) * Up, value by value."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    g = tl.load(Gate + i, mask=mask, other=0.0)
    tl.store(
        Out + i, (activate(g, ACTIVATION) * tl.load(Up + i, mask=mask, other=0.0)).to(Out.dtype.element_ty), mask=mask
    )


def form(type: QuantType) -> tuple[int, int, int, int, int, bool, int, bool] | None:
    """What kernels are compiled for: (low bits, high bits, code of 0, block, sub-block, affine, type, code book)."""
    if type not in FORMS:
        return None
    f = FORMS[type]
    return f.low, f.high, f.zero, f.block, f.sub, f.affine, int(type), type in (QuantType.IQ4_NL, QuantType.IQ4_XS)


def arguments(weight: DeviceWeight) -> tuple[torch.Tensor | int, ...]:
    """A weight as kernels take it: its planes, those that its type lacks stood in for by its codes, then N."""
    if weight.type not in FORMS:
        return weight.planes["values"], weight.rows
    codes = weight.planes["codes"]
    return *(weight.planes.get(name, codes) for name in PLANES), weight.rows


def linear(
    x: torch.Tensor,
    weights: tuple[DeviceWeight, ...],
    out: torch.Tensor,
    work: Workspace,
    bias: torch.Tensor | None = None,
) -> None:
    """out[:, n] = sum_k x[:, k] * W[n, k] + bias[n], the weights stacked along N; one launch for each run of one type.

    x bf16 [R, K], out f32 or bf16 [R, sum N], bias f32 [sum N], all contiguous.
    """
    total = sum(w.rows for w in weights)
    _check(x, out, total, weights)
    if bias is not None and bias.shape != (total,):
        raise ValueError(f"bias width is {list(bias.shape)}, expected {total}")
    column = 0
    for _, run in groupby(weights, key=lambda w: w.type):
        same = tuple(run)
        width = sum(w.rows for w in same)
        part = None if bias is None else bias[column : column + width]
        _launch(x, same, out[:, column : column + width], work, part, NONE)
        column += width


def gate_up(
    x: torch.Tensor,
    gate: DeviceWeight,
    up: DeviceWeight,
    out: torch.Tensor,
    work: Workspace,
    activation: Activation = "silu",
) -> None:
    """out = f(x Wg^T) * (x Wu^T). x bf16 [R, K], out bf16 (or f32) [R, N], contiguous."""
    _check(x, out, gate.rows, (gate, up))
    if gate.rows != up.rows:
        raise ValueError(f"gate has {gate.rows} columns and up {up.rows}")
    if gate.type == up.type:
        _launch(x, (gate, up), out, work, None, ACTIVATIONS[activation])
    else:
        _gate_up_mixed(x, gate, up, out, work, activation)


def _gate_up_mixed(
    x: torch.Tensor, gate: DeviceWeight, up: DeviceWeight, out: torch.Tensor, work: Workspace, activation: Activation
) -> None:
    """Two products into scratch, then their gate, for some rows at a time: two weights of different types."""
    n = gate.rows
    rows = work.mixed.numel() // (2 * n)
    for first in range(0, len(x), rows):
        part, result = x[first : first + rows], out[first : first + rows]
        size = len(part) * n
        g, u = work.mixed[:size].view(-1, n), work.mixed[size : 2 * size].view(-1, n)
        _launch(part, (gate,), g, work, None, NONE)
        _launch(part, (up,), u, work, None, NONE)
        grid = (triton.cdiv(size, 1024),)
        _gate[grid](g, u, result, size, ACTIVATIONS[activation], 1024, enable_fp_fusion=False)  # type: ignore[reportArgumentType]


def _launch(
    x: torch.Tensor,
    weights: tuple[DeviceWeight, ...],
    out: torch.Tensor,
    work: Workspace,
    bias: torch.Tensor | None,
    activation: int,
) -> None:
    """One launch for weights of one type: side by side, or gated."""
    rows, cols, columns = x.shape[0], x.shape[1], out.shape[1]
    if rows == 0:
        return
    s = shape(columns, cols, weights[0].type, activation != NONE, rows)
    counted = (weights[0],) if activation else weights
    tiles = triton.cdiv(rows, s.bm) * sum(triton.cdiv(w.rows, s.bn) for w in counted)
    sums = s.splits * rows * columns * (2 if activation else 1)
    fused = s.fused or tiles > work.counters.numel() or sums > work.partials.numel()
    grid = (tiles, 1 if fused else s.splits)
    product[grid](
        x, tuple(arguments(w) for w in weights), out, out if bias is None else bias, work.partials, work.counters,
        rows, cols, columns, out.stride(0), triton.cdiv(triton.cdiv(cols, s.bk), s.splits) * s.bk,
        FORM=form(weights[0].type), BN=s.bn, BM=s.bm, BK=s.bk, SPLITS=s.splits, FUSED=fused, ACTIVATION=activation,
        BIASED=bias is not None, EVEN=cols % s.bk == 0, STREAM=rows <= s.bm, BAND=BAND, INTERPRET=triton.knobs.runtime.interpret,
        num_warps=s.warps, num_stages=s.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _check(x: torch.Tensor, out: torch.Tensor, columns: int, weights: tuple[DeviceWeight, ...]) -> None:
    for weight in weights:
        if x.shape[1] != weight.cols:
            raise ValueError(f"input width is {x.shape[1]}, expected {weight.cols}")
    if out.shape != (x.shape[0], columns):
        raise ValueError(f"shape of the result is {list(out.shape)}, expected {[x.shape[0], columns]}")
    if not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError("the activations or the result are not contiguous")
