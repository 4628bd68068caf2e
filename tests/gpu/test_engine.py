"""The whole engine on the GPU: every family and storage type beside the CPU's arithmetic, in chunks of several sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from power_lab.engine.config import Paths
from power_lab.kernels.ops import Ops
from power_lab.kernels.quants import QuantType
from power_lab.kernels.table import select
from tests import tiny
from tests.engine.test_reference import logits_of

TOKENS = np.random.default_rng(0).integers(0, 256, 300).tolist()
SHAPES = [
    *(tiny.Shape(kind=kind, head_dim=16) for kind in tiny.KINDS if kind not in tiny.FILES),
    *(tiny.Shape.wide(type.name, seed=3) for type in QuantType),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.kind}-{shape.stored}")
def test_a_model_says_what_it_says_on_the_cpu(shape: tiny.Shape, numba_ops: Callable[[int], Ops]) -> None:
    gpu = tiny.loaded(shape, numba_ops(2)).model
    results = [logits_of(gpu, TOKENS, chunk) for chunk in (300, 64, 7, 1)]
    for other in results[1:]:
        assert np.array_equal(other.view(np.uint32), results[0].view(np.uint32)), "chunking changed bits"
    cpu = tiny.loaded(shape, select("cpu", "exact", 2, Paths.default().kernels)).model
    want, got = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (logits_of(cpu, TOKENS, 300), results[0]))
    divergence = (np.exp(want) * (want - got)).sum(-1).mean()
    assert divergence < 0.01, "bf16 products of random weights"
