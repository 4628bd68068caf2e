"""Matrix products through Triton's interpreter, and compiled for sm_90."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import gpu_middle
from power_lab.kernels import reference
from power_lab.kernels.ops import Activation
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import linear as kernels
from power_lab.kernels.triton import middle
from power_lab.kernels.triton.middle import Tiling
from power_lab.kernels.triton.product import combine
from tests.kernels.triton.matrices import BLOCKS_OF_32, BLOCKS_OF_256, PLAIN, operand, rounded, weight

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # e^-g of a gate far below 0
]

SHAPES = [
    *((type, 70, 96) for type in (*BLOCKS_OF_32, *PLAIN)),  # neither tiles nor steps are whole
    *((type, 70, 512) for type in BLOCKS_OF_256),
    (QuantType.Q4_K, 70, 1024),  # splits
    (QuantType.BF16, 70, 1300),
]
WORK = kernels.Workspace.on("cpu")


def activations(rows: int, cols: int, type: QuantType) -> tuple[torch.Tensor, torch.Tensor]:
    """As products of that type are given them, and their f32 values."""
    return operand(torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)), type)


def poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


def assert_close(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor, error: float = 1e-5) -> None:
    """`size`: sums of absolute products, what an f32 sum's error is relative to."""
    assert ((got - want).abs() <= error * size + 1e-6).all(), (got - want).abs().max()


