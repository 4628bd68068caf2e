"""Sampling one token per row of logits, on the GPU. The semantics are those of `kernels/numba/sample.py`.

A row is split over many programs. Every program of a pass leaves a part of the answer; the one that arrives last at its row's
counter puts the parts together. Four passes, all of which a captured graph replays whatever the controls: `_survey` applies
penalties and finds the largest logit, which is the token where the temperature is 0; `_histogram` and `_collect` find the last
survivor of top-k and top-p, and end at once for rows without them; `_draw` takes the largest (logit - maximum) / temperature +
Gumbel noise among survivors.

Only maxima, lowest ids and sums of whole numbers cross programs, so a token depends on its row alone and not on the split.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from power_lab.kernels.triton import noise, survivors

PLAN = "sample: exact maxima and integer sums, any split; philox4x32-10; 2048 bins, masses in units of 2^-44"

SMALLEST_BLOCK, LARGEST_BLOCK = 1024, 4096
GROUP = tl.constexpr(256)  # tokens whose largest logit helps to bound top-k
PAST = tl.constexpr(256)  # history tokens looked at together
NO_TOP = tl.constexpr(float("inf"))  # a row's maximum once its token is known
BAD = tl.constexpr(-1)  # a token id that says: these logits cannot be sampled


@dataclass(frozen=True, slots=True, eq=False)
class Controls:
    """`SampleRows` on the device. Lists may be larger than what the spans name.

    Attributes:
        values: f32 [Q, 6]: temperature, top-k, top-p, min-p, repetition, presence.
        keys: int64 [Q, 2]: seed, position.
        spans: int64 [Q, 5]: start, start of the generated part and end in `history`; start and end of the biases.
        history: int32 [H].
        bias_ids: int32 [B].
        bias_values: f32 [B].
    """

    values: Tensor
    keys: Tensor
    spans: Tensor
    history: Tensor
    bias_ids: Tensor
    bias_values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """What the passes tell each other, for up to Q rows of V logits. Only `arrived` must be 0 before a call; it is 0 again after.

    Attributes:
        z: f32 [Q, V], penalised logits.
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
        return sum(getattr(self, field.name).nbytes for field in fields(self))


