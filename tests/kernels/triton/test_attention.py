"""Paged attention through Triton's interpreter, against the reference: what is masked, folded and written where."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.kernels import reference
from power_lab.kernels.ops import BLOCK, Batch
from power_lab.kernels.triton import attention, rope

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@dataclass(frozen=True)
class Case:
    """Sequences as (first position, rows), and what a layer does to them."""

    spans: tuple[tuple[int, int], ...] = ((0, 1),)
    heads: tuple[int, int, int] = (2, 1, 16)
    window: int = 0
    softcap: float = 0.0
    temperature: bool = False
    sinks: bool = False
    shuffled: bool = False


SPLITS = ((600, 1), (255, 2), (256, 1))
CASES = [
    Case(),
    Case(SPLITS),
    Case(SPLITS, heads=(3, 1, 16)),
    Case(((515, 3), (0, 1)), heads=(4, 2, 24), window=300),
    Case(((515, 3),), window=1),
    Case(((300, 2),), softcap=2.0, temperature=True),
    Case(((0, 90), (250, 10)), heads=(2, 1, 16)),
    Case(((300, 80),), heads=(3, 1, 16), window=100),
    Case(((0, 40), (60, 30)), heads=(1, 1, 16), shuffled=True, temperature=True),
    Case(((20, 2),), heads=(40, 1, 16)),
    Case(((70, 1), (130, 2)), heads=(2, 1, 256)),
    Case(((64, 66),), heads=(2, 1, 160)),
    Case(SPLITS, heads=(3, 1, 16), sinks=True),
    Case(((300, 80),), heads=(4, 2, 16), window=100, sinks=True),
    Case(((515, 1),), heads=(4, 2, 24), sinks=True),
]


def make(case: Case) -> tuple[torch.Tensor, torch.Tensor, Batch, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """qkv of a step, its queries, its batch, pages in which only what came before is not NaN, and each row's (keys, values)."""
    q_heads, kv_heads, dim = case.heads
    rng, pages = np.random.default_rng(1), -(-max(first + rows for first, rows in case.spans) // BLOCK) + 1
    tables = (rng.permutation(len(case.spans) * pages) + 1).reshape(len(case.spans), pages).astype(np.int32)
    keys, values = rope.kv_cache(tables.size + 1, kv_heads, dim, "cpu")
    keys.fill_(torch.nan), values.fill_(torch.nan)
    history = []
    for table, (first, rows) in zip(tables, case.spans, strict=True):
        kv = torch.from_numpy(rng.standard_normal((2, first + rows, kv_heads, dim)).astype(np.float32)).bfloat16()
        for cache, part in zip((keys, values), kv, strict=True):
            seen = max(first + 1 - case.window, 0) if case.window else 0
            for position in range(seen, first + rows):
                cache[table[position // BLOCK], :, position % BLOCK] = part[position]
        tables_end = -(-(first + rows) // BLOCK)
        table[tables_end:] = 0
        history.append(kv.double())
    positions = np.concatenate([np.arange(first, first + rows) for first, rows in case.spans])
    table_of = np.repeat(np.arange(len(case.spans)), [rows for _, rows in case.spans])
    order = rng.permutation(len(positions)) if case.shuffled else np.arange(len(positions))
    positions, table_of = positions[order].astype(np.int32), table_of[order].astype(np.int32)
    qkv = torch.from_numpy(rng.standard_normal((len(order), (q_heads + 2 * kv_heads) * dim)).astype(np.float32))
    plain = qkv[:, : q_heads * dim].view(-1, q_heads, dim).bfloat16()
    rope.queries(qkv, q_heads, dim).copy_(plain)
    ints = [torch.from_numpy(x) for x in (positions, positions.astype(np.int64), table_of, tables)]
    return qkv, plain.float(), Batch(ints[0], ints[0], *ints[1:], ints[0]), keys, values, history


def attend(case: Case, step: tuple, **cut: int | bool) -> torch.Tensor:
    """f32 [rows, q_heads * head_dim] of what `make` made, by the plan for it or one that differs from it in `cut`."""
    q_heads, kv_heads, dim = case.heads
    qkv, _, batch, keys, values, _ = step
    rows, pages = qkv.shape[0], batch.tables.shape[1]
    plan = replace(attention.plan(rows, *case.heads, pages), **cut)
    scratch = torch.full((attention.scratch_floats(rows, q_heads, kv_heads, dim, pages),), torch.nan)
    sinks = torch.linspace(-3.0, 6.0, q_heads) if case.sinks else None
    out = torch.full((rows, q_heads * dim), torch.nan)
    attention.attention(
        qkv, listed(batch, plan.rows), q_heads, dim**-0.5, keys, values, out, case.window, case.softcap, heat(case), scratch,
        plan, sinks,
    )  # fmt: skip
    return out


def listed(batch: Batch, size: int) -> Batch:
    """The batch with its groups of up to `size` rows."""
    room = torch.full((len(batch.positions) + 1,), -1, dtype=torch.int32)
    return replace(batch, groups={size: attention.list_rows(batch, size, room)})


def heat(case: Case) -> torch.Tensor | None:
    return (1 + torch.arange(1000) % 7 / 10) if case.temperature else None


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_rows_see_their_own_keys(case: Case) -> None:
    q_heads, _, dim = case.heads
    step = make(case)
    _, queries, batch, _, _, history = step
    out, temperature = attend(case, step), heat(case)
    sinks = torch.linspace(-3.0, 6.0, q_heads) if case.sinks else None
    for row in range(len(out)):
        position = int(batch.positions[row])
        k, v = history[int(batch.table_of[row])][:, : position + 1]
        scale = dim**-0.5 * (float(temperature[position]) if temperature is not None else 1.0)
        want = reference.attention(queries[row], k, v, scale, case.window, case.softcap, sinks).reshape(-1)
        np.testing.assert_allclose(out[row].numpy(), want.numpy(), rtol=2e-5, atol=2e-6)


EQUAL = [
    Case(((515, 2), (130, 1)), heads=(2, 1, 24), window=300, sinks=True),
    Case(((300, 2), (70, 1)), softcap=2.0, temperature=True),
    Case(((20, 2), (400, 1), (129, 1), (140, 1)), heads=(3, 1, 16), sinks=True),
    Case(((70, 1), (130, 2)), heads=(2, 1, 256)),
    Case(((64, 2),), heads=(2, 1, 160)),
]


@pytest.mark.parametrize("case", EQUAL, ids=repr)
def test_plans_do_not_change_bits(case: Case) -> None:
    """Cut anywhere, read in either way."""
    step = make(case)
    want = attend(case, step, programs=0, described=False)
    assert attend(case, step, programs=0, described=True).equal(want)
    assert attend(case, step, programs=0, bare=False).equal(want)
    for programs, described in ((1, False), (3, True), (5, False), (64, True)):
        for bare in (False, True):
            found = attend(case, step, programs=programs, described=described, bare=bare)
            assert found.equal(want), f"{programs} programs, bare {bare}"


@pytest.mark.parametrize("heads", [(2, 1, 16), (3, 1, 64), (2, 1, 128), (2, 1, 160), (2, 1, 256)])
def test_ways_do_not_change_bits(heads: tuple[int, int, int]) -> None:
    """All that steps of a width may take."""
    case = Case(((130, 2), (20, 1)), heads=heads)
    step, ways = make(case), attention.ways(heads[2])
    found = [
        attend(
            case,
            step,
            programs=0 if way.whole else 3,
            stages=way.stages,
            described=way.described,
            bare=way.bare,
        )
        for way in ways
    ]
    assert {way.whole for way in ways} == {False, True}
    for way, out in zip(ways, found, strict=True):
        assert out.equal(found[0]), way


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=6)


@given(ROWS, st.sampled_from([1, 3, 16]))
@settings(max_examples=30, deadline=None)
def test_groups_end_where_rows_do_not_follow(spans: list[tuple[int, int, int]], size: int) -> None:
    """spans: (table, first position, rows). Nothing is written behind the last group."""
    rows = [(table, first + i) for table, first, count in spans for i in range(count)]
    batch = batch_of(rows)
    found = listed(batch, size).groups[size].tolist()
    want = [0, *(i for i in range(1, len(rows)) if i % size == 0 or rows[i] != (rows[i - 1][0], rows[i - 1][1] + 1))]
    assert found[: found[0] + 1] == [len(want), *want]
    assert set(found[found[0] + 1 :]) <= {-1}


def batch_of(rows: list[tuple[int, int]]) -> Batch:
    """Rows of (table, position), over tables of 4 pages."""
    table_of, positions = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    return Batch(positions, positions, positions.long(), table_of, torch.ones(3, 4, dtype=torch.int32), positions)


def test_a_list_serves_all_layers_whose_programs_take_as_many_rows() -> None:
    """One for heads of either width with 4 query heads a KV head, another where there are 3; none for those that share splits."""
    batch, room = batch_of([(0, p) for p in range(70)]), torch.full((3 * 71,), -1, dtype=torch.int32)
    found = attention.group(batch, [(32, 8, 128), (9, 3, 64), (4, 1, 64)], room)
    assert found.groups.keys() == {16, 21}
    for at, (size, groups) in enumerate(found.groups.items()):
        assert groups.data_ptr() == room[71 * at :].data_ptr(), "where the next step puts it, too"
        first = range(0, 70, size)
        assert groups.tolist()[: len(first) + 1] == [len(first), *first]
    assert (room[2 * 71 :] == -1).all(), "nothing is listed twice"
    few = batch_of([(0, p) for p in range(5)])
    assert attention.group(few, [(32, 8, 128)], room) is few


def test_rows_that_nobody_grouped_are_refused() -> None:
    case = Case(((64, 66),))
    qkv, _, batch, keys, values, _ = make(case)
    out = torch.full((66, 32), torch.nan)
    with pytest.raises(ValueError, match=r"call Ops\.group"):
        attention.attention(qkv, batch, 2, 0.25, keys, values, out, 0, 0.0, None, torch.empty(0))
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("rows", "heads", "pages", "wanted"),
    [
        (1, (32, 8, 128), 64, attention.Plan(4, 16, 1, 256, 2, described=True)),
        (1, (32, 8, 128), 512, attention.Plan(4, 16, 1, 264, 2, described=True)),
        (8, (32, 8, 128), 16, attention.Plan(4, 16, 1, 264, 2, described=True)),
        (64, (32, 8, 128), 512, attention.Plan(4, 16, 1, 0, 3, described=True, bare=False)),
        (64, (32, 8, 128), 256, attention.Plan(4, 16, 1, 264, 2, described=True)),
        (64, (32, 8, 128), 129, attention.Plan(4, 16, 1, 264, 2, described=True)),
        (64, (32, 8, 128), 128, attention.Plan(4, 16, 1, 0, 3, described=True, bare=False)),
        (64, (16, 8, 128), 16, attention.Plan(2, 32, 1, 0, 3, described=True, bare=False)),
        (48, (32, 8, 128), 128, attention.Plan(4, 16, 1, 264, 2, described=True)),
        (49, (9, 3, 64), 128, attention.Plan(3, 21, 1, 0, 3, described=True)),
        (49, (9, 3, 64), 1, attention.Plan(3, 21, 1, 0, 3, described=True)),
        (48, (9, 3, 64), 128, attention.Plan(3, 21, 1, 264, 1)),
        (8, (9, 3, 64), 256, attention.Plan(3, 21, 1, 264, 2, described=True)),
        (64, (9, 3, 64), 129, attention.Plan(3, 21, 1, 264, 1)),
        (64, (6, 2, 80), 128, attention.Plan(3, 21, 1, 0, 2)),
        (64, (2, 1, 160), 4, attention.Plan(2, 32, 1, 264, 1)),
        (64, (4, 1, 256), 4, attention.Plan(4, 16, 1, 0, 3, described=True)),
        (48, (4, 1, 256), 4, attention.Plan(4, 16, 1, 264, 1)),
        (16, (4, 1, 256), 4, attention.Plan(4, 16, 1, 128, 3, described=True, bare=False)),
        (17, (4, 1, 256), 4, attention.Plan(4, 16, 1, 136, 1)),
        (16, (4, 1, 256), 129, attention.Plan(4, 16, 1, 264, 1)),
        (8192, (32, 8, 128), 512, attention.Plan(4, 16, 1, 0, 2, described=True)),
        (1, (9, 3, 64), 4, attention.Plan(3, 21, 1, 6, 1)),
        (8192, (9, 3, 64), 4, attention.Plan(3, 21, 1, 0, 3, described=True)),
        (1, (4, 1, 256), 4, attention.Plan(4, 16, 1, 8, 3, described=True, bare=False)),
        (1, (4, 1, 256), 129, attention.Plan(4, 16, 1, 258, 2, described=True)),
        (20, (80, 1, 64), 512, attention.Plan(64, 1, 2, 264, 2, described=True)),
    ],
)
def test_plans(rows: int, heads: tuple[int, int, int], pages: int, wanted: attention.Plan) -> None:
    assert attention.plan(rows, *heads, pages) == wanted
    assert wanted.heads * wanted.rows <= attention.LINES and wanted.heads * wanted.head_blocks >= heads[0] // heads[1]


def test_scratch_is_bounded_over_all_steps() -> None:
    for heads in ((32, 8, 128), (9, 3, 64), (4, 1, 256)):
        most = max(attention.scratch_floats(rows, *heads, 512) for rows in range(1, 200))
        assert attention.scratch_floats(199, *heads, 512) == most
        assert most <= attention.SCRATCH


@given(
    st.integers(1, 300),
    st.sampled_from([(32, 8, 128), (9, 3, 64), (4, 1, 256), (6, 2, 80), (2, 1, 160)]),
    st.integers(1, 5000),
)
@settings(max_examples=300, deadline=None)
def test_scratch_holds_the_splits_of_every_plan(rows: int, heads: tuple[int, int, int], pages: int) -> None:
    (q_heads, _, dim), plan = heads, attention.plan(rows, *heads, pages)
    need = rows * q_heads * -(-pages * BLOCK // attention.split(dim)) * (attention._width(dim) + 2)
    assert plan.programs == 0 or need <= attention.scratch_floats(300, *heads, pages) <= attention.SCRATCH


@pytest.mark.timeout(400)
def test_every_variant_compiles_for_hopper() -> None:
    """In a process of its own, since this one interprets."""
    script = Path(__file__).with_name("compile_attention.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=380, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