@pytest.mark.parametrize(("type", "n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 19])
def test_linear(type: QuantType, n: int, k: int, rows: int) -> None:
    stored, values = weight(type, n, k)
    (given, x), bias, out = activations(rows, k, type), torch.arange(float(n)), poison(rows + 1, n)
    kernels.linear(given, (stored,), out[:rows], WORK, bias)
    want = reference.linear(x, rounded(values, type), bias)
    assert_close(out[:rows], want, reference.linear(x.abs(), values.abs(), bias))
    assert out[rows].isnan().all(), "a row behind the output was written"
    assert not WORK.counters.any(), "counters are left as they were found"


def test_splits_are_covered() -> None:
    assert kernels.reduction(70, 1024, False, False) == (4, 256)
    assert kernels.reduction(70, 1300, False, False) == (3, 512)
    assert kernels.reduction(70, 512, False, False) == (1, 512)
    assert kernels.reduction(70, 1024, True, True) == (2, 512)


@pytest.mark.parametrize("used", [8, 24, 48])
def test_tiles_that_are_partly_empty_give_the_same_bits(used: int) -> None:
    parts = [weight(QuantType.BF16, n, 1300, seed=n)[0] for n in (70, 5, 65)]
    (given, _), bias = activations(3, 1300, QuantType.BF16), torch.arange(140.0)
    whole = kernels.Shape(128, 64, 16, 4, 4, 8)
    results = []
    for shape in (whole, replace(whole, used=used)):
        results.append(poison(4, 140))
        kernels.launch(given, tuple(parts), results[-1][:3], WORK, bias, 0, shape)
    assert torch.equal(results[0][:3], results[1][:3])
    assert results[1][3].isnan().all(), "a row behind the output was written"
    assert not WORK.counters.any()


@pytest.mark.parametrize("used", [16, 48])
@pytest.mark.parametrize("paired", [False, True])
def test_gated_tiles_that_are_partly_empty_give_the_same_bits(used: int, paired: bool) -> None:
    gate, up = (weight(QuantType.BF16, 70, 160, seed=seed)[0] for seed in (1, 2))
    given, _ = activations(3, 160, QuantType.BF16)
    results = []
    for shape in (kernels.Shape(128, 64, 16, 4, 4, 8), kernels.Shape(128, 64, 16, 4, 4, 8, paired, used=used)):
        results.append(poison(4, 70))
        kernels.launch(given, (gate, up), results[-1][:3], WORK, None, kernels.SILU, shape)
    assert torch.equal(results[0][:3], results[1][:3])
    assert results[1][3].isnan().all(), "a row behind the output was written"


def test_stacked_weights_of_one_type_and_of_several() -> None:
    for types in ([QuantType.Q4_0] * 3, [QuantType.Q5_0, QuantType.Q5_0, QuantType.Q8_0], [QuantType.BF16] * 2):
        parts = [weight(type, n, 64, seed=n) for type, n in zip(types, (70, 5, 65), strict=False)]
        values = torch.cat([rounded(v, types[0]) for _, v in parts])
        (given, x), out = activations(3, 64, types[0]), poison(3, len(values))
        bias = torch.arange(float(len(values)))
        kernels.linear(given, tuple(w for w, _ in parts), out, WORK, bias)
        assert_close(out, reference.linear(x, values, bias), reference.linear(x.abs(), values.abs(), bias))


@pytest.mark.parametrize(("n", "k"), [(70, 96), (300, 1304), (40, 97)])
def test_many_rows(n: int, k: int) -> None:
    """Tiles that the copy engine brings, in splits, and a K that it cannot take."""
    stored, values = weight(QuantType.BF16, n, k)
    (given, x), bias, out = activations(140, k, QuantType.BF16), torch.arange(float(n)), poison(141, n)
    kernels.linear(given, (stored,), out[:140], WORK, bias)
    assert_close(out[:140], reference.linear(x, values, bias), reference.linear(x.abs(), values.abs(), bias))
    assert out[140].isnan().all(), "a row behind the output was written"


@pytest.mark.parametrize("type", [QuantType.Q8_0, QuantType.Q5_K])
def test_many_rows_of_stored_codes_in_several_panels(type: QuantType) -> None:
    (stored, values), k = weight(type, 70, 512), 512
    (given, x), out = activations(130, k, type), poison(130, 70)
    kernels.linear(given, (stored,), out, kernels.Workspace(torch.empty(256 * 40), WORK.counters, WORK.mixed))
    assert_close(out, reference.linear(x, rounded(values, type)), reference.linear(x.abs(), values.abs()))


TILINGS = {  # without what does not reach the interpreter
    replace(tiling, warps=4, stages=3)
    for gated, splits, rows in itertools.product((False, True), (1, 4), gpu_middle.ROWS)
    for tiling in gpu_middle.candidates(gated, splits, rows)
}


@pytest.mark.parametrize(
    ("tiling", "rows"),
    [
        (tiling, rows)
        for tiling in sorted(TILINGS, key=str)
        for rows in (17, 33, 40, 64, 65, 100, 128)
        if rows <= 2 * tiling.bm
    ],
    ids=str,
)
def test_between_few_and_many_rows_bits_are_those_of_product(tiling: Tiling, rows: int) -> None:
    """Launched as deep and wide, which the interpreter's sums depend on: stacked weights with a bias, splits, gates; ragged N and K."""
    shape = kernels.Shape(tiling.bk, tiling.bn, tiling.bm, tiling.warps, tiling.stages)
    for sizes, k, activation in (((5,), 1032, 0), ((66, 5, 9), 136, 0), ((9, 5), 72, 0), ((5, 5), 136, 2)):
        weights = tuple(weight(QuantType.BF16, n, k, seed=i)[0] for i, n in enumerate(sizes))
        columns = sizes[0] if activation else sum(sizes)
        given, _ = activations(rows, k, QuantType.BF16)
        bias = None if activation else torch.arange(float(columns))
        splits = kernels.reduction(columns, k, activation > 0, False)
        assert splits[0] == (3 if k == 1032 else 1) and middle.able(rows, k, weights)
        want, got = (poison(rows + 1, columns) for _ in range(2))
        kernels.launch(given, weights, want[:rows], WORK, bias, activation, shape)
        scratch = WORK.partials, WORK.counters
        middle.launch(given, weights, got[:rows], scratch, bias, activation, splits, tiling)
        assert torch.equal(got[:rows], want[:rows]) and not want[:rows].isnan().any()
        assert got[rows].isnan().all(), "a row behind the output was written"
        assert not WORK.counters.any(), "counters are left as they were found"


def test_sums_of_splits_left_apart_are_those_of_product() -> None:
    stored, _ = weight(QuantType.BF16, 70, 1304)
    (given, _), out = activations(40, 1304, QuantType.BF16), poison(40, 70)
    kernels.launch(given, (stored,), out, WORK, None, 0, kernels.Shape(64, 64, 32, 4, 3), apart=True)
    sums = WORK.partials[: 3 * out.numel()]
    want = sums.clone()
    sums.fill_(torch.nan)
    scratch, splits = (WORK.partials, WORK.counters), kernels.reduction(70, 1304, False, False)
    middle.launch(given, (stored,), out, scratch, None, 0, splits, Tiling(64, 32, 64, 4, 3), apart=True)
    assert torch.equal(sums, want) and out.isnan().all() and not WORK.counters.any()


def test_which_rows_go_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 17 to 128 rows of plain values, where a tiling is named; what is launched is what product gives."""
    launched: list[tuple[int, int]] = []

    def between(columns: int, cols: int, gated: bool, rows: int) -> Tiling:
        launched.append((rows, cols))
        return Tiling(64, 32, 64, 4, 3)

    cases = [(QuantType.BF16, rows, 72) for rows in (16, 17, 128, 129)]
    cases += [(QuantType.BF16, 40, 97), (QuantType.Q8_0, 40, 96)]
    for type, rows, k in cases:
        (gate, _), (up, _) = weight(type, 70, k), weight(type, 70, k, seed=1)
        (given, _), many = activations(rows, k, type), (gate,) * 4
        found = []
        for choose in (lambda *_: None, between):
            monkeypatch.setattr(middle, "between", choose)
            gated, out, one = poison(rows, 70), poison(rows, 280), poison(rows, 70)
            kernels.gate_up(given, gate, up, gated, WORK)
            kernels.linear(given, many, out, WORK)  # more than a launch takes
            kernels.linear(given, (up,), one, WORK)
            found.append((gated, out, one))
        for before, now in zip(*found, strict=True):
            assert torch.allclose(now, before, rtol=1e-5, atol=1e-5) and not now.isnan().any()
    assert launched == [(17, 72)] * 2 + [(128, 72)] * 2


@pytest.mark.parametrize("columns", [70, 576, 4096, 6144, 12288, 16384, 16385])
@pytest.mark.parametrize("cols", [64, 576, 4096, 12288])
@pytest.mark.parametrize("gated", [False, True])
def test_every_tiling_that_is_named_was_compiled_and_timed(columns: int, cols: int, gated: bool) -> None:
    splits = kernels.reduction(columns, cols, gated, False)[0]
    for rows in range(17, 129):
        named = middle.between(columns, cols, gated, rows)
        known = [
            replace(one, ahead=0)
            for one in gpu_middle.candidates(gated, splits, min(r for r in gpu_middle.ROWS if r >= rows))
        ]
        assert named is None or replace(named, ahead=0) in known, rows
        assert named is None or columns <= 16384, "logits were not timed"


def test_many_rows_of_stacked_weights() -> None:
    parts = [weight(QuantType.BF16, n, 64, seed=n) for n in (130, 5, 65, 7)]
    values = torch.cat([v for _, v in parts])
    (given, x), out = activations(130, 64, QuantType.BF16), poison(130, len(values))
    bias = torch.arange(float(len(values)))
    kernels.linear(given, tuple(w for w, _ in parts), out, WORK, bias)
    assert_close(out, reference.linear(x, values, bias), reference.linear(x.abs(), values.abs(), bias))


@pytest.mark.parametrize("type", [QuantType.Q4_1, QuantType.BF16, QuantType.Q5_0])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [3, 130])
def test_gate_up(type: QuantType, activation: Activation, rows: int) -> None:
    (gate, gate_values), (up, up_values) = weight(type, 70, 96), weight(type, 70, 96, seed=1)
    (given, x), out = activations(rows, 96, type), poison(rows, 70)
    kernels.gate_up(given, gate, up, out, WORK, activation)
    want = reference.gate_up(x, rounded(gate_values, type), rounded(up_values, type), activation)
    assert_close(out, want, reference.linear(x.abs(), gate_values.abs()) * reference.linear(x.abs(), up_values.abs()))


@pytest.mark.parametrize("rows", [2, 130])
def test_gate_up_in_splits(rows: int) -> None:
    type = QuantType.Q4_K
    (gate, gate_values), (up, up_values) = weight(type, 70, 1024), weight(type, 70, 1024, seed=1)
    (given, x), out = activations(rows, 1024, type), poison(rows, 70)
    kernels.gate_up(given / 8, gate, up, out, WORK)
    x = x / 8
    want = reference.gate_up(x, rounded(gate_values, type), rounded(up_values, type))
    size = reference.linear(x.abs(), gate_values.abs()) * reference.linear(x.abs(), up_values.abs())
    assert_close(out, want, size)
    assert not WORK.counters.any()


def test_gate_and_up_of_different_types_in_several_pieces() -> None:
    (gate, gate_values), (up, up_values) = weight(QuantType.Q4_0, 70, 64), weight(QuantType.Q8_0, 70, 64)
    (given, x), out = activations(5, 64, QuantType.Q4_0), poison(5, 70)
    work = kernels.Workspace(WORK.partials, WORK.counters, torch.empty(2 * 2 * 70))
    kernels.gate_up(given, gate, up, out, work)
    want = reference.gate_up(x, rounded(gate_values, QuantType.Q4_0), rounded(up_values, QuantType.Q8_0))
    assert_close(out, want, reference.linear(x.abs(), gate_values.abs()) * reference.linear(x.abs(), up_values.abs()))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_over_their_whole_range(activation: Activation) -> None:
    """Through the gate of two products, a gate g and an up of 1."""
    gates = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([-1e30, -200.0, 200.0, 1e30, 0.0, -0.0])])
    out = torch.empty_like(gates)
    combine[(3,)](gates, torch.ones_like(gates), out, len(gates), kernels.ACTIVATIONS[activation], 1024, PDL=False)
    g = gates.double()
    want = torch.nn.functional.silu(g) if activation == "silu" else torch.nn.functional.gelu(g, approximate="tanh")
    assert torch.allclose(out.double(), want, rtol=2e-6, atol=1e-6)


def test_what_leaves_f16_becomes_its_largest() -> None:
    """Where a gated product is what the next one reads: values of up to 16 times 65,504, then those, and NaN stays NaN."""
    values, out = torch.tensor([1e6, 2e6, -3e38, torch.nan, 16 * 2.0**-24]), torch.empty(5, dtype=torch.float16)
    gate = torch.full((5,), 100.0)  # whose silu it is
    combine[(1,)](gate, values / 100, out, 5, kernels.ACTIVATIONS["silu"], 1024, PDL=False)
    assert out[3].isnan()
    assert out[[0, 1, 2, 4]].tolist() == [62496.0, 65504.0, -65504.0, 2.0**-24]


def test_what_cannot_be_computed_is_refused() -> None:
    stored, _ = weight(QuantType.Q4_1, 37, 64)
    x = torch.zeros(2, 64).half()
    with pytest.raises(ValueError, match="input width is 32, expected 64"):
        kernels.linear(torch.zeros(1, 32).half(), (stored,), poison(1, 37), WORK)
    with pytest.raises(ValueError, match="shape of the result"):
        kernels.linear(x[:1], (stored,), poison(1, 36), WORK)
    with pytest.raises(ValueError, match="bias width"):
        kernels.linear(x[:1], (stored,), poison(1, 37), WORK, torch.zeros(1))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.linear(torch.zeros(64, 1).half().T.expand(2, 64), (stored,), poison(2, 37), WORK)
    with pytest.raises(ValueError, match=r"input is torch.bfloat16, expected torch.float16"):
        kernels.linear(x.bfloat16(), (stored,), poison(2, 37), WORK)


@pytest.mark.timeout(900)
def test_every_variant_compiles_for_hopper_without_spills() -> None:
    """In a process of its own, since this one interprets."""
    script = Path(__file__).with_name("compile_linear.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=850, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
