"""Matrix products on the GPU: values on real shapes, and a row's bits in any company. `-s` prints a table of times."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.ops import Activation
from power_lab.kernels.probe import random_blocks
from power_lab.kernels.quants import GEOMETRY, QuantType
from power_lab.kernels.triton.embed import embed
from power_lab.kernels.triton.linear import Workspace, gate_up, linear
from power_lab.kernels.triton.operand import WHOLE
from power_lab.kernels.triton.planes import FORMS, DeviceWeight
from tests.kernels.triton.matrices import on_device, operand, rounded, weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
ROWS = (*range(1, 41), 64, 65, 128, 129, 200, 512)
EIGHT_B = {"qkv": (6144, 4096), "out": (4096, 4096), "gate-up": (12288, 4096), "down": (4096, 12288)}
SMALL = {"0.6B out": (1024, 2048), "SmolLM2 qkv": (960, 576), "SmolLM2 down": (576, 1536), "Gemma gate": (2048, 640)}
LARGE_BLOCKS = [type for type, (values, _) in GEOMETRY.items() if values == 256]


@pytest.fixture(scope="module")
def work() -> Workspace:
    return Workspace.on("cuda")


def kind(type: QuantType) -> torch.dtype:
    """Of what matrices of a type are multiplied by."""
    return torch.float16 if type in FORMS else torch.bfloat16


def activations(rows: int, cols: int, type: QuantType) -> torch.Tensor:
    values = torch.randn(rows, cols, generator=torch.Generator("cuda").manual_seed(rows), device="cuda")
    return operand(values, type)[0]


def meant(x: torch.Tensor) -> torch.Tensor:
    """The values that activations stand for."""
    return x.float() * (WHOLE.value if x.dtype == torch.float16 else 1)


def precision(type: QuantType) -> float:
    """Relative errors of sums: of the sums alone, or of scales and minima that were rounded before the values were."""
    return 6e-4 if type in FORMS and FORMS[type].sub else 1e-5


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, device="cuda", dtype=dtype)


def shapes_of(type: QuantType) -> list[tuple[int, int]]:
    """Real ones, and one whose edges are odd."""
    odd = (333, 768 if type in LARGE_BLOCKS else 672)
    real = (4096, 1024), (1024, 2048)
    return [*real, odd] if type in LARGE_BLOCKS else [*real, odd, (960, 576), (576, 1536), (2048, 640)]


@pytest.mark.parametrize("type", list(QuantType))
def test_values_on_real_shapes(type: QuantType, work: Workspace) -> None:
    for n, k in shapes_of(type):
        stored, values = weight(type, n, k, device="cuda")
        bias = torch.randn(n, device="cuda")
        for rows in (1, 16, 33, 100, 300):
            x, out = activations(rows, k, type), poison(rows + 1, n)
            linear(x, (stored,), out[:rows], work, bias)
            want = reference.linear(meant(x), rounded(values, type), bias)
            error = (out[:rows] - want).norm() / want.norm()
            assert error < precision(type), (n, k, rows, error)
            assert out[rows].isnan().all(), "a row behind the output was written"
            assert not work.counters.any()


@pytest.mark.parametrize("type", list(QuantType))
def test_every_row_count_gives_the_same_bits(type: QuantType, work: Workspace) -> None:
    for n, k in shapes_of(type):
        (one, _), (two, _) = weight(type, n, k, device="cuda"), weight(type, n, k, seed=1, device="cuda")
        x, bias = activations(512, k, type), torch.randn(n, device="cuda")
        plain, gated = poison(512, n), poison(512, n, dtype=kind(type))
        for r in range(512) if k < 1024 else range(0, 512, 16):
            linear(x[r : r + 1], (one,), plain[r : r + 1], work, bias)
            gate_up(x[r : r + 1], one, two, gated[r : r + 1], work)
        seen = ~plain[:, 0].isnan()
        for rows in ROWS:
            some, out, active = seen[:rows], poison(rows, n), poison(rows, n, dtype=kind(type))
            linear(x[:rows], (one,), out, work, bias)
            gate_up(x[:rows], one, two, active, work)
            assert torch.equal(out[some], plain[:rows][some]), (n, k, rows, "linear")
            assert torch.equal(active[some], gated[:rows][some]), (n, k, rows, "gate-up")
            assert out.isfinite().all()
            assert active.isfinite().all()


@pytest.mark.parametrize("type", [type for type, form in FORMS.items() if not form.sub])
def test_stored_codes_give_the_bits_of_their_values(type: QuantType, work: Workspace) -> None:
    """As f16: whatever unpacks them, and whatever tiles either is computed in."""
    for n, k in ((1024, 512), (6000, 512)):  # whose sums are cut alike
        stored, plain = [], []
        for seed in range(2):
            one, values = weight(type, n, k, seed, device="cuda")
            stored.append(one)
            plain.append(DeviceWeight(QuantType.F16, n, k, {"values": values.half()}))
        for rows in (1, 17, 64, 100, 400):
            x, got, want = activations(rows, k, type), poison(rows, n), poison(rows, n)
            linear(x, (stored[0],), got, work)
            linear(x, (plain[0],), want, work)
            assert torch.equal(got, want), (n, k, rows)
            got, want = poison(rows, n, dtype=torch.float16), poison(rows, n, dtype=torch.float16)
            gate_up(x, *stored, got, work)
            gate_up(x, *plain, want, work)
            assert torch.equal(got, want), (n, k, rows)


def test_a_rows_place_does_not_matter(work: Workspace) -> None:
    stored, _ = weight(QuantType.BF16, 4096, 4096, device="cuda")
    x, out, turned = activations(300, 4096, QuantType.BF16), poison(300, 4096), poison(300, 4096)
    order = torch.randperm(300, device="cuda")
    linear(x, (stored,), out, work)
    linear(x[order].contiguous(), (stored,), turned, work)
    assert torch.equal(out[order], turned)


@pytest.mark.parametrize(("n", "k"), EIGHT_B.values(), ids=EIGHT_B)
@pytest.mark.parametrize("type", [QuantType.BF16, QuantType.Q8_0, QuantType.Q4_K, QuantType.Q6_K])
def test_bits_at_eight_billion(type: QuantType, n: int, k: int, work: Workspace) -> None:
    stored = large(type, n, k)
    x, together = activations(512, k, type), poison(512, n)
    linear(x, (stored,), together, work)
    for first, last in pairwise((0, 1, 2, 9, 25, 41, 90, 200, 512)):
        out = poison(last - first, n)
        linear(x[first:last], (stored,), out, work)
        assert torch.equal(out, together[first:last]), (first, last)


@pytest.mark.parametrize(
    "types", [(QuantType.Q5_0, QuantType.Q5_0, QuantType.Q8_0), (QuantType.BF16,) * 3, (QuantType.Q4_1,) * 3]
)
def test_stacked_weights(types: tuple[QuantType, ...], work: Workspace) -> None:
    parts = [weight(type, n, 640, seed=n, device="cuda") for type, n in zip(types, (1024, 256, 250), strict=True)]
    values, weights = rounded(torch.cat([v for _, v in parts]), types[0]), tuple(w for w, _ in parts)
    bias = torch.randn(1530, device="cuda")
    x, alone = activations(512, 640, types[0]), poison(512, 1530)
    for r in range(512):
        linear(x[r : r + 1], weights, alone[r : r + 1], work, bias)
    for rows in ROWS:
        out = poison(rows, 1530)
        linear(x[:rows], weights, out, work, bias)
        assert torch.equal(out, alone[:rows]), rows
    want = reference.linear(meant(x), values, bias)
    assert (alone - want).norm() / want.norm() < 1e-5


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("types", [(QuantType.BF16,) * 2, (QuantType.Q4_K,) * 2, (QuantType.Q4_K, QuantType.Q6_K)])
def test_gated_values(types: tuple[QuantType, QuantType], activation: Activation, work: Workspace) -> None:
    (gate, g), (up, u) = (weight(type, 3072, 1024, seed=i, device="cuda") for i, type in enumerate(types))
    close = 1e-3 if types[0] in FORMS else 3e-3  # half a unit of the last place, and the rounded scales
    for rows in (1, 16, 100, 3000):
        x, out = activations(rows, 1024, types[0]) / 16, poison(rows, 3072, dtype=kind(types[0]))
        gate_up(x, gate, up, out, work, activation)
        want = reference.gate_up(meant(x), rounded(g, types[0]), rounded(u, types[1]), activation)
        assert (meant(out) - want).norm() / want.norm() < close
        one = poison(1, 3072, dtype=kind(types[0]))
        gate_up(x[-1:], gate, up, one, work, activation)
        assert torch.equal(one[0], out[-1])


@pytest.mark.parametrize("type", list(QuantType))
def test_embed(type: QuantType) -> None:
    table, values = weight(type, 999, 2048, device="cuda")
    ids = torch.tensor([998, 0, 5, 5, -1, 999], device="cuda", dtype=torch.int32)
    out = poison(6, 2048)
    embed(table, ids, out, 2.5)
    assert torch.equal(out[:4], values[[998, 0, 5, 5]] * 2.5)
    assert out[4:].isnan().all()


def test_every_exponent_of_mxfp4() -> None:
    stored = np.random.default_rng(0).integers(0, 256, (256, 17), dtype=np.uint8)
    stored[:, 0] = np.arange(256)
    out = poison(256, 32)
    embed(on_device(QuantType.MXFP4, 256, 32, stored, "cuda"), torch.arange(256, device="cuda", dtype=torch.int32), out)
    assert torch.equal(out.cpu(), reference.dequantize(QuantType.MXFP4, stored, 256, 32))


def test_captured_graphs_replay_the_same_bits(work: Workspace) -> None:
    stored, _ = weight(QuantType.Q4_K, 1024, 2048, device="cuda")
    x, eager, out = activations(3, 2048, QuantType.Q4_K), poison(3, 1024), poison(3, 1024)
    linear(x, (stored,), eager, work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(x, (stored,), out, work)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager)


def large(type: QuantType, n: int, k: int, copies: int = 1) -> DeviceWeight:
    """A matrix of `n` rows, few of them different: made fast, and as good for bits and times."""
    few = 64
    stored, _ = weight(type, few, k, device="cuda")
    axis = 1 if type in FORMS else 0
    planes = {name: plane.repeat_interleave(n // few, dim=axis).contiguous() for name, plane in stored.planes.items()}
    return DeviceWeight(type, n, k, planes)


def seconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Median time of one of the `calls` in a graph."""
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls / 1000)
    return median(times)


def bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    b.copy_(a)
    with torch.cuda.graph(graph):
        for _ in range(4):
            b.copy_(a)
    return 2 * (1 << 30) / seconds(graph, 4)


def captured(calls: list) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def test_times(work: Workspace) -> None:
    """Nothing is asserted: microseconds, and the fraction of copy bandwidth at which a product reads its weights."""
    rate = bandwidth()
    print(f"\ncopy {rate / 1e12:.2f} TB/s; us (fraction of it) at rows 1, 8, 16, 64, 512")
    for type in (
        QuantType.BF16,
        QuantType.Q8_0,
        QuantType.Q6_K,
        QuantType.Q4_K,
        QuantType.Q4_0,
        QuantType.Q5_K,
        QuantType.IQ4_XS,
    ):
        for name, (n, k) in {**EIGHT_B, **({} if type in LARGE_BLOCKS else SMALL)}.items():
            gated = "gate" in name
            one = large(type, n, k)
            nbytes = one.nbytes * (2 if gated else 1)
            copies = [
                one,
                *(
                    DeviceWeight(type, n, k, {a: p.clone() for a, p in one.planes.items()})
                    for _ in range(min(40, 300_000_000 // nbytes))
                ),
            ]
            if gated and len(copies) % 2:
                copies.append(one)
            cells = []
            for rows in (1, 8, 16, 64, 512):
                x, out = activations(rows, k, type), poison(rows, n, dtype=kind(type) if gated else torch.float32)
                if gated:
                    calls = [
                        lambda a=a, b=b, x=x, out=out: gate_up(x, a, b, out, work)
                        for a, b in zip(copies[::2], copies[1::2], strict=True)
                    ]
                else:
                    calls = [lambda w=w, x=x, out=out: linear(x, (w,), out, work) for w in copies]
                calls = calls * max(1, 16 // len(calls))
                t = seconds(captured(calls), len(calls))
                cells.append(f"{t * 1e6:7.1f} ({nbytes / t / rate:.2f})")
            print(f"{type.name:7s} {name:13s} {n:6d} x {k:5d}", *cells, flush=True)
            del copies, one


def test_random_blocks_are_the_weights_of_these_tests() -> None:
    """`large` repeats rows; a row of it is a row of the small matrix."""
    stored = random_blocks(QuantType.Q4_0, 64, 256, np.random.default_rng(64 * 10007 + 256))
    table, out = large(QuantType.Q4_0, 128, 256), poison(128, 256)
    embed(table, torch.arange(128, device="cuda", dtype=torch.int32), out)
    want = reference.dequantize(QuantType.Q4_0, stored, 64, 256).repeat_interleave(2, dim=0)
    assert torch.equal(out.cpu(), want)
