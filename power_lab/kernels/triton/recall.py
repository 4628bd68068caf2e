"""What followed the longest match of a sequence's end in itself, found on the device; the semantics are `kernels/numba/recall.py`'s."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from power_lab.kernels.ops import BLOCK, LONGEST_MATCH
from power_lab.kernels.triton import chain
from power_lab.kernels.triton.sample import arrive

PLAN = "recall: whole numbers alone; the longest match, of equals the last"
ENDS = 512  # of matches that one program looks at
ABREAST = 4  # tokens that are compared before one looks whether any end is left; divides `LONGEST_MATCH`
NOTED = 128  # rows of one program of `note`


class Scratch:
    """What the programs of a sequence tell each other. `arrived` is 0 before and after a call."""

    def __init__(self, sequences: int, pages: int, device: torch.device | str) -> None:
        parts = triton.cdiv(pages * BLOCK, ENDS)
        self.best = torch.empty((sequences, parts), dtype=torch.int64, device=device)
        self.arrived = torch.zeros(sequences, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.best.nbytes + self.arrived.nbytes


@triton.jit(do_not_specialize=["rows", "before"], do_not_specialize_on_alignment=["ids", "drawn", "slots"])
def _note(ids, drawn, before, slots, told, rows, NOTED: tl.constexpr, PDL: tl.constexpr):
    chain.begin(PDL)
    chain.wait(PDL)
    r = tl.program_id(0) * NOTED + tl.arange(0, NOTED)
    token = tl.load(ids + r, mask=r < rows, other=0)
    if drawn is not None:
        at = -1 - token
        token = tl.where(token < 0, tl.load(drawn + at, mask=(at >= 0) & (at < before), other=0), token)
    tl.store(told + tl.load(slots + r, mask=r < rows, other=0), token, mask=r < rows)


@triton.jit
def _told(told, table, position, wanted, BLOCK: tl.constexpr):
    page = tl.load(table + position // BLOCK, mask=wanted, other=0).to(tl.int64)
    return tl.load(told + page * BLOCK + position % BLOCK, mask=wanted, other=-1)


@triton.jit(
    do_not_specialize=["pages", "least", "width"],
    do_not_specialize_on_alignment=["tables", "came", "source", "drafts", "out"],
)
def _recall(
    told, tables, pages, came, marks, least, source, drafts, out, width, best, arrived,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, ENDS: tl.constexpr, LONGEST: tl.constexpr, ABREAST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some ends of matches of one sequence."""
    chain.begin(PDL)
    chain.wait(PDL)
    s, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    mark = tl.load(came + s)
    known = mark >= 0
    last = tl.load(marks + mark * 2, mask=known, other=0).to(tl.int32)
    anchor = tl.maximum(tl.load(marks + mark * 2 + 1, mask=known, other=0).to(tl.int32), 0)
    table = tables + s * pages

    end = part * ENDS + tl.arange(0, ENDS)
    length = tl.zeros([ENDS], tl.int32)
    alive, back = end < last, last * 0
    going = part * ENDS < last
    while going:
        for j in tl.static_range(ABREAST):  # whose loads wait for nothing but themselves
            at = back + j
            own = tl.where(at == 0, anchor, _told(told, table, last - at, (at > 0) & (at <= last), BLOCK))
            there = (end < last) & (end >= at)
            alive = alive & there & (_told(told, table, end - at, there, BLOCK) == own)
            length += alive.to(tl.int32)
        back += ABREAST
        going = (back < LONGEST) & (back <= last)
        if going:
            going = tl.max(alive.to(tl.int32)) > 0
    key = tl.where(length > 0, (length.to(tl.int64) << 32) + end, -1)
    tl.store(best + s * parts + part, tl.max(key))

    if arrive(arrived + s, parts):
        p = tl.arange(0, PARTS)
        found = tl.max(tl.load(best + s * parts + p, mask=p < parts, other=-1, cache_modifier=".cg"))
        matched = tl.where(found < 0, 0, found >> 32).to(tl.int32)
        first = (found & 0xFFFFFFFF).to(tl.int32) + 1
        k = tl.arange(0, WIDTH)
        followed = first + k % tl.maximum(last + 1 - first, 1)
        token = _told(told, table, followed, (matched > 0) & (followed < last), BLOCK)
        token = tl.where(matched > 0, tl.where(followed == last, anchor, token), 0)
        given = tl.load(source + s * width + k, mask=k < width, other=-1)
        given = tl.where(known & (matched < least), given, -1)
        token = tl.where(given >= 0, tl.load(drafts + given, mask=given >= 0, other=0), token)
        tl.store(out + s * width + k, token, mask=k < width)


def note(ids: Tensor, drawn: Tensor | None, slots: Tensor, told: Tensor) -> None:
    """As `Ops.note`."""
    if rows := len(ids):
        grid, options = (triton.cdiv(rows, NOTED),), {"num_warps": 4, **chain.options(told.device)}
        _note[grid](ids, drawn, 0 if drawn is None else len(drawn), slots, told, rows, NOTED, **options)


def recall(
    told: Tensor,
    tables: Tensor,
    came: Tensor,
    marks: Tensor,
    least: int,
    source: Tensor,
    drafts: Tensor,
    out: Tensor,
    scratch: Scratch,
) -> None:
    """As `Ops.recall`. scratch: for at least so many sequences, of as many pages."""
    (sequences, pages), width = tables.shape, source.shape[1]
    if source.shape != out.shape or len(came) != sequences or len(out) != sequences:
        raise ValueError(f"{sequences} sequences, sources {list(source.shape)}, drafts {list(out.shape)}")
    parts = triton.cdiv(pages * BLOCK, ENDS)
    assert scratch.best.numel() >= sequences * parts and len(scratch.arrived) >= sequences, "scratch is too small"
    _recall[(sequences, parts)](
        told, tables, pages, came, marks, least, source, drafts, out, width, scratch.best, scratch.arrived,
        WIDTH=triton.next_power_of_2(width), PARTS=triton.next_power_of_2(parts), ENDS=ENDS, LONGEST=LONGEST_MATCH,
        ABREAST=ABREAST, BLOCK=BLOCK, num_warps=4, **chain.options(told.device),
    )  # fmt: skip
