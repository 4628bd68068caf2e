"""Sampling one token per row of logits, on the GPU. The semantics are those of `kernels/numba/sample.py`.

A row is split over many programs. Every program of a pass leaves a part of the answer; the one that arrives last at its row's
counter puts the parts together. Passes: `penalties.mark` flags the tokens of histories; `_survey` applies penalties and biases and finds
the largest logit, which is the token where the temperature is 0; `_weigh`, `_histogram` and `_collect` find the last survivor of top-k
and top-p; `_draw` takes the largest (logit - maximum) / temperature + Gumbel noise among survivors. A row that does not need a pass ends
it at once: every control is read on the device, and a captured graph serves any.

Only maxima, lowest ids and sums of whole numbers cross programs, so a token depends on its row alone and not on the split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from power_lab.kernels.ops import SampleRows
from power_lab.kernels.triton import chain, noise, penalties, survivors

PLAN = "sample: exact maxima and integer sums, any split; philox4x32-10; 2048 bins, masses in units of 2^-44"

SMALLEST_BLOCK, LARGEST_BLOCK = 1024, 4096
GROUP = tl.constexpr(256)  # tokens whose largest logit helps to bound top-k
NO_TOP = tl.constexpr(float("inf"))  # a row's maximum once its token is known
BAD = tl.constexpr(-1)  # a token id that says: these logits cannot be sampled


class Controls(NamedTuple):
    """The fields of `SampleRows`, in the form that kernels take."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    seeds: Tensor
    positions: Tensor
    history: Tensor
    history_span: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    bias_span: Tensor

    @classmethod
    def of(cls, rows: SampleRows) -> Controls:
        return cls(*(getattr(rows, name) for name in cls._fields))


