"""Log-probabilities of the raw logits, on the GPU, and each row's most likely tokens.

One pass: every program leaves the largest logit of its part, the sum of e^(x - largest), and its best tokens in order; the program
that arrives last at its row's counter joins the sums in order and merges the lists. Parts are of `BLOCK` logits whatever the number of
rows, so that a row's sum depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from power_lab.kernels.triton import chain
from power_lab.kernels.triton.elementary import exp, log
from power_lab.kernels.triton.sample import arrive

BLOCK, WARPS = 2048, 8
PLAN = f"logprobs: sums of {BLOCK} logits by {WARPS} warps, joined in one tree"
NOTHING = tl.constexpr(2**63 - 1)  # sorts behind every key


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """What a row's programs leave, for up to Q rows. Only `arrived` must be 0 before a call; it is 0 again after.

    Attributes:
        largest, sums: f32 [Q, programs]; keys: int64 [Q, programs, top]; arrived: int32 [Q].
    """

    largest: Tensor
    sums: Tensor
    keys: Tensor
    arrived: Tensor

    @classmethod
    def allocate(cls, rows: int, vocabulary: int, top: int, device: torch.device | str) -> Scratch:
        """Room for `rows` rows and `top` tokens of each."""
        shape = rows, triton.cdiv(vocabulary, BLOCK)
        return cls(
            largest=torch.empty(shape, dtype=torch.float32, device=device),
            sums=torch.empty(shape, dtype=torch.float32, device=device),
            keys=torch.empty((*shape, top), dtype=torch.int64, device=device),
            arrived=torch.zeros(rows, dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        return self.largest.nbytes + self.sums.nbytes + self.keys.nbytes + self.arrived.nbytes


@triton.jit
def _key(x, token):
    """Orders by (value downwards, id upwards); -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    upwards = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((-1 - upwards).to(tl.int64) << 32) | token


@triton.jit
def _value(key):
    upwards = -1 - (key >> 32).to(tl.int32)
    return (upwards ^ ((upwards >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _less(x, largest):
    """x - largest, 0 where both are the same infinity."""
    return tl.where(x == largest, 0.0, x - largest)


@triton.jit
def _merge(lists, programs, top, norm, ids, values, PROGRAMS: tl.constexpr):
    """The best of all programs' ordered lists [programs, top], one after another."""
    part = tl.arange(0, PROGRAMS)
    at = part * top
    head = tl.load(lists + at, mask=(part < programs) & (top > 0), other=NOTHING, cache_modifier=".cg")
    for i in range(top):
        best = tl.min(head)
        tl.store(ids + i, best.to(tl.int32))
        tl.store(values + i, _value(best) - norm)
        taken = head == best
        at += taken.to(tl.int32)
        left = at < (part + 1) * top
        behind = tl.load(lists + at, mask=taken & left & (part < programs), other=NOTHING, cache_modifier=".cg")
        head = tl.where(taken, behind, head)


@triton.jit(do_not_specialize_on_alignment=["tokens", "chosen", "ids", "values"])
def _logprobs(
    logits, vocabulary, tokens, chosen, ids, values, top, all_largest, all_sums, all_keys, arrived,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain.begin(PDL)
    chain.wait(PDL)
    row, part, programs = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    all_largest, all_sums = all_largest + row * programs, all_sums + row * programs
    all_keys, logits = all_keys + row * programs * top, logits + row * vocabulary
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    x = tl.load(logits + token, mask=inside, other=-float("inf"))
    largest = tl.max(x)
    tl.store(all_largest + part, largest)
    tl.store(all_sums + part, tl.sum(tl.where(inside, exp(_less(x, largest)), 0.0)))
    keys = tl.where(inside, _key(x, token), NOTHING)
    for i in range(top):
        best = tl.min(keys)
        tl.store(all_keys + part * top + i, best)
        keys = tl.where(keys == best, NOTHING, keys)
    if arrive(arrived + row, programs):
        each = tl.arange(0, PROGRAMS)
        maxima = tl.load(all_largest + each, mask=each < programs, other=-float("inf"), cache_modifier=".cg")
        sums = tl.load(all_sums + each, mask=each < programs, other=0.0, cache_modifier=".cg")
        highest = tl.max(maxima)
        total = tl.sum(sums * exp(_less(maxima, highest)))
        norm = tl.where(total == total, highest + log(total), total)  # `log` takes NaN for a number
        wanted = tl.load(tokens + row)
        known = (wanted >= 0) & (wanted < vocabulary)
        tl.store(chosen + row, tl.load(logits + wanted, mask=known, other=float("nan")) - norm)
        _merge(all_keys, programs, top, norm, ids + row * top, values + row * top, PROGRAMS)


def launch(logits: Tensor, tokens: Tensor, chosen: Tensor, ids: Tensor, values: Tensor, scratch: Scratch) -> None:
    """Log-softmax of the given tokens and of the most likely ones, best first, the lowest id first among equals.

    Args:
        logits: f32 [Q, V], contiguous.
        tokens: int32 [Q]; a token that is not in 0..V-1 gets NaN.
        chosen: f32 [Q], written.
        ids, values: int32 and f32 [Q, top], written; top <= V, 0 for none.
        scratch: for at least Q rows of V logits, and at least `top` tokens. A row whose logits hold NaN gets NaN values.
    """
    rows, vocabulary = logits.shape
    programs, s = triton.cdiv(vocabulary, BLOCK), scratch
    _logprobs[programs, rows](
        logits, vocabulary, tokens, chosen, ids, values, ids.shape[1], s.largest, s.sums, s.keys, s.arrived,
        BLOCK=BLOCK, PROGRAMS=triton.next_power_of_2(programs), num_warps=WARPS, enable_fp_fusion=False,
        **chain.options(logits.device),
    )  # fmt: skip


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """`launch` on new arrays: (f32 [Q] of `tokens`, int32 [Q, top] ids, f32 [Q, top] values)."""
    rows, vocabulary = logits.shape
    chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, top), dtype=torch.int32, device=logits.device)
    values = torch.empty((rows, top), dtype=torch.float32, device=logits.device)
    launch(logits, tokens, chosen, ids, values, Scratch.allocate(rows, vocabulary, top, logits.device))
    return chosen, ids, values
