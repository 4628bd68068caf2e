"""A tiny target and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from power_lab.engine.weights.source import MemorySource
from power_lab.kernels.table import select
from power_lab.training.collect import collect
from power_lab.training.corpus import Corpus
from power_lab.training.recipe import Recipe
from power_lab.training.target import Target
from tests import tiny

SHAPE = tiny.Shape(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, stored="Q8_0", scale=1.2)
RECIPE = Recipe(
    ffn=64,
    layers=2,
    taps=(1, 2),
    drafts=160,
    longest=64,
    held=12,
    block_size=8,
    chain=4,
    mask_token=256,
    texts=8,
    rows=560,
    rate=4e-3,
    rate_mtp=4e-3,
    inherit=False,
    from_anchor=False,
    warmup=20,
)


def target(shape: tiny.Shape = SHAPE) -> Target:
    return Target(tiny.spec(shape), MemorySource(tiny.tensors(shape)))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are not worth a second thread, which waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """128 short texts of the tiny target, as its engine says them."""
    out: Path = tmp_path_factory.mktemp("corpus") / "corpus.npz"
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, rng.integers(3, 20)).tolist() for _ in range(128)]
    engine = tiny.engine(SHAPE, select("cpu", "exact", 2, tiny.cache_dir()), max_batch=16, kv_tokens=8192)
    try:
        return collect(engine, prompts, out, seed=3, tokens=48)
    finally:
        engine.close()
