"""Causal grouped-query attention over pages: one arithmetic for prefill, decode and verify.

A line of the matrix unit is one query head of one row; a program has 64 lines and 4 warps, whatever the step, since fewer lines take other
instructions. A line's keys are reduced within one warp, so that its bits do not depend on what the other lines hold. Keys are reduced in
tiles of one page by the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) inside canonical splits of `split` keys at absolute
positions; splits are folded in order.

Rows are grouped on the device, so that a captured launch serves any batch of its shape: a group ends where the sequence changes, where
positions do not follow each other, or at a multiple of `Plan.rows`. Where a program walks all keys of a group, the groups are listed, once
for all layers of a step: positions and tables are the same for all, whatever their windows. Rows of one group share tiles of keys and
values: a value that is not finite spoils earlier rows of its own group, never another sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from power_lab.kernels.ops import BLOCK, Batch
from power_lab.kernels.triton import chain
from power_lab.kernels.triton.attend import attend_many, list_groups
from power_lab.kernels.triton.share import attend_few, combine

PLAN = (
    f"attention: bf16 Q·Kᵀ and E·V, 64 lines and 4 warps; tiles of {BLOCK} keys: exp2(fma(s, scale, -max)), sum; splits of 128 keys "
    "(64 for heads wider than 128) from zero; folded in order: fma(total, old, part * new)"
)
LINES, WARPS = 64, 4
FEW = 64  # rows up to which splits are shared out
SEVERAL = 17  # rows from which on programs are so many that two have to fit a multiprocessor
PROGRAMS = 264  # that share them: two for each multiprocessor of an H200
VALUES = 128  # columns of values that a program takes at most: more would not fit into its registers
SCRATCH = 1 << 26  # f32 values that splits' results may take: where a table is too wide for that, none are shared out
# Rows from which on, and pages of a table up to which, each program walks all keys of its group: none of them is long.
FULL, SHORT = 49, 128
LONG = 256  # pages of a table from which on it is taken to hold long contexts
LISTED = 1024  # rows that the list's maker reads at a time
AHEAD = 32  # splits that are read ahead of their fold
LOG2E = math.log2(math.e)
INTERPRET = triton.knobs.runtime.interpret  # bf16 arithmetic is broken in the interpreter, which computes in f32


@dataclass(frozen=True, slots=True)
class Plan:
    """How one launch is cut. Nothing in it decides bits.

    Attributes:
        heads: query heads of a KV head that a program takes.
        rows: neighbouring rows that a program takes; heads * rows lines are used.
        head_blocks: programs that share the query heads of a KV head.
        programs: that share the splits of all groups; 0: one program walks all keys of a group.
        stages: tiles of keys and values on their way at once.
        described: tiles are read through tensor descriptors, by the copy engine.
        bare: tiles of which every row sees every key are gone through without a mask, in a loop of their own; else there is one loop, whose
            tiles are all on their way sooner and take less shared memory.
    """

    heads: int
    rows: int
    head_blocks: int
    programs: int
    stages: int
    described: bool = False
    bare: bool = True


@dataclass(frozen=True, slots=True)
class Way:
    """How keys are gone through. It decides time alone.

    Attributes:
        rows: of a step, from which on it is taken.
        pages: of its tables, from which on it is taken.
        whole: one program walks all keys of a group, else their splits are shared out.
        stages, described, bare: as in `Plan`.
    """

    rows: int
    pages: int
    whole: bool
    stages: int
    described: bool = False
    bare: bool = True


def ways(head_dim: int) -> tuple[Way, ...]:
    """Of which a step takes the last that it reaches. Times decide: bench/gpu_walks.py takes them, docs/lab-notes.md has them."""
    always = Way(1, 1, True, 2), Way(1, 1, False, 1)  # the first: where results of splits do not fit into scratch
    if head_dim == 128:
        return (
            Way(1, 1, True, 2, True),
            Way(1, 1, False, 2, True),
            Way(FULL, 1, True, 3, True, bare=False),
            Way(FULL, SHORT + 1, False, 2, True),
            Way(FEW + 1, 1, True, 2, True),
        )
    if head_dim == 256:
        return (
            *always,
            Way(1, 1, False, 3, True, bare=False),
            Way(SEVERAL, 1, False, 1),
            Way(1, SHORT + 1, False, 2, True),
            Way(9, SHORT + 1, False, 1),
            Way(FULL, 1, True, 3, True),
            Way(FULL, SHORT + 1, False, 1),
            Way(FEW + 1, 1, True, 3, True),
        )
    if head_dim > 128:
        return *always, Way(FEW + 1, 1, True, 2)
    long = Way(FULL, SHORT + 1, False, 1)
    if head_dim == 64:
        whole = Way(FULL, 1, True, 3, True)
        return (
            *always,
            Way(1, LONG, False, 2, True),
            whole,
            long,
            Way(FULL, LONG, False, 2, True),
            Way(FEW + 1, 1, True, 3, True),
        )
    return *always, Way(FULL, 1, True, 2), long, Way(FEW + 1, 1, True, 2)


@lru_cache(maxsize=4096)
def plan(rows: int, q_heads: int, kv_heads: int, head_dim: int, pages: int) -> Plan:
    """The plan of a step of `rows` rows over tables of `pages` pages: shapes only."""
    group = q_heads // kv_heads
    heads = min(group, LINES)
    blocks = triton.cdiv(group, heads)
    way, splits = _way(rows, q_heads, head_dim, pages), _splits(pages, head_dim)
    programs = 0 if way.whole else min(PROGRAMS, rows * kv_heads * blocks * value_blocks(head_dim) * splits)
    return Plan(heads, LINES // heads, blocks, programs, way.stages, way.described, way.bare)


def split(head_dim: int) -> int:
    """Keys of a canonical split, of which the width of a head alone decides."""
    return 128 if head_dim <= 128 else 64


@lru_cache(maxsize=256)
def scratch_floats(rows: int, q_heads: int, kv_heads: int, head_dim: int, pages: int) -> int:
    """f32 values of scratch that suffice for every step of up to `rows` rows over tables of `pages` pages."""
    shared = (n for n in range(1, min(rows, FEW) + 1) if not _way(n, q_heads, head_dim, pages).whole)
    return max((_floats(n, q_heads, head_dim, pages) for n in shared), default=0)


def _way(rows: int, q_heads: int, head_dim: int, pages: int) -> Way:
    """The last of `ways` that a step reaches; none that leaves results of splits where scratch may not hold them."""
    fits = _floats(rows, q_heads, head_dim, pages) <= SCRATCH
    return next(
        way for way in reversed(ways(head_dim)) if rows >= way.rows and pages >= way.pages and (way.whole or fits)
    )


def _floats(rows: int, q_heads: int, head_dim: int, pages: int) -> int:
    return rows * q_heads * _splits(pages, head_dim) * (_width(head_dim) + 2)


def _splits(pages: int, head_dim: int) -> int:
    return triton.cdiv(pages * BLOCK, split(head_dim))


def value_blocks(head_dim: int) -> int:
    """Programs that share the columns of a head's values. Each computes the scores for itself."""
    return triton.cdiv(_width(head_dim), VALUES)


