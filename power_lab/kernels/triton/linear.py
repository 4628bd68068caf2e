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
from triton.tools.tensor_descriptor import TensorDescriptor

from power_lab.kernels.ops import Activation
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import chain, middle
from power_lab.kernels.triton.paired import paired
from power_lab.kernels.triton.parts import Parts
from power_lab.kernels.triton.planes import FORMS, DeviceWeight, Form, arguments
from power_lab.kernels.triton.product import combine, product
from power_lab.kernels.triton.wide import spread, wide

PLAN = (
    "bf16 operands, or f16 where codes are stored: scale * level + minimum rounded once, of f16 scales and minima, rounded once where they "
    "are products; a 16th of the activations, at most 65504; f32 sums over k in order; reduction(N, K, whether stored) cuts K into "
    "splits, whose sums are added in order; + bias; silu(g) = g / (1 + e^-g); gelu_tanh(g) = g / (1 + e^-2u), "
    "u = sqrt(2 / pi) (g + 0.044715 g^3); no fusion"
)
NONE, SILU, GELU_TANH = range(3)
ACTIVATIONS: dict[Activation, int] = {"silu": SILU, "gelu_tanh": GELU_TANH}
BAND = 8  # row tiles that are worked on side by side, so that their weights come from the cache
DEEPEST = 256  # the deepest step of any product; a split is a whole number of them
NARROW = 128  # rows; tiles of more come through the copy engine, and stored codes are unpacked once for all of them
PROGRAMS = 512  # of a product of stored codes, so that their loads and sums overlap: about four to a multiprocessor
PARTIALS, COUNTERS, MIXED = (
    1 << 24,
    1 << 16,
    1 << 22,
)  # sums of NARROW rows and two times PROGRAMS tiles of 64 columns, gated


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Scratch of one stream's products.

    Attributes:
        partials: f32, sums of splits; for many rows, stored weights as x is.
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
    """How a product of few rows is launched. None of it decides bits.

    Attributes:
        bk: depth of a step.
        bn, bm: columns and rows of a tile.
        warps, stages: of a program, and steps whose loads are in flight.
        ahead: cache lines of each column, or tiles of codes, that are fetched before the kernel ahead has ended.
        paired: a tile's columns are of both gated weights, half of `bn` of each.
        lean: each instruction of the matrix unit is waited for, which spares a third of the registers: more programs at once.
        used: of a tile's `bn` lines, if not all: the others stay empty, so that narrow products make programs enough.
    """

    bk: int
    bn: int
    bm: int
    warps: int
    stages: int
    ahead: int = 0
    paired: bool = False
    lean: bool = False
    used: int = 0

    @property
    def step(self) -> int:
        """Columns from one tile to the next."""
        return (self.used or self.bn) // (2 if self.paired else 1)


@lru_cache(maxsize=4096)
def shape(columns: int, cols: int, type: QuantType, gated: bool, rows: int) -> Shape:
    """The launch for `rows` rows and weights [columns, cols]; of gated products, columns of one of the two."""
    bm = next(most for most in (16, 32, 64, NARROW) if rows <= most)
    if type in FORMS:
        return _stored_shape(columns, cols, FORMS[type], gated, bm)
    large = columns > 16384  # as of logits: programs enough to keep the memory busy without a look ahead
    if bm == 16 and gated:
        return _gated_shape(columns)
    if bm < NARROW and not gated and 4096 < columns <= 6144:  # or else a third of the multiprocessors has nothing to do
        return Shape(128, 64, bm, 4, 6, 8, used=48)
    if bm == 16:
        stages = 3 if large else 4 if cols >= 4096 or columns <= 640 else 6
        return Shape(128, 64, bm, 4, stages, 0 if large else 8, used=16 if 1024 < columns <= 1536 else 0)
    if gated:
        return Shape(64, 128, bm, 8, 4, 8) if bm == 128 and columns > 4096 else Shape(64, 64, bm, 4, 6, 8)
    if bm == 128 and cols >= 8192:
        return Shape(64, 128, bm, 8, 4, 8)
    return Shape(128, 64, bm, 4, 3 if bm == 64 and (large or cols >= 8192) else 4, 8)


def _gated_shape(columns: int) -> Shape:
    """As `shape`, of gated plain values and up to 16 rows. Tiles of both weights make twice the programs: faster where they leave room
    for the next kernel beside them, or where no number would."""
    if 2048 < columns <= 4096:
        return Shape(128, 64, 16, 4, 4, 8, used=24)
    return Shape(128, 64, 16, 4, 6 if columns <= 2048 else 3, 8, paired=True)