class Scratch(NamedTuple):
    """What the passes tell each other, for up to Q rows of V logits.

    Only `arrived` and `seen` must be 0 before a call; they are 0 again after.

    Attributes:
        z: f32 [Q, V], penalised logits; changed: int32 [Q], whether they differ from the raw ones and are there.
        seen: int32 [Q, 2, V / 32], see `penalties.mark`.
        best, ids: f32 and int32 [Q, programs], the largest value of each program's part and its lowest token.
        peaks: f32 [Q, groups], the largest logit of each `GROUP` tokens, in rows with top-k.
        lows, fars: f32 [Q], see `survivors.add_to_histogram`.
        cells: int64 [Q, 2 * CELLS], see `survivors.add_to_cells`.
        tops: f32 [Q], the largest logit, or `NO_TOP` where the token is known.
        cuts: int64 [Q], key of the last survivor.
        bins: int64 [Q, BINS]; limits: int64 [Q, 3], see `survivors.find_limit`.
        keys: int64 [Q, listed]; filled: int32 [Q], see `survivors.collect`.
        arrived: int32 [Q], programs that have finished a pass.
    """

    z: Tensor
    changed: Tensor
    seen: Tensor
    best: Tensor
    ids: Tensor
    peaks: Tensor
    lows: Tensor
    fars: Tensor
    cells: Tensor
    tops: Tensor
    cuts: Tensor
    bins: Tensor
    limits: Tensor
    keys: Tensor
    filled: Tensor
    arrived: Tensor

    @classmethod
    def allocate(
        cls, rows: int, vocabulary: int, device: torch.device | str, listed: int = survivors.LISTED
    ) -> Scratch:
        """Room for `rows` rows; `listed`: keys that are collected per row."""
        assert vocabulary <= survivors.MOST_TOKENS, "sums of so many masses would overflow"

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((rows, *shape), dtype=dtype, device=device)

        programs = triton.cdiv(vocabulary, SMALLEST_BLOCK)
        return cls(
            z=empty(vocabulary, dtype=torch.float32),
            changed=empty(dtype=torch.int32),
            seen=torch.zeros((rows, 2, penalties.words(vocabulary)), dtype=torch.int32, device=device),
            best=empty(programs, dtype=torch.float32),
            ids=empty(programs, dtype=torch.int32),
            peaks=empty(triton.cdiv(vocabulary, LARGEST_BLOCK) * LARGEST_BLOCK // GROUP.value, dtype=torch.float32),
            lows=empty(dtype=torch.float32),
            fars=empty(dtype=torch.float32),
            cells=empty(2 * survivors.CELLS.value, dtype=torch.int64),
            tops=empty(dtype=torch.float32),
            cuts=empty(dtype=torch.int64),
            bins=empty(survivors.BINS.value, dtype=torch.int64),
            limits=empty(3, dtype=torch.int64),
            keys=empty(listed, dtype=torch.int64),
            filled=empty(dtype=torch.int32),
            arrived=torch.zeros(rows, dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self)


@triton.jit
def arrive(counter, programs):
    """Whether this program is the last of its row; all that the others wrote is then visible. Resets the counter."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1) == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _limits(c, row, vocabulary):
    """(whether top-k limits this row, k, p)."""
    k = tl.load(c.top_k + row)
    return (k > 0) & (k < vocabulary), k, tl.load(c.top_p + row)


@triton.jit
def _row(logits, vocabulary, s, row):
    """Where a row's logits are: raw, or as penalties left them."""
    start = row * vocabulary
    return tl.where(tl.load(s.changed + row) > 0, s.z + start, logits + start)


@triton.jit
def _store_part(value, token, vocabulary, best, ids):
    """This program's largest value and its lowest token."""
    largest = tl.max(value)
    tl.store(best, largest)
    tl.store(ids, tl.min(tl.where(value == largest, token, vocabulary)))


@triton.jit
def _join_parts(vocabulary, best, ids, programs, PROGRAMS: tl.constexpr):
    """The row's largest value and its lowest token; BAD where it is not finite."""
    part = tl.arange(0, PROGRAMS)
    value = tl.load(best + part, mask=part < programs, other=-float("inf"), cache_modifier=".cg")
    token = tl.load(ids + part, mask=part < programs, other=vocabulary, cache_modifier=".cg")
    largest = tl.max(value)
    lowest = tl.min(tl.where(value == largest, token, vocabulary))
    finite = (largest > -float("inf")) & (largest < float("inf"))
    return largest, tl.where(finite, lowest, BAD)


@triton.jit
def _store_token(tokens, row, column, means):
    """The token of a row, by the column that was drawn."""
    if means is not None:
        column = tl.where(column == BAD, BAD, tl.load(means + column, mask=column >= 0, other=0))
    tl.store(tokens + row, column)


@triton.jit(do_not_specialize_on_alignment=["c", "tokens"])
def _survey(
    logits, vocabulary, c, tokens, s, pitch, peak_pitch, words, means,
    RANDOM: tl.constexpr, LIMITED: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, PEAKS: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain.begin(PDL)
    chain.wait(PDL)
    row, part, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    best, ids, peaks = s.best + row * pitch, s.ids + row * pitch, s.peaks + row * peak_pitch
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    x = tl.load(logits + row * vocabulary + token, mask=inside, other=-float("inf"))
    penalised = penalties.wanted(c, row)
    changed = penalised | (tl.load(c.bias_span + row * 2) < tl.load(c.bias_span + row * 2 + 1))
    if changed:
        if penalised:
            x = penalties.penalise(x, part * BLOCK, c, row, s.seen, words, BLOCK)
        x = penalties.add_biases(x, part * BLOCK, c, row, BLOCK)
        tl.store(s.z + row * vocabulary + token, x, mask=inside)
    x = tl.where(inside & (x != x), float("inf"), x)  # NaN counts as an infinite largest logit: both are BAD
    _store_part(x, token, vocabulary, best + part, ids + part)
    by_count, k, p = _limits(c, row, vocabulary)
    if LIMITED:
        for first in range(part * BLOCK, BINS, programs * BLOCK):
            index = first + tl.arange(0, BLOCK)
            tl.store(s.bins + row * BINS + index, tl.zeros([BLOCK], tl.int64), mask=index < BINS)
        if by_count:
            group = part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            tl.store(peaks + group, tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), axis=1))
    if arrive(s.arrived + row, programs):
        top, largest = _join_parts(vocabulary, best, ids, programs, PROGRAMS)
        _store_token(tokens, row, largest, means)
        if RANDOM:
            temperature = tl.load(c.temperature + row)
            known = (temperature == 0) | (largest == BAD)
            tl.store(s.tops + row, tl.where(known, NO_TOP, top))
            tl.store(s.changed + row, changed.to(tl.int32))
            tl.store(s.cuts + row, survivors.min_p_cut(tl.load(c.min_p + row)))
            if LIMITED:
                tl.store(s.filled + row, 0)
                tl.store(s.lows + row, -1.0)
                sums = row * 2 * survivors.CELLS + tl.arange(0, 2 * survivors.CELLS)
                tl.store(s.cells + sums, tl.zeros([2 * survivors.CELLS], tl.int64))
                if by_count & (not known):
                    groups = programs * (BLOCK // GROUP)
                    tl.store(s.fars + row, survivors.far_by_count(peaks, groups, k, top, temperature, PEAKS))
                else:
                    tl.store(s.fars + row, survivors.far_by_mass(vocabulary, p))


@triton.jit(do_not_specialize_on_alignment=["c"])
def _weigh(logits, vocabulary, c, s, BLOCK: tl.constexpr, PDL: tl.constexpr):
    chain.begin(PDL)
    chain.wait(PDL)
    row, part, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    top = tl.load(s.tops + row)
    by_count, _, p = _limits(c, row, vocabulary)
    if (top == NO_TOP) | by_count | (p >= 1):
        return
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    x = tl.load(_row(logits, vocabulary, s, row) + token, mask=inside, other=-float("inf"))
    cells, far = s.cells + row * 2 * survivors.CELLS, s.fars + row
    survivors.add_to_cells(survivors.distance(x, top, tl.load(c.temperature + row)), inside, tl.load(far), cells)
    if arrive(s.arrived + row, programs):
        survivors.find_bracket(cells, p, s.lows + row, far, s.limits + row * 3)


@triton.jit(do_not_specialize_on_alignment=["c"])
def _histogram(logits, vocabulary, c, s, BLOCK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr):
    chain.begin(PDL)
    chain.wait(PDL)
    row, part, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    top = tl.load(s.tops + row)
    by_count, k, p = _limits(c, row, vocabulary)
    if (top == NO_TOP) | ((not by_count) & (p >= 1)):
        return
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    x = tl.load(_row(logits, vocabulary, s, row) + token, mask=inside, other=-float("inf"))
    away = survivors.distance(x, top, tl.load(c.temperature + row))
    bins = s.bins + row * BINS
    survivors.add_to_histogram(away, inside, tl.load(s.lows + row), tl.load(s.fars + row), by_count, bins)
    if arrive(s.arrived + row, programs):
        survivors.find_limit(bins, by_count, k, s.limits + row * 3)


@triton.jit(do_not_specialize_on_alignment=["c"])
def _collect(logits, vocabulary, c, s, BLOCK: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr):
    chain.begin(PDL)
    chain.wait(PDL)
    row, part, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    top = tl.load(s.tops + row)
    by_count, _, p = _limits(c, row, vocabulary)
    if (top == NO_TOP) | ((not by_count) & (p >= 1)):
        return
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    source = _row(logits, vocabulary, s, row), vocabulary, top, tl.load(c.temperature + row)
    away = survivors.distance(tl.load(source[0] + token, mask=inside, other=-float("inf")), top, source[3])
    limit, keys, filled = s.limits + row * 3, s.keys + row * LISTED, s.filled + row
    which = tl.load(limit), by_count & (p < 1), by_count, tl.load(s.lows + row), tl.load(s.fars + row)
    survivors.collect(away, token, inside, which, keys, filled, LISTED)
    if arrive(s.arrived + row, programs):
        count = tl.load(filled, cache_modifier=".cg")
        cut = survivors.find_cut(p, limit, (keys, count, count <= LISTED), source, which)
        tl.store(s.cuts + row, tl.minimum(cut, tl.load(s.cuts + row)))


@triton.jit
def _distance(source, token, vocabulary, top, temperature):
    x = tl.load(source + token, mask=token < vocabulary, other=-float("inf"))
    return survivors.distance(x, top, temperature)


@triton.jit(do_not_specialize_on_alignment=["c", "tokens"])
def _draw(
    logits, vocabulary, c, tokens, s, pitch, means, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr
):
    chain.begin(PDL)
    chain.wait(PDL)
    row, part, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    top, cut, temperature = tl.load(s.tops + row), tl.load(s.cuts + row), tl.load(c.temperature + row)
    if top == NO_TOP:
        return
    best, ids, source = s.best + row * pitch, s.ids + row * pitch, _row(logits, vocabulary, s, row)
    # A counter names four tokens: 16 apart, so that neighbouring counters read neighbouring logits.
    counter = part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    first = counter // 16 * 64 + counter % 16
    away = (
        _distance(source, first, vocabulary, top, temperature),
        _distance(source, first + 16, vocabulary, top, temperature),
        _distance(source, first + 32, vocabulary, top, temperature),
        _distance(source, first + 48, vocabulary, top, temperature),
    )
    value, token, alive = tl.full([BLOCK // 4], -float("inf"), tl.float32), first, first < 0
    for w in tl.static_range(4):
        alive |= survivors.key(away[w], first + 16 * w) <= cut
    if tl.max(alive.to(tl.int32)) > 0:
        seed, position = tl.load(c.seeds + row), tl.load(c.positions + row)
        words = noise.words(counter, seed, position)
        for w in tl.static_range(4):
            candidate = first + 16 * w
            survives = (candidate < vocabulary) & (survivors.key(away[w], candidate) <= cut)
            word = words[w]
            if means is not None:
                word = noise.word(tl.load(means + candidate, mask=candidate < vocabulary, other=0), seed, position)
            score = tl.where(survives, noise.gumbel(word) - away[w], -float("inf"))
            token = tl.where(score > value, candidate, token)
            value = tl.maximum(value, score)
    _store_part(value, token, vocabulary, best + part, ids + part)
    if arrive(s.arrived + row, programs):
        _, drawn = _join_parts(vocabulary, best, ids, programs, PROGRAMS)
        _store_token(tokens, row, drawn, means)


def plan(rows: int, vocabulary: int) -> dict[str, Any]:
    """Logits per program, and warps: small parts until they fill the machine. It decides no bits."""
    small = rows * triton.cdiv(vocabulary, SMALLEST_BLOCK) <= 2048
    return {"BLOCK": SMALLEST_BLOCK, "num_warps": 4} if small else {"BLOCK": 2 * SMALLEST_BLOCK, "num_warps": 8}


def sample(
    logits: Tensor,
    rows: SampleRows,
    tokens: Tensor,
    scratch: Scratch,
    random: bool = True,
    limited: bool = True,
    penalised: bool = True,
    meta: dict[str, Any] | None = None,
    ids: Tensor | None = None,
) -> None:
    """Draw one token per row. What is left out decides no bits of rows that do not need it.

    Args:
        logits: f32 [Q, V], contiguous; read, not changed.
        rows: torch tensors on the device; values are read there.
        tokens: int32 [Q]; -1 for a row that holds NaN or has no finite largest logit.
        scratch: for at least Q rows of V logits.
        random: False if all temperatures are known to be 0: one pass is enough.
        limited: False if no row is known to have top-k or top-p: three passes less.
        penalised: False if no row is known to have repetition or presence penalties: a pass less.
        meta: launch parameters instead of `plan`'s; blocks of at least `SMALLEST_BLOCK`.
        ids: int32 [V], ascending, the tokens that columns mean; rows then have neither penalties nor biases.
    """
    count, vocabulary = logits.shape
    s, c, limited = scratch, Controls.of(rows), random and limited
    options = {"enable_fp_fusion": False, **chain.options(logits.device)}
    if penalised:
        penalties.mark[penalties.MARKERS, count](c, vocabulary, s.seen, s.seen.shape[2], num_warps=4, **options)
    options |= meta or plan(count, vocabulary)
    programs = triton.cdiv(vocabulary, options["BLOCK"])
    grid, joined, pitch = (programs, count), triton.next_power_of_2(programs), s.best.shape[1]
    bins, peaks = s.bins.shape[1], joined * options["BLOCK"] // GROUP.value
    _survey[grid](
        logits, vocabulary, c, tokens, s, pitch, s.peaks.shape[1], s.seen.shape[2], ids,
        RANDOM=random, LIMITED=limited, PROGRAMS=joined, PEAKS=peaks, BINS=bins, **options,
    )  # fmt: skip
    if limited:
        _weigh[grid](logits, vocabulary, c, s, **options)
        _histogram[grid](logits, vocabulary, c, s, BINS=bins, **options)
        _collect[grid](logits, vocabulary, c, s, LISTED=s.keys.shape[1], **options)
    if random:
        _draw[grid](logits, vocabulary, c, tokens, s, pitch, ids, PROGRAMS=joined, **options)
