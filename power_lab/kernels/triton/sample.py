"""Sampling one token per row of logits, on the GPU. The semantics are those of `kernels/numba/sample.py`.

A row is split over many programs. Every program of a pass leaves a part of the answer; the one that arrives last at its row's
counter puts the parts together. Passes: `_mark` flags the tokens of histories, for rows with penalties; `_survey` applies penalties and
biases and finds the largest logit, which is the token where the temperature is 0; `_histogram` and `_collect` find the last survivor of
top-k and top-p; `_draw` takes the largest (logit - maximum) / temperature + Gumbel noise among survivors. A row that does not need a pass
ends it at once: every control is read on the device, and a captured graph serves any.

Only maxima, lowest ids and sums of whole numbers cross programs, so a token depends on its row alone and not on the split.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from power_lab.kernels.ops import SampleRows
from power_lab.kernels.triton import chain, noise, survivors

PLAN = "sample: exact maxima and integer sums, any split; philox4x32-10; 2048 bins, masses in units of 2^-44"

SMALLEST_BLOCK, LARGEST_BLOCK = 1024, 4096
GROUP = tl.constexpr(256)  # tokens whose largest logit helps to bound top-k
MARKERS = 4  # programs of `_mark` that share a row's history
PAST = tl.constexpr(1024)  # history tokens looked at together
BIASES = tl.constexpr(64)  # biases looked at together
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
        seen: int8 [Q, 2, V], whether a token is in the history, in the part before what was generated and in that itself.
        best, ids: f32 and int32 [Q, programs], the largest value of each program's part and its lowest token.
        peaks: f32 [Q, groups], the largest logit of each `GROUP` tokens, in rows with top-k.
        fars: f32 [Q], see `survivors.add_to_histogram`.
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
    fars: Tensor
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
            seen=torch.zeros((rows, 2, vocabulary), dtype=torch.int8, device=device),
            best=empty(programs, dtype=torch.float32),
            ids=empty(programs, dtype=torch.int32),
            peaks=empty(triton.cdiv(vocabulary, LARGEST_BLOCK) * LARGEST_BLOCK // GROUP.value, dtype=torch.float32),
            fars=empty(dtype=torch.float32),
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
def _reads_history(c, row):
    return (tl.load(c.repetition + row) != 1) | (tl.load(c.presence + row) != 0)


@triton.jit
def _limits(c, row, vocabulary):
    """(whether top-k limits this row, k, p)."""
    k = tl.load(c.top_k + row)
    return (k > 0) & (k < vocabulary), k, tl.load(c.top_p + row)


@triton.jit(do_not_specialize_on_alignment=["c"])
def _mark(c, vocabulary, seen, PDL: tl.constexpr):
    """Flag the tokens of the history of a row with penalties; `_survey` takes the flags away."""
    chain.begin(PDL)
    chain.wait(PDL)
    row, part, parts = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    if _reads_history(c, row):
        span = c.history_span + row * 3
        start, generated, end = tl.load(span), tl.load(span + 1), tl.load(span + 2)
        for at in range(start + part * PAST, end, parts * PAST):
            index = at + tl.arange(0, PAST)
            token = tl.load(c.history + index, mask=index < end, other=-1)
            known = (token >= 0) & (token < vocabulary)
            flag = seen + (row * 2 + (index >= generated).to(tl.int64)) * vocabulary + token
            tl.store(flag, 1, mask=known)


@triton.jit
def _penalise(x, token, inside, repetition, presence, seen, vocabulary):
    """Penalties, each from the raw logit. Takes away the flags that it reads."""
    before = tl.load(seen + token, mask=inside, other=0)
    since = tl.load(seen + vocabulary + token, mask=inside, other=0)
    tl.store(seen + token, 0, mask=inside)
    tl.store(seen + vocabulary + token, 0, mask=inside)
    penalised = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    return tl.where(since > 0, penalised - presence, tl.where(before > 0, penalised, x))


@triton.jit
def _bias(x, first, start, end, ids, values, BLOCK: tl.constexpr):
    """Biases of the tokens from `first` on, in their order."""
    token = first + tl.arange(0, BLOCK)
    for at in range(start, end, BIASES):
        some = at + tl.arange(0, BIASES)
        id = tl.load(ids + some, mask=some < end, other=-1)
        if tl.max(((id >= first) & (id < first + BLOCK)).to(tl.int32)) > 0:
            for i in range(at, tl.minimum(at + BIASES, end)):
                x = tl.where(token == tl.load(ids + i), x + tl.load(values + i), x)
    return x


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


@triton.jit(do_not_specialize_on_alignment=["c", "tokens"])
def _survey(
    logits, vocabulary, c, tokens, s, pitch, peak_pitch,
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
    reads, first_bias, end_bias = (
        _reads_history(c, row),
        tl.load(c.bias_span + row * 2),
        tl.load(c.bias_span + row * 2 + 1),
    )
    changed = reads | (first_bias < end_bias)
    if changed:
        if reads:
            repetition, presence = tl.load(c.repetition + row), tl.load(c.presence + row)
            x = _penalise(x, token, inside, repetition, presence, s.seen + row * 2 * vocabulary, vocabulary)
        x = _bias(x, part * BLOCK, first_bias, end_bias, c.bias_ids, c.bias_values, BLOCK)
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
        tl.store(tokens + row, largest)
        if RANDOM:
            temperature = tl.load(c.temperature + row)
            known = (temperature == 0) | (largest == BAD)
            tl.store(s.tops + row, tl.where(known, NO_TOP, top))
            tl.store(s.changed + row, changed.to(tl.int32))
            tl.store(s.cuts + row, survivors.min_p_cut(tl.load(c.min_p + row)))
            if LIMITED:
                tl.store(s.filled + row, 0)
                if by_count & (not known):
                    groups = programs * (BLOCK // GROUP)
                    tl.store(s.fars + row, survivors.far_by_count(peaks, groups, k, top, temperature, PEAKS))
                else:
                    tl.store(s.fars + row, survivors.far_by_mass(vocabulary, p))


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
    start = row * vocabulary
    x = survivors.load(logits + start, s.z + start, tl.load(s.changed + row) > 0, token, inside)
    away = survivors.distance(x, top, tl.load(c.temperature + row))
    survivors.add_to_histogram(away, inside, tl.load(s.fars + row), by_count, s.bins + row * BINS)
    if arrive(s.arrived + row, programs):
        survivors.find_limit(s.bins + row * BINS, by_count, k, p, s.limits + row * 3)


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
    raw, z, changed = logits + row * vocabulary, s.z + row * vocabulary, tl.load(s.changed + row) > 0
    temperature = tl.load(c.temperature + row)
    away = survivors.distance(survivors.load(raw, z, changed, token, inside), top, temperature)
    limit, keys, filled = s.limits + row * 3, s.keys + row * LISTED, s.filled + row
    survivors.collect(away, token, inside, tl.load(limit), by_count & (p < 1), keys, filled, LISTED)
    if arrive(s.arrived + row, programs):
        cut = survivors.find_cut(
            by_count, p, limit, filled, keys, raw, z, changed, vocabulary, top, temperature, LISTED
        )
        tl.store(s.cuts + row, tl.minimum(cut, tl.load(s.cuts + row)))


@triton.jit
def _score(x, word, token, alive, top, temperature):
    return tl.where(alive, tl.div_rn(x - top, temperature) + noise.gumbel(word), -float("inf"))


@triton.jit(do_not_specialize_on_alignment=["c", "tokens"])
def _draw(logits, vocabulary, c, tokens, s, pitch, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr):
    chain.begin(PDL)
    chain.wait(PDL)
    row, part, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    top, cut, temperature = tl.load(s.tops + row), tl.load(s.cuts + row), tl.load(c.temperature + row)
    if top == NO_TOP:
        return
    best, ids, start = s.best + row * pitch, s.ids + row * pitch, row * vocabulary
    changed = tl.load(s.changed + row) > 0
    # A counter names four tokens: 16 apart, so that neighbouring counters read neighbouring logits.
    counter = part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    first = counter // 16 * 64 + counter % 16
    value = tl.full([BLOCK // 4], -float("inf"), tl.float32)
    token = first
    words = noise.words(counter, tl.load(c.seeds + row), tl.load(c.positions + row))
    for w in tl.static_range(4):
        candidate = first + 16 * w
        inside = candidate < vocabulary
        x = survivors.load(logits + start, s.z + start, changed, candidate, inside)
        alive = inside & (survivors.key(survivors.distance(x, top, temperature), candidate) <= cut)
        if tl.max(alive.to(tl.int32)) > 0:
            score = _score(x, words[w], candidate, alive, top, temperature)
            token = tl.where(score > value, candidate, token)
            value = tl.maximum(value, score)
    _store_part(value, token, vocabulary, best + part, ids + part)
    if arrive(s.arrived + row, programs):
        _, drawn = _join_parts(vocabulary, best, ids, programs, PROGRAMS)
        tl.store(tokens + row, drawn)


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
) -> None:
    """Draw one token per row. What is left out decides no bits of rows that do not need it.

    Args:
        logits: f32 [Q, V], contiguous; read, not changed.
        rows: torch tensors on the device; values are read there.
        tokens: int32 [Q]; -1 for a row that holds NaN or has no finite largest logit.
        scratch: for at least Q rows of V logits.
        random: False if all temperatures are known to be 0: one pass is enough.
        limited: False if no row is known to have top-k or top-p: two passes are enough.
        penalised: False if no row is known to have repetition or presence penalties: a pass less.
        meta: launch parameters instead of `plan`'s; blocks of at least `SMALLEST_BLOCK`.
    """
    count, vocabulary = logits.shape
    s, c, limited = scratch, Controls.of(rows), random and limited
    options = {"enable_fp_fusion": False, **chain.options(logits.device)}
    if penalised:
        _mark[MARKERS, count](c, vocabulary, s.seen, num_warps=4, **options)
    options |= meta or plan(count, vocabulary)
    programs = triton.cdiv(vocabulary, options["BLOCK"])
    grid, joined, pitch = (programs, count), triton.next_power_of_2(programs), s.best.shape[1]
    bins, peaks = s.bins.shape[1], joined * options["BLOCK"] // GROUP.value
    _survey[grid](
        logits, vocabulary, c, tokens, s, pitch, s.peaks.shape[1],
        RANDOM=random, LIMITED=limited, PROGRAMS=joined, PEAKS=peaks, BINS=bins, **options,
    )  # fmt: skip
    if limited:
        _histogram[grid](logits, vocabulary, c, s, BINS=bins, **options)
        _collect[grid](logits, vocabulary, c, s, LISTED=s.keys.shape[1], **options)
    if random:
        _draw[grid](logits, vocabulary, c, tokens, s, pitch, PROGRAMS=joined, **options)