def _width(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def group(batch: Batch, attentions: Iterable[tuple[int, int, int]], room: torch.Tensor) -> Batch:
    """As `Ops.group`: lists for those layers whose programs walk all keys of a group, one for each number of rows in it."""
    rows, pages = batch.positions.shape[0], batch.tables.shape[1]
    cuts = [plan(rows, *heads, pages) for heads in attentions]
    sizes = sorted({cut.rows for cut in cuts if cut.programs == 0})
    if not sizes:
        return batch
    groups = {size: list_rows(batch, size, room[i * (rows + 1) :][: rows + 1]) for i, size in enumerate(sizes)}
    return replace(batch, groups=groups)


def list_rows(batch: Batch, size: int, out: torch.Tensor) -> torch.Tensor:
    """out int32 [R + 1] = how many groups of up to `size` rows there are, and the first row of each, ascending."""
    rows, join = batch.positions.shape[0], chain.options(batch.positions.device)
    list_groups[(1,)](batch.positions, batch.table_of, out, rows, size, LISTED, num_warps=4, **join)
    return out


def attention(
    qkv: torch.Tensor,
    batch: Batch,
    q_heads: int,
    scale: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    window: int,
    softcap: float,
    temperature: torch.Tensor | None,
    scratch: torch.Tensor,
    cut: Plan | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Causal grouped-query attention of each row over positions 0..positions[r], as in `Ops.attention`.

    qkv f32 [R, q_heads * head_dim or more]: bf16 queries in it, as `rope.rope_write` leaves them. keys and values as made by
    `rope.kv_cache`. out f32 or an operand [R, q_heads * head_dim]. scratch f32, of at least `scratch_floats` values. scale and
    temperatures are positive. batch as `group` left it, or with `list_rows` of `cut.rows` in its groups.
    cut: a plan other than `plan`'s, to measure it. sinks: f32 [q_heads].
    """
    rows, pages = qkv.shape[0], batch.tables.shape[1]
    kv_heads, dim = keys.shape[1], keys.shape[3]
    cut, width, keys_of_split = cut or plan(rows, q_heads, kv_heads, dim, pages), _width(dim), split(dim)
    capped, units, join = softcap > 0, kv_heads * cut.head_blocks * value_blocks(dim), chain.options(qkv.device)
    factors = (2 * LOG2E * scale / softcap, LOG2E * softcap) if capped else (LOG2E * scale, 0.0)
    queries, where = qkv.view(torch.bfloat16), (batch.positions, batch.table_of, batch.tables, temperature)
    sizes = (
        q_heads, kv_heads, qkv.shape[1], dim, width, min(width, VALUES), BLOCK, keys_of_split // BLOCK,
        LINES, cut.heads, cut.rows, cut.head_blocks,
    )  # fmt: skip
    tiles = (_tiles(keys, width), _tiles(values, min(width, VALUES))) if cut.described else (None, None)
    options = {"num_warps": WARPS, "num_stages": cut.stages, "enable_fp_fusion": False, **join}
    if cut.programs == 0:
        groups = _listed(batch, cut)
        items = triton.cdiv(rows, cut.rows) + min(batch.tables.shape[0], rows)
        attend_many[(units, items)](
            queries, *where, sinks, keys, values, *tiles, out, groups, rows, pages, window, *factors, *sizes,
            cut.bare, window > 0, capped, INTERPRET, **options,
        )  # fmt: skip
        return
    splits = _splits(pages, dim)
    parts, stats = scratch, scratch[rows * q_heads * splits * width :]
    attend_few[(cut.programs,)](
        queries, *where, keys, values, *tiles, parts, stats, rows, pages, splits, window, *factors, *sizes,
        triton.next_power_of_2(rows), cut.bare, window > 0, capped, INTERPRET, **options,
    )  # fmt: skip
    combine[(rows, q_heads)](
        batch.positions, parts, stats, sinks, out, splits, window, q_heads, dim, width, keys_of_split, window > 0, AHEAD,
        num_warps=max(1, width // 32), enable_fp_fusion=False, **join,
    )  # fmt: skip


def _listed(batch: Batch, cut: Plan) -> torch.Tensor:
    groups = (batch.groups or {}).get(cut.rows)
    if groups is None:
        raise ValueError(
            f"A batch of {len(batch.positions)} rows attends in groups that are not listed: call Ops.group before."
        )
    return groups


def _tiles(cache: torch.Tensor, width: int) -> TensorDescriptor:
    """A cache as rows, which are read a page at a time, 0 beyond its own width."""
    dim = cache.shape[-1]
    return TensorDescriptor(cache, [cache.numel() // dim, dim], [dim, 1], [BLOCK, width])
