"""Launches of products of many rows with stored codes whose sums are scaled group by group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from power_lab.kernels.triton import chain
from power_lab.kernels.triton.grouped_wide import added, grouped_wide, spread
from power_lab.kernels.triton.planes import DeviceWeight, Form, arguments

BAND = 8  # row tiles that are worked on side by side, so that their panels come from the cache
ROWS = 128  # of a tile, and what sums of x are padded to


@dataclass(frozen=True, slots=True)
class Tile:
    """How many rows are launched. None of it decides bits.

    Attributes:
        bn: rows of the panel in a tile. turn: groups of a step. warps, stages: as of `linear.Shape`.
    """

    bn: int
    turn: int
    warps: int
    stages: int


def tile(cols: int, form: Form) -> Tile:
    return Tile(128, 2 if cols % (2 * form.group) == 0 and not form.affine else 1, 8, 4)


def launch(
    x: torch.Tensor,
    weights: tuple[DeviceWeight, ...],
    out: torch.Tensor,
    scratch: torch.Tensor,
    bias: torch.Tensor | None,
    activation: int,
    splits: tuple[int, int],
    chosen: Tile | None = None,
) -> None:
    """out = x [R, K] times weights of one type side by side, or gated, through panels in `scratch` f32, as many columns as it holds.

    splits: as of `linear.reduction`. activation: as of `linear`, 0 for none.
    """
    form, cols = weights[0].form, x.shape[1]
    assert form is not None, "plain values need no panels"
    groups = cols // form.group
    rows = max(1, scratch.numel() // (4 * groups * ROWS)) * ROWS if form.affine else len(x)
    for first in range(0, len(x), rows):
        part, result = x[first : first + rows], out[first : first + rows]
        padded = triton.cdiv(len(part), ROWS) * ROWS
        sums = scratch[: groups * padded if form.affine else 0]
        if form.affine:
            added[padded // ROWS, groups](
                part, sums, len(part), cols, padded, BM=ROWS, GROUP=form.group,
                INTERPRET=triton.knobs.runtime.interpret, num_warps=1, enable_fp_fusion=False, **chain.options(x.device),
            )  # fmt: skip
        rest = scratch[sums.numel() :]
        _columns(part, weights, result, sums, rest, bias, activation, splits, chosen or tile(cols, form))


def _columns(
    x: torch.Tensor,
    weights: tuple[DeviceWeight, ...],
    out: torch.Tensor,
    sums: torch.Tensor,
    scratch: torch.Tensor,
    bias: torch.Tensor | None,
    activation: int,
    splits: tuple[int, int],
    t: Tile,
) -> None:
    form, (rows, cols) = weights[0].form, x.shape
    assert form is not None
    groups, kinds, parts = cols // form.group, 2 if form.affine else 1, 2 if activation else 1
    size = (
        triton.cdiv(cols // 2 + kinds * groups, 4) * 4
    )  # floats of a row of the panel: so many that factors are aligned
    most = scratch.numel() // (parts * size) // 8 * 8
    column = 0
    for weight in weights[:1] if activation else weights:
        for first in range(0, weight.rows, most):
            count = min(most, weight.rows - first)
            height = triton.cdiv(count, 8) * 16 if activation else count
            panel = scratch[: height * cols // 2].view(torch.bfloat16).view(height, cols)
            factors = scratch[height * cols // 2 : height * size]
            for part, one in enumerate((weight, weights[-1])[:parts]):
                spread[triton.cdiv(height // parts, 64), triton.cdiv(cols, form.tile)](
                    arguments(one), panel, factors, first, count, height, part, cols, PARTS=parts, BN=64, FORM=form,
                    INTERPRET=triton.knobs.runtime.interpret, num_warps=2, enable_fp_fusion=False, **chain.options(x.device),
                )  # fmt: skip
            result = out[:, column : column + count]
            grouped_wide[(triton.cdiv(rows, ROWS) * triton.cdiv(height, t.bn),)](
                TensorDescriptor.from_tensor(x, [ROWS, form.group]), TensorDescriptor.from_tensor(panel, [t.bn, form.group]), factors, sums,
                result, result if bias is None else bias[column : column + count],
                rows, count, height, cols, out.stride(0), triton.cdiv(rows, ROWS) * ROWS, splits[1],
                GROUP=form.group, TURN=t.turn, AFFINE=form.affine, BN=t.bn, BM=ROWS, SPLITS=splits[0], ACTIVATION=activation,
                BIASED=bias is not None, BAND=BAND, INTERPRET=triton.knobs.runtime.interpret,
                num_warps=t.warps, num_stages=t.stages, enable_fp_fusion=False, **chain.options(x.device),
            )  # fmt: skip
            column += count
