"""Rows laid aside and taken, logits spread, blocks convolved, through Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.triton import conv, moves, norm
from tests.kernels.test_moves import orders
from tests.kernels.triton.test_norm import normal

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
KINDS = (torch.float32, torch.bfloat16)


def poison(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=kind)


@pytest.mark.parametrize("width", [1, 40, 576])
@pytest.mark.parametrize("parts", ["x", "delta", "post"])
@pytest.mark.parametrize("placed", [False, True])
def test_tapped_rows_have_the_bits_of_the_residual_stream(width: int, parts: str, placed: bool) -> None:
    x, delta, post = normal(3, width), normal(3, width, seed=1), normal(width, seed=2)
    slots, out, want = torch.tensor([4, 0, 3]) if placed else None, poison(5, 3 * width + 1), x.clone()
    if parts != "x":
        norm.norm(want, delta, post if parts == "post" else None, None, 1e-5, None)
    kept = x.clone(), delta.clone()
    moves.tap(x, None if parts == "x" else delta, post if parts == "post" else None, 1e-5, out, width + 1, slots)
    places = range(3) if slots is None else slots.tolist()
    assert torch.equal(out[list(places), width + 1 : 2 * width + 1], want)
    out[list(places), width + 1 : 2 * width + 1] = torch.nan
    assert out.isnan().all(), "something beside was written"
    assert torch.equal(x, kept[0]) and torch.equal(delta, kept[1])


def test_taps_are_rounded_and_may_go_nowhere() -> None:
    x, out = normal(4, 40), poison(3, 80, kind=torch.bfloat16)
    moves.tap(x, None, None, 0.0, out, 16, torch.tensor([-1, 3, 1, 2**40]))
    assert out[[0, 2]].isnan().all()
    np.testing.assert_allclose(out[1, 16:56].float().numpy(), x[2].numpy(), rtol=1e-2)  # truncated, where a GPU rounds
    assert out[1, :16].isnan().all() and out[1, 56:].isnan().all()
    for column in (-1, 41):
        with pytest.raises(ValueError, match="columns from"):
            moves.tap(x, None, None, 0.0, out, column, None)
    moves.tap(x[:0], None, None, 0.0, out, 0, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [40, 2304])
def test_rows_are_taken(width: int, kind: torch.dtype) -> None:
    table, index, out = (
        normal(9, width).to(kind),
        torch.tensor([8, -1, 0, 0, -(2**62), 9, 2**40]),
        poison(8, width, kind=kind),
    )
    moves.take(table, index, out[:7])
    assert torch.equal(out[:5], reference.take(table, index[:5]))
    assert out[5:].isnan().all()
    moves.take(table, index[:0], out[:0])
    with pytest.raises(ValueError, match="is expected"):
        moves.take(table, index, out)


@pytest.mark.parametrize(
    ("ids", "vocabulary"),
    [
        ([0, 6, 7, 99], 100),
        ([99], 100),
        ([], 100),
        (list(range(100)), 100),
        (sorted(np.random.default_rng(0).permutation(2500)[:900].tolist()), 2500),
        ([1023, 1024, 2047], 2048),
        (list(range(1100, 1105)), 3000),
    ],
)
def test_logits_of_some_tokens_among_those_of_all(ids: list[int], vocabulary: int) -> None:
    values, columns = normal(2, len(ids)), torch.tensor(ids, dtype=torch.int32)
    out = poison(3, vocabulary)
    moves.scatter_columns(values, columns, out[:2])
    assert torch.equal(out[:2], reference.scatter_columns(values, columns, vocabulary))
    assert out[2].isnan().all()
    with pytest.raises(ValueError, match="is expected"):
        moves.scatter_columns(values, columns, out)


@pytest.mark.parametrize("number", [1, 255, 256, 257, 900])
def test_places_in_a_list_are_found(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few probes the search takes several rounds."""
    monkeypatch.setattr(moves, "PROBES", 4)
    ids = torch.from_numpy(np.sort(np.random.default_rng(number).permutation(3 * number)[:number]).astype(np.int32))
    values, out = normal(1, number), poison(1, 3 * number)
    moves.scatter_columns(values, ids, out)
    assert torch.equal(out, reference.scatter_columns(values, ids, 3 * number))


@pytest.mark.parametrize("order", ["blocks", "positions", "alone"])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("rows", "width", "groups", "taps"), [(1, 16, 1, 2), (6, 576, 36, 2), (7, 48, 3, 3)])
@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1], KINDS[:1] * 2])
def test_convolutions(
    rows: int, width: int, groups: int, taps: int, side: int, order: str, kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    x, coef = normal(rows, width).to(kinds[0]), normal(rows, 2 * taps * groups, seed=1)
    base, previous, out = normal(2, taps, width, seed=2), orders(rows)[order], poison(rows + 1, width, kind=kinds[1])
    conv.dynamic_conv(x, coef, base, side, torch.tensor(previous, dtype=torch.int32), out[:rows])
    want = reference.dynamic_conv(x, coef, base, side, previous)
    tolerance = 1e-2 if kinds[1] == torch.bfloat16 else 1e-5
    np.testing.assert_allclose(out[:rows].double().numpy(), want.numpy(), rtol=tolerance, atol=1e-5)
    assert out[rows].isnan().all()


def test_convolutions_that_cannot_be_are_errors() -> None:
    x, coef, base, previous = normal(2, 24), normal(2, 12), normal(2, 2, 24), torch.full((2,), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match="another array"):
        conv.dynamic_conv(x, coef, base, 0, previous, x)
    with pytest.raises(ValueError, match="side 2"):
        conv.dynamic_conv(x, coef, base, 2, previous, poison(2, 24))
    for wrong in (normal(2, 20), normal(2, 3), normal(1, 12)):
        with pytest.raises(ValueError, match="shapes of a convolution"):
            conv.dynamic_conv(x, wrong, base, 0, previous, poison(2, 24))


def test_every_kernel_compiles_for_hopper() -> None:
    """In a process of its own, since this one interprets."""
    script = Path(__file__).with_name("compile_moves.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=170, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
