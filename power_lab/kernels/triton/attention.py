"""Causal grouped-query attention over pages: one arithmetic for prefill, decode and verify.

A program's columns are query heads of neighbouring rows of one sequence. Scores are K·Qᵀ and values Vᵀ·E, so that keys lie along the
matrix unit's rows: a column's bits do not depend on how many columns a tile has. Keys are reduced in tiles of one page by the online
softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) inside canonical splits of `SPLIT` keys at absolute positions; splits are folded
in order.

A step of few rows shares the splits of a row out among programs, which leave their partial results in `scratch` for `_combine`; elsewhere
a program folds as it goes. Both run the same operations in the same order. Rows are grouped on the device, so that a captured
launch serves any batch of its shape: a group ends where the sequence changes, where positions do not follow each other, or at a
multiple of `Plan.rows`.

Columns of one group share tiles: a value that is not finite spoils earlier rows of its own group, never another sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from power_lab.kernels.ops import BLOCK, SPLIT, Batch

PLAN = (
    f"attention: bf16 K·Qᵀ and Vᵀ·E on 4 warps; tiles of {BLOCK}: exp2(fma(s, scale, -max)), sum; splits of {SPLIT} from zero; "
    "folded in order: fma(total, old, part * new)"
)
WARPS = 4  # 8 change the bits
FEW = 64  # rows up to which every row has programs of its own; more are grouped through a list
PROGRAMS = 264  # wanted at once: two for each multiprocessor of an H200
LAUNCHED = 2048  # at most, idle ones included
LISTED = 1024  # rows that the list's maker reads at a time
UNROLL = 16  # splits that `_combine` reads ahead
LOG2E = math.log2(math.e)
LOWEST = tl.constexpr(-1e38)  # a maximum below every score: finite, so that nothing here is inf - inf
INTERPRET = (
    triton.knobs.runtime.interpret
)  # bf16 arithmetic is broken in the interpreter, which computes in f32 instead


@dataclass(frozen=True, slots=True)
class Plan:
    """How one launch is cut. Nothing in it decides bits.

    Attributes:
        columns: of a tile; heads * rows of them are used.
        heads: query heads of a KV head that a program takes.
        rows: neighbouring rows that a program takes.
        head_blocks: programs that share the query heads of a KV head.
        programs: that share the splits of a group; 1 folds in place, without scratch.
        stages: tiles of keys and values on their way at once.
    """

    columns: int
    heads: int
    rows: int
    head_blocks: int
    programs: int
    stages: int


def plan(rows: int, q_heads: int, kv_heads: int, head_dim: int, pages: int) -> Plan:
    """The plan of a step of `rows` rows over tables of `pages` pages: shapes only."""
    group, width, few = q_heads // kv_heads, _width(head_dim), rows <= FEW
    columns = 64 if width <= 128 else 32
    if few:
        columns = 16 if rows * group <= 16 or width > 128 else 32
    heads = min(group, columns)
    blocks = triton.cdiv(group, heads)
    programs, heads_of_all = 1, kv_heads * blocks
    if (
        few and rows * heads_of_all < PROGRAMS
    ):  # rows may be one sequence's, and then share a program: more than enough are launched
        most = min(PROGRAMS // heads_of_all, LAUNCHED // (rows * heads_of_all), triton.cdiv(pages * BLOCK, SPLIT))
        programs = max(1, most)
    stages = (
        4 if width < 128 else 2 if width == 128 and not few else 3
    )  # what lets two programs share a multiprocessor, up to 128
    return Plan(columns, heads, columns // heads, blocks, programs, stages)


def scratch_floats(rows: int, q_heads: int, kv_heads: int, head_dim: int, pages: int) -> int:
    """f32 values of scratch that suffice for every step of up to `rows` rows over tables of `pages` pages."""
    return max(_floats(count, q_heads, kv_heads, head_dim, pages) for count in {*range(1, min(rows, FEW) + 1), rows})


def _floats(rows: int, q_heads: int, kv_heads: int, head_dim: int, pages: int) -> int:
    if rows > FEW:
        return rows + 1
    if plan(rows, q_heads, kv_heads, head_dim, pages).programs == 1:
        return 0
    return rows * q_heads * triton.cdiv(pages * BLOCK, SPLIT) * (_width(head_dim) + 2)


def _width(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit
def _opens(row, positions, table_of, ROWS: tl.constexpr):
    """Does a group begin at this row?"""
    before = tl.maximum(row - 1, 0)
    same = tl.load(table_of + row) == tl.load(table_of + before)
    follows = tl.load(positions + row) == tl.load(positions + before) + 1
    return (row % ROWS == 0) | (same & follows == 0)


@triton.jit(do_not_specialize=["rows"])
def _list_groups(positions, table_of, groups, rows, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """groups[0] = how many; groups[1:] = their first rows, ascending."""
    total = 0
    for at in range(0, rows, AT_ONCE):
        row = at + tl.arange(0, AT_ONCE)
        opens = (_opens(tl.minimum(row, rows - 1), positions, table_of, ROWS) & (row < rows)).to(tl.int32)
        tl.store(groups + total + tl.cumsum(opens, 0), row, mask=opens != 0)
        total += tl.sum(opens, 0)
    tl.store(groups, total)


@triton.jit
def _fold(peak, total, acc, m, sums, part):
    """Two partial softmax results as one: both rescaled to the larger maximum, and added."""
    top = tl.maximum(peak, m)
    old, new = tl.exp2(peak - top), tl.exp2(m - top)
    return top, tl.fma(total, old, sums * new), tl.fma(acc, old[None, :], part * new[None, :])


@triton.jit
def _finish(total, acc):
    """The softmax-weighted mean. Adding 0 makes -0 into 0: whether empty splits were folded in must not show."""
    return acc / total[None, :] + 0.0


@triton.jit
def _tile(
    q, keys, values, page, tile, rules, m, sums, part, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One page of keys and values into the running maximum m [C], sum [C] and weighted values [WIDTH, C] of a split."""
    position, factor, cap, low, high, window = rules
    i, d = tl.arange(0, PAGE), tl.arange(0, WIDTH)
    keys += page.to(tl.int64) * (KV_HEADS * PAGE * D)
    values += page.to(tl.int64) * (KV_HEADS * PAGE * D)
    at = i[:, None] * D + d[None, :]
    key = tile * PAGE + i
    inside = (d < D)[None, :]
    if MASKED:  # what lies outside is read as 0: it is multiplied by a weight of 0, and may hold anything
        inside = ((key >= low) & (key < high))[:, None] & inside
    if MASKED or D != WIDTH:
        k = tl.load(keys + at, mask=inside, other=0.0)
        v = tl.load(values + at, mask=inside, other=0.0)
    else:
        k = tl.load(keys + at)
        v = tl.load(values + at)
    if INTERPRET:
        k, v = k.to(tl.float32), v.to(tl.float32)
    score = tl.dot(k, q)
    if CAPPED:  # tanh(y) = 1 - 2 / (e^2y + 1)
        score = cap * (1.0 - 2.0 / (tl.exp2(score * factor[None, :]) + 1.0))
    if MASKED:
        seen = key[:, None] <= position[None, :]
        if WINDOWED:
            seen = seen & (key[:, None] > position[None, :] - window)
        score = tl.where(seen, score, float("-inf"))
    if CAPPED:
        top = tl.maximum(m, tl.max(score, 0))
        e = tl.exp2(score - top[None, :])
    else:
        top = tl.maximum(m, tl.max(score, 0) * factor)
        e = tl.exp2(tl.fma(score, factor[None, :], -top[None, :]))
    keep = tl.exp2(m - top)
    sums = sums * keep + tl.sum(e, 0)
    if not INTERPRET:
        e = e.to(tl.bfloat16)
    return top, sums, tl.dot(tl.trans(v), e, part * keep[None, :])


