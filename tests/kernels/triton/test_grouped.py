"""Sums scaled group by group: their PTX instruction by instruction, and products through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.ops import Activation
from power_lab.kernels.probe import random_blocks
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import chunks, linear, panels, unpack
from power_lab.kernels.triton.embed import embed
from power_lab.kernels.triton.planes import FORMS, GROUPED_FORMS, PLANES, Form, form, repack
from tests.kernels.triton.matrices import BLOCKS_OF_32, weight
from tests.kernels.triton.test_linear import WORK, activations, assert_close, poison
from tests.kernels.triton.test_unpack import run

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
ROWS, COLS = 3, 512


def forms(type: QuantType) -> Form:
    found = form(type, True)
    assert found is not None
    return found


@pytest.mark.parametrize("type", list(FORMS))
def test_scaled_integers_are_the_stored_values(type: QuantType) -> None:
    """What the PTX makes of the planes: integers in bf16 whose products with the factors are the values."""
    values_match(type)


@pytest.mark.parametrize("type", [type for type, lies in FORMS.items() if (lies.low, lies.high) == (4, 0)])
def test_deeper_tiles(type: QuantType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are a choice of where codes lie: bits do not depend on it."""
    (shallow, values), x, bias = weight(type, 70, 512, grouped=True), activations(3, 512), torch.arange(70.0)
    outs = [poison(3, 70), poison(3, 70)]
    linear.linear(x, (shallow,), outs[0], WORK, bias)
    monkeypatch.setitem(GROUPED_FORMS, type, replace(FORMS[type], grouped=256))
    values_match(type)
    deep, _ = weight(type, 70, 512, grouped=True)
    linear.linear(x, (deep,), outs[1], WORK, bias)
    assert torch.equal(*outs)
    assert_close(outs[1], reference.linear(x, values, bias), reference.linear(x.abs(), values.abs(), bias), 1e-6)


def values_match(type: QuantType) -> None:
    lies = forms(type)
    stored = random_blocks(type, ROWS, COLS, np.random.default_rng(int(type)))
    planes = repack(type, ROWS, COLS, stored, True)
    want = reference.dequantize(type, stored, ROWS, COLS)
    for row in range(ROWS):
        scale, minimum = (of_groups(lies, planes, row, at) for at in (False, True))
        value = scale * integers(lies, planes, row)
        assert np.array_equal(value + minimum if lies.affine else value, want[row].numpy())