@triton.jit
def arrive(counter, programs):
    """Whether this program is the last of its row; all that the others wrote is then visible. Resets the counter."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1) == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _is_penalised(control, span):
    plain = (tl.load(control + 4) == 1) & (tl.load(control + 5) == 0)
    return (not plain) | (tl.load(span + 3) != tl.load(span + 4))


@triton.jit
def _counts(history, start, end, first, BLOCK: tl.constexpr):
    """How often each of the tokens from `first` on occurs in history[start:end]."""
    counts = tl.zeros([BLOCK], tl.int32)
    for at in range(start, end, PAST):
        index = at + tl.arange(0, PAST)
        token = tl.load(history + index, mask=index < end, other=-1) - first
        inside = (token >= 0) & (token < BLOCK)
        counts += tl.histogram(tl.where(inside, token, 0), BLOCK, mask=inside)
    return counts


@triton.jit
def _penalise(x, first, control, span, history, bias_ids, bias_values, BLOCK: tl.constexpr):
    """Penalties, each from the raw logit, then biases in their order."""
    repetition, presence = tl.load(control + 4), tl.load(control + 5)
    start, generated, end = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    if (repetition != 1) | (presence != 0):
        before = _counts(history, start, generated, first, BLOCK)
        since = _counts(history, generated, end, first, BLOCK)
        penalised = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(since > 0, penalised - presence, tl.where(before > 0, penalised, x))
    token = first + tl.arange(0, BLOCK)
    for i in range(tl.load(span + 3), tl.load(span + 4)):
        x = tl.where(token == tl.load(bias_ids + i), x + tl.load(bias_values + i), x)
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


@triton.jit
def _survey(
    logits, vocabulary, controls, spans, history, bias_ids, bias_values, tokens,
    z, best, ids, peaks, fars, tops, cuts, bins, filled, arrived, pitch, peak_pitch,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, PEAKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    row, part, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    control, span = controls + row * 6, spans + row * 5
    best, ids = best + row * pitch, ids + row * pitch
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    x = tl.load(logits + row * vocabulary + token, mask=inside, other=-float("inf"))
    if _is_penalised(control, span):
        x = _penalise(x, part * BLOCK, control, span, history, bias_ids, bias_values, BLOCK)
        tl.store(z + row * vocabulary + token, x, mask=inside)
    for first in range(part * BLOCK, BINS, programs * BLOCK):
        index = first + tl.arange(0, BLOCK)
        tl.store(bins + row * BINS + index, tl.zeros([BLOCK], tl.int64), mask=index < BINS)
    x = tl.where(inside & (x != x), float("inf"), x)  # NaN counts as an infinite largest logit: both are BAD
    _store_part(x, token, vocabulary, best + part, ids + part)
    temperature, k, p = tl.load(control), tl.load(control + 1).to(tl.int32), tl.load(control + 2)
    by_count, peaks = (k > 0) & (k < vocabulary), peaks + row * peak_pitch
    if by_count:
        group = part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(peaks + group, tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), axis=1))
    if arrive(arrived + row, programs):
        top, largest = _join_parts(vocabulary, best, ids, programs, PROGRAMS)
        tl.store(tokens + row, largest)
        known = (temperature == 0) | (largest == BAD)
        tl.store(tops + row, tl.where(known, NO_TOP, top))
        if by_count & (not known):
            tl.store(fars + row, survivors.far_by_count(peaks, programs * (BLOCK // GROUP), k, top, temperature, PEAKS))
        else:
            tl.store(fars + row, survivors.far_by_mass(vocabulary, p))
        tl.store(cuts + row, survivors.min_p_cut(tl.load(control + 3)))
        tl.store(filled + row, 0)


@triton.jit
def _histogram(
    logits, vocabulary, controls, spans, z, fars, tops, bins, limits, arrived, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    row, part, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    control, top = controls + row * 6, tl.load(tops + row)
    k, p = tl.load(control + 1).to(tl.int32), tl.load(control + 2)
    by_count = (k > 0) & (k < vocabulary)
    if (top == NO_TOP) | ((not by_count) & (p >= 1)):
        return
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    start = row * vocabulary
    x = survivors.load(logits + start, z + start, _is_penalised(control, spans + row * 5), token, inside)
    away = survivors.distance(x, top, tl.load(control))
    survivors.add_to_histogram(away, inside, tl.load(fars + row), by_count, bins + row * BINS)
    if arrive(arrived + row, programs):
        survivors.find_limit(bins + row * BINS, by_count, k, p, limits + row * 3)


@triton.jit
def _collect(
    logits, vocabulary, controls, spans, z, tops, cuts, limits, keys, filled, arrived,
    BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    row, part, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    control, top = controls + row * 6, tl.load(tops + row)
    temperature, k, p = tl.load(control), tl.load(control + 1).to(tl.int32), tl.load(control + 2)
    by_count = (k > 0) & (k < vocabulary)
    if (top == NO_TOP) | ((not by_count) & (p >= 1)):
        return
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    start, penalised = row * vocabulary, _is_penalised(control, spans + row * 5)
    away = survivors.distance(survivors.load(logits + start, z + start, penalised, token, inside), top, temperature)
    limit, keys, filled = limits + row * 3, keys + row * LISTED, filled + row
    survivors.collect(away, token, inside, tl.load(limit), by_count & (p < 1), keys, filled, LISTED)
    if arrive(arrived + row, programs):
        cut = survivors.find_cut(
            by_count, p, limit, filled, keys, logits + start, z + start, penalised, vocabulary, top, temperature, LISTED
        )
        tl.store(cuts + row, tl.minimum(cut, tl.load(cuts + row)))


@triton.jit
def _score(x, word, token, alive, top, temperature):
    return tl.where(alive, tl.div_rn(x - top, temperature) + noise.gumbel(word), -float("inf"))


@triton.jit
def _draw(
    logits, vocabulary, controls, keys, spans, tokens, z, best, ids, tops, cuts, arrived, pitch,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    row, part, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    control, top, cut = controls + row * 6, tl.load(tops + row), tl.load(cuts + row)
    if top == NO_TOP:
        return
    best, ids = best + row * pitch, ids + row * pitch
    temperature, start = tl.load(control), row * vocabulary
    penalised = _is_penalised(control, spans + row * 5)
    # A counter names four tokens: 16 apart, so that neighbouring counters read neighbouring logits.
    counter = part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    first = counter // 16 * 64 + counter % 16
    value = tl.full([BLOCK // 4], -float("inf"), tl.float32)
    token = first
    words = noise.words(counter, tl.load(keys + row * 2), tl.load(keys + row * 2 + 1))
    for w in tl.static_range(4):
        candidate = first + 16 * w
        inside = candidate < vocabulary
        x = survivors.load(logits + start, z + start, penalised, candidate, inside)
        alive = inside & (survivors.key(survivors.distance(x, top, temperature), candidate) <= cut)
        if tl.max(alive.to(tl.int32)) > 0:
            score = _score(x, words[w], candidate, alive, top, temperature)
            token = tl.where(score > value, candidate, token)
            value = tl.maximum(value, score)
    _store_part(value, token, vocabulary, best + part, ids + part)
    if arrive(arrived + row, programs):
        _, drawn = _join_parts(vocabulary, best, ids, programs, PROGRAMS)
        tl.store(tokens + row, drawn)


def plan(rows: int, vocabulary: int) -> dict[str, Any]:
    """Logits per program, and warps: small parts until they fill the machine. It decides no bits."""
    small = rows * triton.cdiv(vocabulary, SMALLEST_BLOCK) <= 2048
    return {"BLOCK": SMALLEST_BLOCK, "num_warps": 4} if small else {"BLOCK": 2 * SMALLEST_BLOCK, "num_warps": 8}


def sample(
    logits: Tensor,
    controls: Controls,
    tokens: Tensor,
    scratch: Scratch,
    random: bool = True,
    limited: bool = True,
    meta: dict[str, Any] | None = None,
) -> None:
    """Draw one token per row.

    Args:
        logits: f32 [Q, V], contiguous; read, not changed.
        controls: of the Q rows.
        tokens: int32 [Q]; -1 for a row that holds NaN or has no finite largest logit.
        scratch: for at least Q rows of V logits.
        random: False if all temperatures are known to be 0: one pass is enough.
        limited: False if no row is known to have top-k or top-p: two passes are enough.
        meta: launch parameters instead of `plan`'s; blocks of at least `SMALLEST_BLOCK`.
    """
    rows, vocabulary = logits.shape
    s, c = scratch, controls
    meta = {"enable_fp_fusion": False, **(meta or plan(rows, vocabulary))}
    programs = triton.cdiv(vocabulary, meta["BLOCK"])
    grid, joined, pitch = (programs, rows), triton.next_power_of_2(programs), s.best.shape[1]
    bins, listed = s.bins.shape[1], s.keys.shape[1]
    _survey[grid](
        logits, vocabulary, c.values, c.spans, c.history, c.bias_ids, c.bias_values, tokens,
        s.z, s.best, s.ids, s.peaks, s.fars, s.tops, s.cuts, s.bins, s.filled, s.arrived, pitch, s.peaks.shape[1],
        PROGRAMS=joined, PEAKS=joined * meta["BLOCK"] // GROUP.value, BINS=bins, **meta,
    )  # fmt: skip
    if not random:
        return
    if limited:
        _histogram[grid](
            logits, vocabulary, c.values, c.spans, s.z, s.fars, s.tops, s.bins, s.limits, s.arrived, BINS=bins, **meta
        )
        _collect[grid](
            logits, vocabulary, c.values, c.spans, s.z, s.tops, s.cuts, s.limits, s.keys, s.filled, s.arrived,
            LISTED=listed, **meta,
        )  # fmt: skip
    _draw[grid](
        logits, vocabulary, c.values, c.keys, c.spans, tokens, s.z, s.best, s.ids, s.tops, s.cuts, s.arrived, pitch,
        PROGRAMS=joined, **meta,
    )  # fmt: skip
