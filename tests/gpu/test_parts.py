"""Sums of splits that are left to their reader, on the GPU: the bits of those that the product adds up itself, in any number of rows."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_sums import Layer, Pair, different
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import planes
from power_lab.kernels.triton.ops import TritonOps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("part", ["qkv", "down"])
@pytest.mark.parametrize("type", [QuantType.BF16, QuantType.Q8_0, QuantType.Q4_K])
def test_readers_add_what_products_add(type: QuantType, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "SMALL", 0)  # so that a small matrix stays as it is stored
    pair = Pair(TritonOps(), Layer(1024, 1024, 4, 2, 64), part, type)
    assert pair.splits > 1
    assert different(pair) == []
