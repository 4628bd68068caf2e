"""Sums of splits that are left to their reader: the bits of those that the product adds up itself, through Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from power_lab.kernels import reference
from power_lab.kernels.ops import BLOCK, Batch
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import linear, norm, rope
from power_lab.kernels.triton.linear import NARROW, Workspace
from power_lab.kernels.triton.parts import Parts
from power_lab.kernels.triton.planes import FORMS, DeviceWeight
from tests.kernels.triton.matrices import PLAIN, operand, weight
from tests.kernels.triton.test_rope import CASES, Case

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

DEEP = 1024  # of K: two splits of stored codes, four of plain values
WORK = Workspace.on("cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


def product(
    x: torch.Tensor, weights: tuple[DeviceWeight, ...], bias: torch.Tensor | None, apart: bool | None
) -> tuple[Parts, torch.Tensor]:
    """What the product leaves, in poisoned scratch, and its poisoned result."""
    WORK.partials.fill_(torch.nan)
    out = poison(len(x), sum(w.rows for w in weights))
    parts = Parts(out, WORK.partials, apart)
    linear.linear(x, weights, parts, WORK, bias)
    assert not WORK.counters.any()
    return parts, out


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numpy().tobytes() == other.numpy().tobytes()


@settings(max_examples=12)
@given(
    type=st.sampled_from([*FORMS, *PLAIN]),
    rows=st.one_of(st.integers(1, 300), st.sampled_from([16, 17, 64, NARROW, NARROW + 1])),
    biased=st.booleans(),
    post=st.booleans(),
)
@example(QuantType.Q4_K, 1, True, False)
@example(QuantType.BF16, NARROW, False, True)
@example(QuantType.Q8_0, NARROW + 1, True, True)
def test_a_norm_adds_them(type: QuantType, rows: int, biased: bool, post: bool) -> None:
    (stored, _), width = weight(type, 40, DEEP), 40
    x, _ = operand(normal(rows, DEEP), type)
    bias = normal(width, seed=1) if biased else None
    hidden, factor, before = normal(rows, width, seed=2), normal(width, seed=3), normal(width, seed=4)
    found = []
    for apart in (False, True):
        parts, out = product(x, (stored,), bias, apart)
        assert (parts.splits > 1) == (apart and rows <= NARROW) == bool(out.isnan().all())
        summed, normed = hidden.clone(), poison(rows, width)
        norm.norm(summed, parts, before if post else None, factor, 1e-5, normed)
        assert not summed.isnan().any() and not normed.isnan().any()
        found.append((summed, normed))
    (hidden_whole, normed_whole), (hidden_parts, normed_parts) = found
    assert same_bits(hidden_whole, hidden_parts) and same_bits(normed_whole, normed_parts)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("type", [QuantType.BF16, QuantType.Q4_0])
def test_a_rotation_adds_them(case: Case, type: QuantType) -> None:
    """And reads all of them before it writes: what it leaves is in the result's own memory."""
    (q_heads, kv_heads, dim), rows = case.heads, 3
    positions, slots = torch.tensor([70, 3, 0], dtype=torch.int32), torch.tensor([2 * BLOCK + 5, BLOCK + 63, 0])
    none = torch.empty(0, dtype=torch.int32)
    batch = Batch(none, positions, slots, none, none, none)
    table, norms = None, None
    if case.pairs is not None:
        table = reference.rope_tables(80, reference.frequencies(2 * case.pairs, 1e4), 1.1).float()
    if case.norm:
        sizes = (dim, dim) if case.norm == "head" else (q_heads * dim, kv_heads * dim)
        norms = normal(sizes[0], seed=1), normal(sizes[1], seed=2)
    weights = tuple(weight(type, heads * dim, DEEP, seed=i)[0] for i, heads in enumerate((q_heads, kv_heads, kv_heads)))
    x, _ = operand(normal(rows, DEEP), type)
    bias = normal((q_heads + 2 * kv_heads) * dim, seed=3)
    found = []
    for apart in (False, True):
        parts, out = product(x, weights, bias, apart)
        assert (parts.splits > 1) == apart
        keys, values = rope.kv_cache(3, kv_heads, dim, "cpu")
        for pages in (keys, values):
            pages.fill_(torch.nan)
        rope.rope_write(parts, batch, table, case.interleaved, q_heads, keys, values, norms, 1e-6)
        found.append([rope.queries(out, q_heads, dim).float(), keys.float(), values.float()])
        assert not found[-1][0].isnan().any()
    assert all(map(same_bits, *found))


def test_what_has_no_sums_or_several_products_is_added_by_the_product() -> None:
    for types, cols in (((QuantType.Q4_0, QuantType.Q8_0), DEEP), ((QuantType.Q4_0,), 512)):
        weights = tuple(weight(type, 16, cols)[0] for type in types)
        x, _ = operand(normal(2, cols), types[0])
        parts, out = product(x, weights, None, True)
        assert parts.splits == 1 and not out.isnan().any()


def test_few_sums_are_left_and_many_beside_many_rows() -> None:
    for splits, rows, left in ((2, 1, True), (4, 16, True), (8, 1, False), (8, 32, False), (8, 33, True)):
        assert linear.left(splits, rows) == left
    (stored, _), (deeper, _) = weight(QuantType.Q4_0, 16, DEEP), weight(QuantType.Q4_0, 16, 4 * DEEP)
    x, _ = operand(normal(2, 4 * DEEP), QuantType.Q4_0)
    whole, _ = product(x, (deeper,), None, None)
    assert linear.reduction(16, 4 * DEEP, False, True)[0] > 4 and whole.splits == 1
    x = x[:, :DEEP].contiguous()
    left, _ = product(x, (stored,), None, None)
    assert left.splits == 2 and left.scratch.data_ptr() == WORK.partials.data_ptr(), "no memory but the plan's"
    out = poison(2, 16)
    linear.linear(x, (stored,), out, WORK)
    assert not out.isnan().any(), "who cannot add parts gets none"


def test_a_filled_one_is_filled_anew() -> None:
    """A step may be recorded again: what an earlier launch has left says nothing."""
    x, _ = operand(normal(2, DEEP), QuantType.Q4_0)
    parts, _ = product(x, (weight(QuantType.Q4_0, 16, DEEP)[0],), normal(16), True)
    linear.linear(x[:, :512].contiguous(), (weight(QuantType.Q4_0, 16, 512)[0],), parts, WORK)
    assert parts.splits == 1 and parts.bias is None and not parts.out.isnan().any()


@pytest.mark.timeout(600)
def test_products_and_their_readers_compile_for_hopper() -> None:
    """In a process of its own, since this one interprets."""
    script = Path(__file__).with_name("compile_parts.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=550, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
