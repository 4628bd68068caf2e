"""Query and key norms, rotation and the paged write through Triton's interpreter, against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.ops import BLOCK, Batch
from power_lab.kernels.triton import rope

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@dataclass(frozen=True)
class Case:
    """q_heads, kv_heads and head_dim; rotated pairs, None for no rotation at all; which norm."""

    heads: tuple[int, int, int]
    pairs: int | None
    interleaved: bool = False
    norm: str = ""


CASES = [
    Case((9, 3, 64), 32),
    Case((9, 3, 64), 32, interleaved=True, norm="head"),
    Case((4, 2, 24), 12, norm="width"),
    Case((5, 1, 80), 16, norm="head"),
    Case((3, 3, 24), 4, interleaved=True, norm="width"),
    Case((4, 1, 256), 128, norm="head"),
    Case((4, 2, 16), None),
    Case((4, 2, 16), None, interleaved=True, norm="head"),
]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_rows_are_treated_and_written(case: Case) -> None:
    (q_heads, kv_heads, dim), heads = case.heads, case.heads[0] + case.heads[1]
    random = torch.Generator().manual_seed(1)
    positions = torch.tensor([70, 3, 0], dtype=torch.int32)
    slots = torch.tensor([2 * BLOCK + 5, 1 * BLOCK + 63, 0])
    qkv = torch.randn(3, (heads + kv_heads) * dim, generator=random)
    parts = qkv.clone().view(3, heads + kv_heads, dim)
    table, norms = None, None
    if case.pairs is not None:
        table = reference.rope_tables(80, reference.frequencies(2 * case.pairs, 1e4), 1.1).float()
    if case.norm:
        sizes = (dim, dim) if case.norm == "head" else (q_heads * dim, kv_heads * dim)
        norms = tuple(1 + 0.3 * torch.randn(size, generator=random) for size in sizes)
    keys, values = rope.kv_cache(3, kv_heads, dim, "cpu")
    keys.fill_(torch.nan), values.fill_(torch.nan)
    none = torch.empty(0, dtype=torch.int32)
    batch = Batch(none, positions, slots, none, none, none)
    rope.rope_write(qkv, batch, table, case.interleaved, q_heads, keys, values, norms, 1e-6)

    want = parts[:, :heads].double()
    if norms is not None:
        halves = zip((want[:, :q_heads], want[:, q_heads:]), norms, strict=True)
        flat = (
            reference.rms_norm(x if case.norm == "head" else x.flatten(1), w, 1e-6).reshape(x.shape) for x, w in halves
        )
        want = torch.cat(list(flat), dim=1)
    if table is not None:
        want = reference.rope(want, table[positions.long()].double(), case.interleaved)
    got = qkv.view(3, heads + kv_heads, dim)
    turned = rope.queries(qkv, q_heads, dim).float()
    np.testing.assert_allclose(turned.numpy(), want[:, :q_heads].numpy(), rtol=1e-2, atol=1e-6)
    assert torch.equal(got[:, q_heads:], parts[:, q_heads:]), "only queries are changed in place"
    at = slots // BLOCK, slice(None), slots % BLOCK
    np.testing.assert_allclose(keys[at].double().numpy(), want[:, q_heads:].numpy(), rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(values[at].float().numpy(), parts[:, heads:].numpy(), rtol=1e-2, atol=1e-6)
    keys[at], values[at] = torch.nan, torch.nan
    assert keys.isnan().all() and values.isnan().all(), "nothing else is written"
