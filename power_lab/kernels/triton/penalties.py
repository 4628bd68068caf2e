"""Penalties and biases of a row's logits, on the GPU.

A pass of its own flags the tokens of the row's history, one bit each; whoever reads the logits reads the flags beside them and takes
them away. So a long history costs what it is long, whatever the number of programs that share the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from power_lab.kernels.triton import chain

WORD = tl.constexpr(32)  # flags of one word
MARKERS = 4  # programs of `mark` that share a row's history
PAST = tl.constexpr(1024)  # history tokens looked at together
BIASES = tl.constexpr(64)  # biases looked at together


def words(vocabulary: int) -> int:
    """Words of one row's flags of one kind."""
    return triton.cdiv(vocabulary, WORD.value)


@triton.jit
def wanted(c, row):
    """Whether the history matters to this row. c: `sample.Controls`."""
    return (tl.load(c.repetition + row) != 1) | (tl.load(c.presence + row) != 0)


@triton.jit(do_not_specialize_on_alignment=["c"])
def mark(c, vocabulary, seen, words, PDL: tl.constexpr):
    """Flag the history's tokens. seen int32 [Q, 2, words]: bits of tokens of the prompt, and of tokens generated since; all 0 before."""
    chain.begin(PDL)
    chain.wait(PDL)
    row, part, parts = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    if wanted(c, row):
        span = c.history_span + row * 3
        start, generated, end = tl.load(span), tl.load(span + 1), tl.load(span + 2)
        for at in range(start + part * PAST, end, parts * PAST):
            index = at + tl.arange(0, PAST)
            token = tl.load(c.history + index, mask=index < end, other=-1)
            known = (token >= 0) & (token < vocabulary)
            token = tl.where(known, token, 0)
            word = seen + (row * 2 + (index >= generated).to(tl.int64)) * words + token // WORD
            tl.atomic_or(word, 1 << (token % WORD), mask=known, sem="relaxed")


@triton.jit
def _flags(seen, first, words, BLOCK: tl.constexpr):
    """Whether each of the tokens from `first` on, a multiple of `WORD`, is flagged."""
    token = first + tl.arange(0, BLOCK)
    return ((tl.load(seen + token // WORD, mask=token // WORD < words, other=0) >> (token % WORD)) & 1) > 0


@triton.jit
def penalise(x, first, c, row, seen, words, BLOCK: tl.constexpr):
    """Penalties of the tokens from `first` on, each from the raw logit. Takes away the flags that it reads."""
    repetition, presence = tl.load(c.repetition + row), tl.load(c.presence + row)
    seen += row * 2 * words
    before, since = _flags(seen, first, words, BLOCK), _flags(seen + words, first, words, BLOCK)
    penalised = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    tl.debug_barrier()  # all have read
    word = first // WORD + tl.arange(0, BLOCK // WORD)
    tl.store(seen + word, 0, mask=word < words)
    tl.store(seen + words + word, 0, mask=word < words)
    return tl.where(since, penalised - presence, tl.where(before, penalised, x))


@triton.jit
def add_biases(x, first, c, row, BLOCK: tl.constexpr):
    """Biases of the tokens from `first` on, in their order."""
    start, end = tl.load(c.bias_span + row * 2), tl.load(c.bias_span + row * 2 + 1)
    token = first + tl.arange(0, BLOCK)
    for at in range(start, end, BIASES):
        some = at + tl.arange(0, BIASES)
        id = tl.load(c.bias_ids + some, mask=some < end, other=-1)
        if tl.max(((id >= first) & (id < first + BLOCK)).to(tl.int32)) > 0:
            for i in range(at, tl.minimum(at + BIASES, end)):
                x = tl.where(token == tl.load(c.bias_ids + i), x + tl.load(c.bias_values + i), x)
    return x