@triton.jit
def _sweep(
    q, paged, first, last, rules, to, m, sums, part, peak, total, acc,
    D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr, KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tiles first..last - 1: where one opens a split, the split before it is folded in, or left in scratch."""
    keys, values, table = paged
    following = tl.load(table + first, mask=first < last, other=0)
    for tile in tl.range(first, last):
        page, following = following, tl.load(table + tl.minimum(tile + 1, last - 1))  # early: nothing waits for it
        if tile % TILES == 0:
            if SHARED:
                _leave(to, tile // TILES - 1, tile > first, m, sums, part, WIDTH)
            else:
                peak, total, acc = _fold(peak, total, acc, m, sums, part)
            m = tl.full((COLUMNS,), LOWEST, tl.float32)
            sums = tl.zeros((COLUMNS,), tl.float32)
            part = tl.zeros((WIDTH, COLUMNS), tl.float32)
        m, sums, part = _tile(
            q,
            keys,
            values,
            page,
            tile,
            rules,
            m,
            sums,
            part,
            D,
            WIDTH,
            PAGE,
            KV_HEADS,
            MASKED,
            WINDOWED,
            CAPPED,
            INTERPRET,
        )
    return m, sums, part, peak, total, acc


@triton.jit
def _leave(to, split, wanted, m, sums, part, WIDTH: tl.constexpr):
    """A split's result into scratch, which `_combine` reads."""
    stats, parts, at, used = to
    used = used & wanted
    at += split
    tl.store(stats + 2 * at, m, mask=used)
    tl.store(stats + 2 * at + 1, sums, mask=used)
    d = tl.arange(0, WIDTH)
    tl.store(parts + at[None, :] * WIDTH + d[:, None], part, mask=used[None, :])


@triton.jit
def _group(
    first, qkv, positions, table_of, tables, temperature, keys, values, out, stats, parts, rows, pages, splits, window, scale, cap,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SHARED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The rows of the group that `first` begins."""
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    column, d = tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    ends = (first + column >= rows) | _opens(tl.minimum(first + column, rows - 1), positions, table_of, ROWS)
    count = tl.min(tl.where(ends & (column > 0), column, ROWS), 0)
    start = tl.load(positions + first)
    low, high = 0, start + count  # the keys that any of the rows sees
    if WINDOWED:
        low = tl.maximum(start + 1 - window, 0)
    first_tile, last_tile = low // PAGE, (high + PAGE - 1) // PAGE
    if SHARED:
        first_split, last_split = first_tile // TILES, (last_tile + TILES - 1) // TILES
        each = (last_split - first_split + tl.num_programs(2) - 1) // tl.num_programs(2)
        mine = first_split + tl.program_id(2) * each
        first_tile, last_tile = tl.maximum(first_tile, mine * TILES), tl.minimum(last_tile, (mine + each) * TILES)
    if first_tile < last_tile:
        kv_head = tl.program_id(0) // HEAD_BLOCKS
        within = tl.program_id(0) % HEAD_BLOCKS * HEADS + column % HEADS
        used = (column // HEADS < count) & (within < GROUP)
        row, head = (first + column // HEADS).to(tl.int64), kv_head * GROUP + within
        at = row * Q_HEADS + head
        position = start + tl.minimum(column // HEADS, count - 1)
        factor = tl.full((COLUMNS,), 1.0, tl.float32) * scale
        if temperature is not None:
            factor *= tl.load(temperature + position)
        source = (row * ((Q_HEADS + 2 * KV_HEADS) * D) + head * D)[:, None] + d[None, :]
        q = tl.load(qkv + source, mask=used[:, None] & (d < D)[None, :], other=0.0)
        q = tl.trans(q if INTERPRET else q.to(tl.bfloat16))
        table = tables + tl.load(table_of + first).to(tl.int64) * pages
        paged = (keys + kv_head * (PAGE * D), values + kv_head * (PAGE * D), table)
        rules = (position, factor, cap, low, high, window)
        to = (stats, parts, at * splits, used)
        m = tl.full((COLUMNS,), LOWEST, tl.float32)
        sums = tl.zeros((COLUMNS,), tl.float32)
        part = tl.zeros((WIDTH, COLUMNS), tl.float32)
        peak, total, acc = m, sums, part
        if SHARED:
            m, sums, part, peak, total, acc = _sweep(
                q, paged, first_tile, last_tile, rules, to, m, sums, part, peak, total, acc,
                D, WIDTH, COLUMNS, PAGE, TILES, KV_HEADS, SHARED, True, WINDOWED, CAPPED, INTERPRET,
            )  # fmt: skip
            _leave(to, (last_tile - 1) // TILES, True, m, sums, part, WIDTH)
        else:
            bare = first_tile  # from here to `edge` every row sees every key: the same bits without a mask
            if WINDOWED:
                bare = tl.minimum((tl.maximum(high - window, 0) + PAGE - 1) // PAGE, last_tile)
                m, sums, part, peak, total, acc = _sweep(
                    q, paged, first_tile, bare, rules, to, m, sums, part, peak, total, acc,
                    D, WIDTH, COLUMNS, PAGE, TILES, KV_HEADS, SHARED, True, WINDOWED, CAPPED, INTERPRET,
                )  # fmt: skip
            edge = tl.maximum((start + 1) // PAGE, bare)
            m, sums, part, peak, total, acc = _sweep(
                q, paged, bare, edge, rules, to, m, sums, part, peak, total, acc,
                D, WIDTH, COLUMNS, PAGE, TILES, KV_HEADS, SHARED, False, WINDOWED, CAPPED, INTERPRET,
            )  # fmt: skip
            m, sums, part, peak, total, acc = _sweep(
                q, paged, edge, last_tile, rules, to, m, sums, part, peak, total, acc,
                D, WIDTH, COLUMNS, PAGE, TILES, KV_HEADS, SHARED, True, WINDOWED, CAPPED, INTERPRET,
            )  # fmt: skip
            peak, total, acc = _fold(peak, total, acc, m, sums, part)
            place = out + at[None, :] * D + d[:, None]
            tl.store(place, _finish(total, acc), mask=used[None, :] & (d < D)[:, None])


@triton.jit(do_not_specialize=["rows", "pages", "splits", "window"])
def _attend(
    qkv, positions, table_of, tables, temperature, keys, values, out, stats, parts, groups,
    rows, pages, splits, window, scale, cap,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SHARED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Groups of rows, HEADS query heads of one KV head; if SHARED, only some splits of theirs, whose results go to `stats` and `parts`."""
    begin, step = tl.program_id(1), tl.num_programs(1)
    if groups is None:
        end = begin + _opens(begin, positions, table_of, ROWS).to(tl.int32)
    else:
        end = tl.load(groups)
    for item in tl.range(begin, end, step, num_stages=1):
        first = item
        if groups is not None:
            first = tl.load(groups + end - item)  # the last rows of a prompt have the most keys: they begin first
        _group(
            first, qkv, positions, table_of, tables, temperature, keys, values, out, stats, parts,
            rows, pages, splits, window, scale, cap,
            Q_HEADS, KV_HEADS, D, WIDTH, PAGE, TILES, COLUMNS, HEADS, ROWS, HEAD_BLOCKS, WINDOWED, CAPPED, SHARED, INTERPRET,
        )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "window"])
