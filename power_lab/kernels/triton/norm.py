"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), with the residual addition before it; logit soft-capping.

One program is one row, in one block whose size and warps the width alone decides: a row's bits cannot depend on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from power_lab.kernels.triton import chain
from power_lab.kernels.triton.operand import to_operand
from power_lab.kernels.triton.parts import Parts, parts_of, summed

PLAN = "norm: one row a program, one block; (x * rsqrt(sum * (1 / width) + eps)) * w, rounded operation by operation"
CAPPED = 2048  # values of one program of `softcap`
ADDED = 1024  # values of one program of a sum alone, which rows of any width may have


@triton.jit
def root_scale(x, eps, D: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of a row whose padding is 0; at most 2 ulp."""
    return tl.rsqrt(tl.sum(x * x, 0) * (1.0 / D) + eps)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows"])
def _norm_rows(
    x, delta, post, weight, out, eps, rows, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
    bias=None, count=0, SPLITS: tl.constexpr = 1,
):  # fmt: skip
    """count: rows of each of the SPLITS parts that `delta` may be of, to whose sum the bias belongs."""
    chain.begin(PDL)
    i = tl.arange(0, BLOCK)
    inside = i < D
    if post is not None:
        after = tl.load(post + i, mask=inside, other=0.0)
    if weight is not None:
        factor = tl.load(weight + i, mask=inside, other=0.0)
    chain.wait(PDL)
    r = tl.program_id(0).to(tl.int64)
    at = (r if rows is None else tl.load(rows + r).to(tl.int64)) * D
    row = tl.load(x + at + i, mask=inside, other=0.0)
    if delta is not None:
        added = summed(delta + at + i, count.to(tl.int64) * D, bias, i, inside, SPLITS)
        if post is not None:
            added = (added * root_scale(added, eps, D)) * after
        row = row + added
        if rows is None:
            tl.store(x + at + i, row, mask=inside)
    if weight is not None:
        row = (row * root_scale(row, eps, D)) * factor
        tl.store(out + r * D + i, to_operand(row, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _add(x, delta, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    chain.begin(PDL)
    chain.wait(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(x + at, tl.load(x + at, mask=inside) + tl.load(delta + at, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _softcap(x, count, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    chain.begin(PDL)
    chain.wait(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0)
    # tanh(y) = 1 - 2 / (e^2y + 1), e^2y as 2^(y * 2 log2 e)
    power = tl.exp2(tl.div_rn(value, cap) * 2.8853900817779268)
    tl.store(x + at, (1.0 - tl.div_rn(2.0, power + 1.0)) * cap, mask=at < count)


def norm(
    x: torch.Tensor,
    delta: torch.Tensor | Parts | None,
    post: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
    rows: torch.Tensor | None = None,
) -> None:
    """x += delta, or x += rms_norm(delta) * post; then out = rms_norm(x) * weight. What is None is left out.

    x and delta f32 [R, D], post and weight f32 [D], out f32 or an operand [R, D], all contiguous. delta is only read. Without `delta`, x is
    only read; without `weight`, out is not touched. Of `Parts`, delta is the sum.

    rows: int32 [Q], numbers of rows of x. out [Q, D] then has the norms of these rows alone, in this order, and x is only read.
    """
    count, width = x.shape if rows is None else (len(rows), x.shape[1])
    delta, splits, bias = (None, 1, None) if delta is None else parts_of(delta)
    if count and delta is not None and splits == 1 and post is None and weight is None:
        _add[(triton.cdiv(x.numel(), ADDED),)](x, delta, x.numel(), ADDED, num_warps=4, **chain.options(x.device))
    elif count:
        options = {"num_warps": warps(width), "enable_fp_fusion": False, **chain.options(x.device)}
        _norm_rows[(count,)](
            x, delta, post, weight, out, eps, rows, width, triton.next_power_of_2(width),
            bias=bias, count=len(x), SPLITS=splits, **options,
        )  # fmt: skip


def warps(width: int) -> int:
    """Warps of a row. They decide the order in which squares are added. On an H200 these are within 0.1 us of the fastest."""
    return 16 if width > 4096 else min(max(triton.next_power_of_2(width) // 128, 1), 8)


def softcap(x: torch.Tensor, cap: float) -> None:
    """x = cap * tanh(x / cap), in place. x f32, contiguous, of any shape."""
    count = x.numel()
    options = {"num_warps": 4, "enable_fp_fusion": False, **chain.options(x.device)}
    _softcap[(triton.cdiv(count, CAPPED),)](x, count, cap, CAPPED, **options)