def _stored_shape(columns: int, cols: int, form: Form, gated: bool, bm: int) -> Shape:
    """As `shape`, of stored codes. In narrow products eight warps share the rows of a tile and leave fewer sums to add."""
    depth = form.depth
    if bm > 16:
        return Shape(depth, 64, bm, 4, 2 if depth == 256 and bm == 128 else 3)
    if gated or columns > 16384:
        return Shape(depth, 64, bm, 4, 3)
    if columns > 4096 and form.low == 4 and not form.high:
        return Shape(depth, 64, bm, 4, 3, 2)
    if columns > 2048 and cols % 256 == 0:
        return Shape(256, 64, bm, 4, 2, 2, lean=columns > 4096)  # whose programs would need a second turn
    return Shape(depth, 128, bm, 8, 3, 2)


def reduction(columns: int, cols: int, gated: bool, stored: bool) -> tuple[int, int]:
    """(splits of K, depth of each): so many that a decode step draws on every memory channel, each long enough to be worth its sum.

    They decide a product's bits; rows are not asked. What draws on stored codes unpacks them as well, so they need more programs. Gated
    products of plain values have columns enough.
    """
    tiles, splits = -(-columns // 64), 1
    if stored:
        while tiles * splits < PROGRAMS and cols // (2 * splits) >= 512:
            splits *= 2
    elif gated:
        splits = 1
    elif (tiles <= 32 and cols >= 1024) or (tiles <= 64 and cols >= 8192):
        splits = 4
    elif tiles <= 64 and cols >= 2048:
        splits = 2
    depth = -(-cols // (DEEPEST * splits)) * DEEPEST
    return -(-cols // depth), depth


def linear(
    x: torch.Tensor,
    weights: tuple[DeviceWeight, ...],
    out: torch.Tensor | Parts,
    work: Workspace,
    bias: torch.Tensor | None = None,
) -> None:
    """out[:, n] = sum_k x[:, k] * W[n, k] + bias[n], the weights stacked along N; one launch for each run of one type.

    x [R, K] bf16 beside bf16 weights, f16 of a 16th part (`operand`) beside others; out f32 [R, sum N], bias f32 [sum N]; all contiguous.
    Into `Parts` the sums of splits may be left as they are.
    """
    parts, out = (out, out.out) if isinstance(out, Parts) else (None, out)
    total = sum(w.rows for w in weights)
    _check(x, out, total, weights)
    if out.dtype != torch.float32:
        raise ValueError(f"the result is {out.dtype}, expected torch.float32")
    if bias is not None and bias.shape != (total,):
        raise ValueError(f"bias width is {list(bias.shape)}, expected {total}")
    if parts is not None and _launch_apart(x, weights, parts, work, bias):
        return
    column = 0
    for _, run in groupby(weights, key=lambda w: w.type):
        same = tuple(run)
        width = sum(w.rows for w in same)
        part = None if bias is None else bias[column : column + width]
        _launch(x, same, out[:, column : column + width], work, part, NONE)
        column += width


def _launch_apart(
    x: torch.Tensor, weights: tuple[DeviceWeight, ...], parts: Parts, work: Workspace, bias: torch.Tensor | None
) -> bool:
    """Launch a product whose sums of splits stay apart, if they may: whether it was. One of several types is several products."""
    (rows, cols), columns, type = x.shape, parts.out.shape[1], weights[0].type
    splits, _ = reduction(columns, cols, False, type in FORMS)
    one = rows <= NARROW and splits > 1 and all(w.type == type for w in weights)
    apart = one and (left(splits, rows) if parts.apart is None else parts.apart)
    parts.splits, parts.bias = (splits, bias) if apart else (1, None)
    if apart and not _launch_between(x, weights, parts.out, work, None, NONE, apart=True):
        s = shape(columns, cols, type, False, rows)
        launch(x, weights, parts.out, work, None, NONE, s, apart=True)
    return apart


def left(splits: int, rows: int) -> bool:
    """Whether the sums of so many splits are left to what reads them, where that can add them (`Parts`).

    Measured with the reader on an H200 (`bench/gpu_sums.py`): up to 4 splits that saves 0.1 to 1 us of a pair, of 8 up to 16 rows it costs
    0.1 to 3 us, of 8 and 64 or 128 rows it saves 0.4 to 6; between them it depends on the reader.
    """
    return splits <= 4 or rows > 32


def gate_up(
    x: torch.Tensor,
    gate: DeviceWeight,
    up: DeviceWeight,
    out: torch.Tensor,
    work: Workspace,
    activation: Activation = "silu",
) -> None:
    """out = f(x Wg^T) * (x Wu^T). x [R, K] as in `linear`, out [R, N] like it or f32, contiguous."""
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
        combine[grid](
            g, u, result, size, ACTIVATIONS[activation], 1024, enable_fp_fusion=False, **chain.options(x.device)
        )  # type: ignore[reportArgumentType]


def _launch(
    x: torch.Tensor,
    weights: tuple[DeviceWeight, ...],
    out: torch.Tensor,
    work: Workspace,
    bias: torch.Tensor | None,
    activation: int,
) -> None:
    """A product of weights of one type: side by side, or gated."""
    rows, cols = x.shape
    if _launch_between(x, weights, out, work, bias, activation):
        return
    if rows > NARROW and weights[0].type in FORMS:
        _launch_panels(x, weights, out, work, bias, activation)
    elif rows > NARROW and cols % 8 == 0:
        _launch_wide(x, weights, out, bias, activation)
    else:
        for first in range(0, rows, NARROW):
            part, result = x[first : first + NARROW], out[first : first + NARROW]
            s = shape(out.shape[1], cols, weights[0].type, activation != NONE, len(part))
            launch(part, weights, result, work, bias, activation, s)


def _launch_between(
    x: torch.Tensor,
    weights: tuple[DeviceWeight, ...],
    out: torch.Tensor,
    work: Workspace,
    bias: torch.Tensor | None,
    activation: int,
    *,
    apart: bool = False,
) -> bool:
    """The product through the copy engine, if `middle.between` says so: whether it was. apart: as of `launch`."""
    (rows, cols), columns, gated = x.shape, out.shape[1], activation != NONE
    tiling = middle.between(columns, cols, gated, rows) if middle.able(rows, cols, weights) else None
    if tiling is not None:
        splits, scratch = reduction(columns, cols, gated, False), (work.partials, work.counters)
        middle.launch(x, weights, out, scratch, bias, activation, splits, tiling, apart)
    return tiling is not None


def launch(
    x: torch.Tensor,
    weights: tuple[DeviceWeight, ...],
    out: torch.Tensor,
    work: Workspace,
    bias: torch.Tensor | None,
    activation: int,
    s: Shape,
    apart: bool = False,
) -> None:
    """One launch for at most NARROW rows, of the shape that it is told; `apart`: sums of splits stay in the scratch, `out` as it is."""
    rows, cols, columns = x.shape[0], x.shape[1], out.shape[1]
    if s.paired:
        values = [w.planes["values"] for w in weights]
        paired[triton.cdiv(columns, s.step), triton.cdiv(rows, s.bm)](
            x, *values, out, rows, columns, cols, out.stride(0),
            COLUMNS=s.step, BM=s.bm, BK=s.bk, ACTIVATION=activation, EVEN=cols % s.bk == 0, STREAM=rows <= s.bm, AHEAD=s.ahead,
            INTERPRET=triton.knobs.runtime.interpret, num_warps=s.warps, num_stages=s.stages, enable_fp_fusion=False,
            **chain.options(x.device),
        )  # fmt: skip
        return
    splits, depth = reduction(columns, cols, activation != NONE, weights[0].type in FORMS)
    counted = (weights[0],) if activation else weights
    tiles = triton.cdiv(rows, s.bm) * sum(triton.cdiv(w.rows, s.step) for w in counted)
    product[tiles, splits](
        x, tuple(arguments(w) for w in weights), out, out if bias is None else bias, work.partials, work.counters,
        rows, cols, columns, out.stride(0), depth,
        FORM=weights[0].form, BN=s.bn, USED=s.step, BM=s.bm, BK=s.bk, SPLITS=splits, ACTIVATION=activation, BIASED=bias is not None,
        EVEN=cols % s.bk == 0, STREAM=rows <= s.bm, BAND=BAND, AHEAD=s.ahead, LEAN=s.lean, APART=apart,
        INTERPRET=triton.knobs.runtime.interpret, num_warps=s.warps, num_stages=s.stages, enable_fp_fusion=False,
        **chain.options(x.device),
    )  # fmt: skip


def _launch_wide(
    x: torch.Tensor, weights: tuple[DeviceWeight, ...], out: torch.Tensor, bias: torch.Tensor | None, activation: int
) -> None:
    """Launches for many rows and plain values: one for each weight, or for the two that are gated.

    Sums of several splits are held in registers where that takes no smaller tiles, or where two of them meet: they would each be read back.
    """
    values = [w.planes["values"] for w in weights]
    splits = reduction(out.shape[1], x.shape[1], activation != NONE, False)
    held = splits[0] == 2 or (splits[0] > 2 and tiling(len(x), out.shape[1], False, False)[0] == 128)
    if activation:
        launch_wide(x, values[0], values[1], out, bias, activation, splits, False)
        return
    column = 0
    for part in values:
        end = column + len(part)
        launch_wide(x, part, part, out[:, column:end], None if bias is None else bias[column:end], NONE, splits, held)
        column = end


def _launch_panels(
    x: torch.Tensor,
    weights: tuple[DeviceWeight, ...],
    out: torch.Tensor,
    work: Workspace,
    bias: torch.Tensor | None,
    activation: int,
) -> None:
    """Launches for many rows and stored codes, which are unpacked once, as many columns at a time as the scratch holds."""
    cols = x.shape[1]
    splits = reduction(out.shape[1], cols, activation != NONE, True)
    panel = work.partials.view(x.dtype)
    most = panel.numel() // cols // (2 if activation else 1)
    column = 0
    for weight in weights[:1] if activation else weights:
        for first in range(0, weight.rows, most):
            count = min(most, weight.rows - first)
            one, two = (
                panel[at * cols : (at + count) * cols].view(count, cols) for at in (0, count if activation else 0)
            )
            _spread(weight, first, one)
            if activation:
                _spread(weights[1], first, two)
            part = None if bias is None else bias[column : column + count]
            launch_wide(x, one, two, out[:, column : column + count], part, activation, splits, splits[0] > 1)
            column += count


def _spread(weight: DeviceWeight, first: int, panel: torch.Tensor) -> None:
    """panel = the rows of a stored weight from `first` on, as f16."""
    count, cols = panel.shape
    spread[triton.cdiv(count, 64), triton.cdiv(cols, FORMS[weight.type].depth)](
        arguments(weight), panel, first, count, cols, BN=64, FORM=weight.form,
        INTERPRET=triton.knobs.runtime.interpret, num_warps=4, enable_fp_fusion=False, **chain.options(panel.device),
    )  # fmt: skip


def tiling(rows: int, columns: int, gated: bool, held: bool) -> tuple[int, int, int, int, int]:
    """(columns of a tile, rows, depth, warps, stages) of a launch for many rows: large tiles, unless too few keep the GPU busy."""
    if held:
        return 64 if gated else 128, 128, 64, 8, 4
    if triton.cdiv(rows, 128) * triton.cdiv(columns, 128 if gated else 256) >= 128:
        return 128 if gated else 256, 128, 64, 8, 4
    return 64 if gated else 128, 128, 64, 4, 4


def launch_wide(
    x: torch.Tensor,
    one: torch.Tensor,
    two: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    activation: int,
    splits: tuple[int, int],
    held: bool,
) -> None:
    """One launch for many rows and a matrix [N, K], or two that are gated, with the splits of the whole product; `held` in registers."""
    rows, cols = x.shape
    bn, bm, bk, warps, stages = tiling(rows, len(one), activation != NONE, held)
    wide[(triton.cdiv(rows, bm) * triton.cdiv(len(one), bn),)](
        TensorDescriptor.from_tensor(x, [bm, bk]), TensorDescriptor.from_tensor(one, [bn, bk]), TensorDescriptor.from_tensor(two, [bn, bk]),
        out, out if bias is None else bias, rows, len(one), cols, out.stride(0), splits[1],
        BN=bn, BM=bm, BK=bk, SPLITS=splits[0], HELD=held, ACTIVATION=activation, BIASED=bias is not None, BAND=BAND,
        INTERPRET=triton.knobs.runtime.interpret, num_warps=warps, num_stages=stages, enable_fp_fusion=False, **chain.options(x.device),
    )  # fmt: skip


def _check(x: torch.Tensor, out: torch.Tensor, columns: int, weights: tuple[DeviceWeight, ...]) -> None:
    for weight in weights:
        if x.shape[1] != weight.cols:
            raise ValueError(f"input width is {x.shape[1]}, expected {weight.cols}")
        operand = weight.planes["values"].dtype if weight.form is None else torch.float16
        if x.dtype != operand:
            raise ValueError(f"the input is {x.dtype}, expected {operand}")
    if out.shape != (x.shape[0], columns):
        raise ValueError(f"shape of the result is {list(out.shape)}, expected {[x.shape[0], columns]}")
    if not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError("the activations or the result are not contiguous")