def _combine(
    positions, stats, parts, out, splits, window,
    Q_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Fold the splits that a row sees, one query head a program."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    first, last = 0, position // SPLIT + 1
    if WINDOWED:
        first = tl.maximum(position + 1 - window, 0) // SPLIT
    at = (row * Q_HEADS + tl.program_id(1)) * splits
    one, d = tl.arange(0, 1), tl.arange(0, WIDTH)
    peak = tl.full((1,), LOWEST, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((WIDTH, 1), tl.float32)
    for split in tl.range(first, last, UNROLL):
        for i in tl.static_range(UNROLL):
            here = at + split + i + one
            there = split + i + one < last
            m = tl.load(stats + 2 * here, mask=there, other=LOWEST)
            sums = tl.load(stats + 2 * here + 1, mask=there, other=0.0)
            part = tl.load(parts + here[None, :] * WIDTH + d[:, None], mask=there[None, :], other=0.0)
            peak, total, acc = _fold(peak, total, acc, m, sums, part)
    place = out + (row * Q_HEADS + tl.program_id(1)) * D + d[:, None] + one[None, :]
    tl.store(place, _finish(total, acc), mask=(d < D)[:, None])


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
) -> None:
    """Causal grouped-query attention of each row over positions 0..positions[r], as in `Ops.attention`.

    qkv f32 [R, (q_heads + 2 * kv_heads) * head_dim]: queries, rounded to bf16 here. keys and values as made by `rope.kv_cache`. out bf16
    or f32 [R, q_heads * head_dim]. scratch f32, of at least `scratch_floats` values. scale and temperatures are positive.
    cut: a plan other than `plan`'s, to measure it.
    """
    rows, pages = qkv.shape[0], batch.tables.shape[1]
    kv_heads, dim = keys.shape[1], keys.shape[3]
    cut, splits = cut or plan(rows, q_heads, kv_heads, dim, pages), triton.cdiv(pages * BLOCK, SPLIT)
    width, groups, items = _width(dim), None, rows
    if rows > FEW:
        groups = scratch.view(torch.int32)
        items = triton.cdiv(rows, cut.rows) + min(batch.tables.shape[0], rows)
        _list_groups[(1,)](batch.positions, batch.table_of, groups, rows, cut.rows, LISTED, num_warps=4)
    shared, capped = cut.programs > 1, softcap > 0
    parts, stats = scratch, scratch[rows * q_heads * splits * width :] if shared else scratch
    _attend[(kv_heads * cut.head_blocks, items, cut.programs)](
        qkv, batch.positions, batch.table_of, batch.tables, temperature, keys, values, out, stats, parts, groups,
        rows, pages, splits, window, 2 * LOG2E * scale / softcap if capped else LOG2E * scale, LOG2E * softcap,
        q_heads, kv_heads, dim, width, BLOCK, SPLIT // BLOCK,
        cut.columns, cut.heads, cut.rows, cut.head_blocks,
        window > 0, capped, shared, INTERPRET,
        num_warps=WARPS, num_stages=cut.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if shared:
        _combine[(rows, q_heads)](
            batch.positions, stats, parts, out, splits, window, q_heads, dim, width, SPLIT, window > 0, UNROLL,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
