"""Attention of few rows: their splits are shared out evenly among programs, and folded by a launch of its own."""

# pyright: reportPossiblyUnbound=false
# What a branch on constants leaves out is not compiled.

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.triton import chain
from power_lab.kernels.triton.attend import (
    LOWEST,
    afresh,
    drained,
    finish,
    group_of,
    nothing,
    opens,
    tile_of,
    unit_of,
    weigh,
)
from power_lab.kernels.triton.operand import to_operand


@triton.jit
def _leave(to, column, parts, stats, splits, split, m, sums, part, WIDTH: tl.constexpr, VALUES: tl.constexpr):
    """A split's result into scratch."""
    at, used = to
    at = at * splits + split
    d = column + tl.arange(0, VALUES)
    tl.store(stats + 2 * at, m, mask=used)
    tl.store(stats + 2 * at + 1, sums, mask=used)
    tl.store(parts + at[:, None] * WIDTH + d[None, :], part, mask=used[:, None])


@triton.jit
def _stretch(
    q, paged, first, last, end, rules, to, parts, stats, splits, m, sums, part,
    D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, M: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr,
    KV_HEADS: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tiles first..last - 1: where one ends a split, it is left in scratch, but for the last before `end`."""
    table, _, column = paged[4]
    following = tl.load(table + first, mask=first < last, other=0)
    for tile in tl.range(first, last):
        page, following = following, tl.load(table + tl.minimum(tile + 1, last - 1))  # early: nothing waits for it
        m, sums, part = tile_of(
            q, paged, page, tile, rules, m, sums, part,
            D, WIDTH, VALUES, PAGE, KV_HEADS, MASKED, WINDOWED, CAPPED, INTERPRET,
        )  # fmt: skip
        if ((tile + 1) % TILES == 0) & (tile + 1 < end):
            _leave(to, column, parts, stats, splits, tile // TILES, m, sums, part, WIDTH, VALUES)
            m, sums, part = afresh(sums, part, M, VALUES, TILES)
    return m, sums, part


@triton.jit
def _read(at, d, parts, stats, splits, split, last, WIDTH: tl.constexpr):
    """What a split left of a pair; nothing from `last` on."""
    here = at * splits + split
    m = tl.load(stats + 2 * here, mask=split < last, other=LOWEST)
    sums = tl.load(stats + 2 * here + 1, mask=split < last, other=0.0)
    return m, sums, tl.load(parts + here * WIDTH + d, mask=split < last, other=0.0)


@triton.jit
def _ahead(at, d, parts, stats, splits, split, last, peak, total, acc, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Fold COUNT splits from `split` on, as far as there are some: all are on their way before the first is folded, in order."""
    found = (_read(at, d, parts, stats, splits, split, last, WIDTH),)
    for i in tl.static_range(1, COUNT):
        found = found + (_read(at, d, parts, stats, splits, split + i, last, WIDTH),)  # noqa: RUF005 (as Triton compiles it)
    tl.debug_barrier()  # or else the compiler, sparing registers, reads few at a time
    for i in tl.static_range(COUNT):
        m, sums, part = found[i]
        peak, old, new = weigh(peak, m)
        total, acc = tl.fma(total, old, sums * new), tl.fma(acc, old, part * new)
    return peak, total, acc


@triton.jit
def _shares(
    positions, table_of, rows, window,
    ROWS: tl.constexpr, LISTED: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Of every row: its number, 1 past the end of its group, and how many tiles the group has, from the start of its first split on.

    Rows that open no group have none.
    """
    row = tl.arange(0, LISTED)
    safe = tl.minimum(row, rows - 1)
    first = opens(safe, positions, table_of, ROWS) & (row < rows)
    later = first[None, :] & (row[None, :] > row[:, None])
    end = tl.min(tl.where(later, row[None, :], rows), 1)
    start = tl.load(positions + safe)
    low = tl.maximum(start + 1 - window, 0) if WINDOWED else start * 0
    size = (start + end - row + PAGE - 1) // PAGE - low // (PAGE * TILES) * TILES
    return row, end, tl.where(first, size, 0)


@triton.jit
def _item(at, stop, tiles, shares, TILES: tl.constexpr):
    """What lies at place `at` of all tiles of all units, laid end to end: the unit, first row and 1 past the last of the group, where its
    tiles begin and how many they are, and which of its splits, of those before place `stop`, begin here."""
    row, ends, begins, sizes = shares
    unit = at // tiles
    offset = at - unit * tiles
    mine = (begins <= offset) & (offset < begins + sizes)
    first, end = tl.sum(tl.where(mine, row, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
    begin, size = tl.sum(tl.where(mine, begins, 0), 0), tl.sum(tl.where(mine, sizes, 0), 0)
    from_split = (offset - begin + TILES - 1) // TILES
    to_split = (tl.minimum(stop - unit * tiles - begin, size) + TILES - 1) // TILES
    return unit, first, end, begin, size, from_split, to_split


@triton.jit
def _call(
    unit, table, tile, last, keys, values,
    D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Prefetch a unit's keys and values of COUNT tiles, but for those behind the last: PAGE * D bf16 values of each, in lines of 64."""
    line = tl.minimum(tl.arange(0, WIDTH), PAGE * D // 64 - 1) * 64
    for i in tl.static_range(COUNT):
        page = tl.load(table + tl.minimum(tile + i, last)).to(tl.int64)
        at = (page * KV_HEADS + unit_of(unit, HEAD_BLOCKS, WIDTH, VALUES)[0]) * (PAGE * D) + line
        chain.prefetch(keys + at, True)
        chain.prefetch(values + at, True)


@triton.jit(
    do_not_specialize=["rows", "pages", "splits", "window"],
    do_not_specialize_on_alignment=["positions", "table_of", "tables"],
)
def attend_few(
    queries, positions, table_of, tables, temperature, keys, values, key_tiles, value_tiles, parts, stats,
    rows, pages, splits, window, scale, cap,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PITCH: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    TILES: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    LISTED: tl.constexpr, BARE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All groups and units, their splits shared out evenly among the programs: each takes the splits that begin in its part of all tiles,
    and leaves their results for `combine`."""
    chain.begin(PDL)
    row, ends, sizes = _shares(positions, table_of, rows, window, ROWS, LISTED, PAGE, TILES, WINDOWED)
    shares = row, ends, tl.cumsum(sizes, 0) - sizes, sizes
    tiles = tl.sum(sizes, 0)
    UNITS: tl.constexpr = KV_HEADS * HEAD_BLOCKS * (WIDTH // VALUES)
    work = tiles.to(tl.int64) * UNITS
    at = (work * tl.program_id(0) // tl.num_programs(0)).to(tl.int32)
    stop = (work * (tl.program_id(0) + 1) // tl.num_programs(0)).to(tl.int32)
    if PDL:  # noqa: SIM102 (a constant, so that the branch is compiled or left out)
        if at < stop:  # the first split's pages are called while the kernel before ends
            unit, first, end, begin, size, from_split, to_split = _item(at, stop, tiles, shares, TILES)
            low = tl.maximum(tl.load(positions + first) + 1 - window, 0) if WINDOWED else 0
            tile = tl.maximum(low // PAGE, (low // (PAGE * TILES) + from_split) * TILES)
            table = tables + tl.load(table_of + first).to(tl.int64) * pages
            _call(unit, table, tile, pages - 1, keys, values, D, WIDTH, VALUES, PAGE, KV_HEADS, HEAD_BLOCKS, TILES)
    chain.wait(PDL)
    while at < stop:
        unit, first, end, begin, size, from_split, to_split = _item(at, stop, tiles, shares, TILES)
        if from_split < to_split:
            q, place, rules, to = group_of(
                unit, first, end - first, queries, positions, table_of, tables, temperature, pages, window, scale, cap,
                Q_HEADS, KV_HEADS, PITCH, D, WIDTH, VALUES, PAGE, M, HEADS, HEAD_BLOCKS, WINDOWED, INTERPRET,
            )  # fmt: skip
            paged = keys, values, key_tiles, value_tiles, place
            low, high = rules[3], rules[4]
            first_split = low // (PAGE * TILES)
            from_tile = tl.maximum(low // PAGE, (first_split + from_split) * TILES)
            to_tile = tl.minimum((high + PAGE - 1) // PAGE, (first_split + to_split) * TILES)
            m, sums, part = nothing(M, VALUES)
            if BARE and not WINDOWED:  # every row sees every key below: the same bits without a mask
                edge = tl.minimum(tl.maximum((high - (end - first) + 1) // PAGE, from_tile), to_tile)
                m, sums, part = _stretch(
                    q, paged, from_tile, edge, to_tile, rules, to, parts, stats, splits, m, sums, part,
                    D, WIDTH, VALUES, M, PAGE, TILES, KV_HEADS, False, WINDOWED, CAPPED, INTERPRET,
                )  # fmt: skip
                from_tile = edge
            m, sums, part = _stretch(
                q, paged, from_tile, to_tile, to_tile, rules, to, parts, stats, splits, m, sums, part,
                D, WIDTH, VALUES, M, PAGE, TILES, KV_HEADS, True, WINDOWED, CAPPED, INTERPRET,
            )  # fmt: skip
            _leave(to, place[2], parts, stats, splits, first_split + to_split - 1, m, sums, part, WIDTH, VALUES)
        at = unit * tiles + begin + size


@triton.jit(do_not_specialize=["splits", "window"], do_not_specialize_on_alignment=["positions"])
def combine(
    positions, parts, stats, sinks, out, splits, window,
    Q_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fold the splits that a row sees: one row and query head a program."""
    chain.begin(PDL)
    position = tl.load(positions + tl.program_id(0))
    first, last = 0, position // SPLIT + 1
    if WINDOWED:
        first = tl.maximum(position + 1 - window, 0) // SPLIT
    pair = tl.program_id(0).to(tl.int64) * Q_HEADS + tl.program_id(1)
    chain.wait(PDL)
    d = tl.arange(0, WIDTH)
    peak = tl.full((WIDTH,), LOWEST, tl.float32)
    total, acc = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    split = first
    while split + AHEAD <= last:
        peak, total, acc = _ahead(pair, d, parts, stats, splits, split, last, peak, total, acc, WIDTH, AHEAD)
        split += AHEAD
    while split < last:
        peak, total, acc = _ahead(pair, d, parts, stats, splits, split, last, peak, total, acc, WIDTH, 4)
        split += 4
    total = drained(total, peak, sinks, tl.program_id(1))
    tl.store(out + pair * D + d, to_operand(finish(total, acc), out.dtype.element_ty), mask=d < D)