def integers(lies: Form, planes: dict[str, np.ndarray], row: int) -> np.ndarray:
    """f32 [COLS]: the pairs of each lane and run."""
    got, runs = np.zeros(COLS, np.uint16), lies.words // 16
    for tile, lane, run_, half in np.ndindex(COLS // lies.tile, 4, runs, 2):
        word = lane * 4 * runs + run_ * 4 + half * 2
        inputs = [int(planes["codes"][tile, row, word : word + 2].copy().view(np.uint32)[0])]
        if lies.high:
            at = lane * 4 + half * 2
            inputs.append(int(planes["high"][tile, row, at : at + 2].copy().view(np.uint32)[0]))
        registers = {f"${lies.fields + i}": number for i, number in enumerate(inputs)}
        assert len(inputs) + lies.fields == len(chunks.integers_constraints(lies).split(","))
        run(chunks.integers_assembly(lies, run_), registers)
        for field in range(lies.fields):
            k = tile * lies.tile + (run_ * lies.fields + field) * 16 + half * 8 + lane * 2
            got[k], got[k + 1] = registers[f"${field}"] & 0xFFFF, registers[f"${field}"] >> 16
    return torch.from_numpy(got.view(np.int16)).view(torch.bfloat16).float().numpy()


def of_groups(lies: Form, planes: dict[str, np.ndarray], row: int, minimum: bool) -> np.ndarray:
    """f32 [COLS]: the factor of each value's group, made as `chunks.factors` does of what `chunks.held` loads."""
    if minimum and not lies.affine:
        return np.zeros(COLS, np.float32)
    plane = planes[PLANES[4 if lies.sub else 2]]
    if minimum and lies.sub != 16:
        plane = planes[PLANES[5 if lies.sub else 3]]
    found = []
    for group in range(COLS // lies.group):
        tile, at = divmod(group, lies.tile // lies.group)
        raw = plane[tile, row].tobytes()
        assert len(raw) == chunks.span(lies)
        inputs = {"$1": int.from_bytes((raw[8:] if at * chunks.width(lies) >= 8 else raw)[:8], "little")}
        if lies.sub:
            block = group * lies.group // lies.block
            stored = [
                planes[name][block, row : row + 1] for name in (("scale", "minimum") if lies.affine else ("scale",))
            ]
            inputs["$2"] = int.from_bytes(np.concatenate(stored).tobytes(), "little")
        run(chunks.factor_assembly(lies, at, minimum), inputs)
        found.append(np.uint32(inputs["$0"]).view(np.float32))
    return np.repeat(np.array(found), lies.group)


SHAPES = [*((type, 96) for type in BLOCKS_OF_32), *((type, 512) for type in FORMS if FORMS[type].block == 256)]


@pytest.mark.parametrize(("type", "k"), [*SHAPES, (QuantType.Q4_K, 1024)])
@pytest.mark.parametrize("rows", [1, 19])
def test_linear(type: QuantType, k: int, rows: int) -> None:
    """Against the stored values themselves: nothing is rounded but sums."""
    stored, values = weight(type, 70, k, grouped=True)
    x, bias, out = activations(rows, k), torch.arange(70.0), poison(rows + 1, 70)
    linear.linear(x, (stored,), out[:rows], WORK, bias)
    assert_close(out[:rows], reference.linear(x, values, bias), reference.linear(x.abs(), values.abs(), bias), 1e-6)
    assert out[rows].isnan().all(), "a row behind the output was written"
    assert not WORK.counters.any(), "counters are left as they were found"


@pytest.mark.parametrize(
    ("type", "k"), [(QuantType.Q4_0, 96), (QuantType.Q4_1, 96), (QuantType.Q6_K, 512), (QuantType.Q4_K, 1024)]
)
def test_many_rows(type: QuantType, k: int) -> None:
    """In several panels, and in splits."""
    (one, values), (two, other) = weight(type, 70, k, grouped=True), weight(type, 9, k, grouped=True)
    x, bias, out = activations(140, k), torch.arange(79.0), poison(141, 79)
    scratch = torch.empty(10000 + 40 * k)
    work = linear.Workspace(scratch, WORK.counters, WORK.mixed)
    linear.linear(x, (one, two), out[:140], work, bias)
    both = torch.cat([values, other])
    assert_close(out[:140], reference.linear(x, both, bias), reference.linear(x.abs(), both.abs(), bias), 1e-6)
    assert out[140].isnan().all(), "a row behind the output was written"


def test_more_rows_than_sums_of_x_are_kept_for() -> None:
    stored, values = weight(QuantType.Q4_1, 8, 64, grouped=True)
    x, out = activations(150, 64), poison(150, 8)
    panels.launch(x, (stored,), out, torch.empty(1024 + 64 * 8), None, 0, (1, 256))
    assert_close(out, reference.linear(x, values), reference.linear(x.abs(), values.abs()), 1e-6)


@pytest.mark.parametrize(("type", "k"), [(QuantType.Q4_1, 96), (QuantType.Q8_0, 96), (QuantType.Q4_K, 1024)])
@pytest.mark.parametrize("rows", [3, 130])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_up(type: QuantType, k: int, rows: int, activation: Activation) -> None:
    (gate, g), (up, u) = (weight(type, 70, k, seed, grouped=True) for seed in range(2))
    x, out = activations(rows, k) / 8, poison(rows, 70)
    linear.gate_up(x, gate, up, out, WORK, activation)
    size = reference.linear(x.abs(), g.abs()) * reference.linear(x.abs(), u.abs())
    assert_close(out, reference.gate_up(x, g, u, activation), size, 1e-6)
    assert not WORK.counters.any()


@pytest.mark.parametrize("type", list(FORMS))
def test_embed(type: QuantType) -> None:
    table, values = weight(type, 9, 512, grouped=True)
    out = poison(3, 512)
    embed(table, torch.tensor([8, 0, 3], dtype=torch.int32), out, 2.0)
    assert torch.equal(out, values[[8, 0, 3]] * 2.0)


def test_integers_need_no_more_bits_than_bf16_has() -> None:
    for type in FORMS:
        lies = forms(type)
        assert unpack.bits(lies) <= 8
        assert max(abs(level) for level in lies.book or (lies.zero, (1 << lies.low + lies.high) - 1 - lies.zero)) <= 256
