"""Norms and lookups on the GPU: a row's own bits, and a chain of launches that gives what launches one by one give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from power_lab.kernels import reference
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import embed, norm, sample
from power_lab.kernels.triton.planes import DeviceWeight
from tests.kernels.triton.sampling import Row, controls

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


@pytest.mark.parametrize("width", [576, 640, 1000, 2048, 4096])
@pytest.mark.parametrize("post", [False, True])
def test_a_rows_norm_is_its_own(width: int, post: bool) -> None:
    x, delta, weight, before = (
        normal(512, width, seed=1) * 3,
        normal(512, width, seed=2),
        normal(width, seed=3),
        normal(width, seed=4),
    )
    parts = (before if post else None, weight, 1e-5)
    summed, out = x.clone(), torch.full((513, width), torch.nan, device="cuda", dtype=torch.bfloat16)
    norm.norm(summed, delta, *parts, out[:512])
    want = x.double() + (reference.rms_norm(delta, before, 1e-5) if post else delta.double())
    torch.testing.assert_close(summed.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[:512].double(), reference.rms_norm(want, weight, 1e-5), rtol=2**-8, atol=1e-5)
    assert out[512].isnan().all()
    for rows in (1, 16, 64):
        alone, few = x[100 : 100 + rows].clone(), torch.full((rows, width), torch.nan, device="cuda").bfloat16()
        norm.norm(alone, delta[100 : 100 + rows], *parts, few)
        assert torch.equal(few, out[100 : 100 + rows]) and torch.equal(alone, summed[100 : 100 + rows])
    numbers = torch.tensor([511, 0, 77, 77], device="cuda", dtype=torch.int32)
    for picked in (numbers, numbers[1:], numbers[3:]):
        kept, few = x.clone(), torch.full((len(picked), width), torch.nan, device="cuda").bfloat16()
        norm.norm(kept, delta, *parts, few, picked)
        assert torch.equal(few, out[picked]) and torch.equal(kept, x)


def test_ids_that_stand_for_the_step_before() -> None:
    values = normal(1000, 576).bfloat16()
    table = DeviceWeight(QuantType.BF16, 1000, 576, {"values": values})
    ids = torch.tensor([5, -1, -3, -2, -4, 1000], device="cuda", dtype=torch.int32)
    drawn, out = torch.tensor([7, 999, 0, -1], device="cuda", dtype=torch.int32), torch.zeros(6, 576, device="cuda")
    embed.embed(table, ids, out, 2.0, drawn)
    assert torch.equal(out[:4], values[[5, 7, 0, 999]].float() * 2)
    assert out[4:].isnan().all()


def test_a_captured_chain_gives_what_single_launches_give() -> None:
    """Tokens draw the next embeddings, 40 steps on: a kernel that began too early would read what is not there yet."""
    vocabulary, width, steps = 5000, 576, 40
    table = DeviceWeight(QuantType.BF16, vocabulary, width, {"values": normal(vocabulary, width).bfloat16()})
    weight, mix = normal(width, seed=5), normal(width, vocabulary, seed=6) / 6
    x, delta, h = (torch.zeros(8, width, device="cuda") for _ in range(3))
    gathered, logits = torch.zeros(8, width, device="cuda"), torch.zeros(8, vocabulary, device="cuda")
    first = -1 - torch.arange(8, device="cuda", dtype=torch.int32)
    numbers = torch.arange(7, -1, -1, device="cuda", dtype=torch.int32)
    rows = controls([Row(top_p=0.9, seed=i, repetition=1.2, before=(1, 2, i)) for i in range(8)], "cuda")
    scratch = sample.Scratch.allocate(8, vocabulary, "cuda")
    tokens = torch.zeros(8, device="cuda", dtype=torch.int32)

    def step(single: bool) -> None:
        for call in (
            lambda: embed.embed(table, first, x, 1.0, tokens),
            lambda: norm.norm(x, None, None, weight, 1e-5, delta),
            lambda: norm.norm(x, delta, None, weight, 1e-5, h),
            lambda: norm.norm(x, h, weight, weight, 1e-5, gathered, numbers),
            lambda: torch.mm(gathered, mix, out=logits),
            lambda: norm.softcap(logits, 20.0),
            lambda: sample.sample(logits, rows, tokens, scratch),
        ):
            call()
            if single:
                torch.cuda.synchronize()

    history = []
    for _ in range(steps):
        step(single=True)
        history.append(tokens.tolist())
    tokens.zero_()
    graph, kept = torch.cuda.CUDAGraph(), torch.zeros(steps, 8, device="cuda", dtype=torch.int32)
    with torch.cuda.graph(graph):
        for i in range(steps):
            step(single=False)
            kept[i].copy_(tokens)
    for _ in range(3):
        tokens.zero_()
        graph.replay()
        assert kept.tolist() == history
    assert len(set(map(tuple, history))) > 5 and np.min(history) >= 0
