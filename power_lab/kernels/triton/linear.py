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

from power_lab.kernels.ops import Activation
from power_lab.kernels.quants import QuantType, row_bytes
from power_lab.kernels.triton import chain
from power_lab.kernels.triton.planes import FORMS, PLANES, DeviceWeight
from power_lab.kernels.triton.product import combine, product

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
    ahead: int = 8


@lru_cache(maxsize=4096)
def shape(columns: int, cols: int, type: QuantType, gated: bool, rows: int) -> Shape:
    """The launch for `rows` rows and weights [columns, cols]; of gated products, columns of one of the two."""
    bk, splits = reduction(columns, cols, type)
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


def reduction(columns: int, cols: int, type: QuantType) -> tuple[int, int]:
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
        combine[grid](g, u, result, size, ACTIVATIONS[activation], 1024, enable_fp_fusion=False, **chain.options(x.device))  # type: ignore[reportArgumentType]


def _launch(
    x: torch.Tensor,
    weights: tuple[DeviceWeight, ...],
    out: torch.Tensor,
    work: Workspace,
    bias: torch.Tensor | None,
    activation: int,
) -> None:
    """One launch for weights of one type: side by side, or gated."""
    if len(x):
        launch(x, weights, out, work, bias, activation, shape(out.shape[1], x.shape[1], weights[0].type, activation != NONE, len(x)))


def launch(
    x: torch.Tensor,
    weights: tuple[DeviceWeight, ...],
    out: torch.Tensor,
    work: Workspace,
    bias: torch.Tensor | None,
    activation: int,
    s: Shape,
) -> None:
    """One launch, of the shape that it is told."""
    rows, cols, columns = x.shape[0], x.shape[1], out.shape[1]
    counted = (weights[0],) if activation else weights
    tiles = triton.cdiv(rows, s.bm) * sum(triton.cdiv(w.rows, s.bn) for w in counted)
    sums = s.splits * rows * columns * (2 if activation else 1)
    fused = s.fused or tiles > work.counters.numel() or sums > work.partials.numel()
    grid = (tiles, 1 if fused else s.splits)
    product[grid](
        x, tuple(arguments(w) for w in weights), out, out if bias is None else bias, work.partials, work.counters,
        rows, cols, columns, out.stride(0), triton.cdiv(triton.cdiv(cols, s.bk), s.splits) * s.bk,
        FORM=form(weights[0].type), BN=s.bn, BM=s.bm, BK=s.bk, SPLITS=s.splits, FUSED=fused, ACTIVATION=activation,
        BIASED=bias is not None, EVEN=cols % s.bk == 0, STREAM=rows <= s.bm, BAND=BAND, AHEAD=s.ahead,
        INTERPRET=triton.knobs.runtime.interpret, num_warps=s.warps, num_stages=s.stages, enable_fp_fusion=False,
        **chain.options(x.device),
    )  # fmt: skip


def _check(x: torch.Tensor, out: torch.Tensor, columns: int, weights: tuple[DeviceWeight, ...]) -> None:
    for weight in weights:
        if x.shape[1] != weight.cols:
            raise ValueError(f"input width is {x.shape[1]}, expected {weight.cols}")
    if out.shape != (x.shape[0], columns):
        raise ValueError(f"shape of the result is {list(out.shape)}, expected {[x.shape[0], columns]}")
    if not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError("the activations or the result are not contiguous")
