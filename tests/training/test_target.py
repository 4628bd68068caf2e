"""The plain torch target against the engine's own decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from power_lab.engine.models.bind import bind
from power_lab.engine.models.decoder import Decoder
from power_lab.engine.weights.source import MemorySource
from power_lab.kernels.table import select
from power_lab.training.target import Target
from tests import tiny
from tests.engine.test_reference import distance, logits_of

KINDS = [
    "llama",
    "llama biased",
    "llama 3",
    "mistral",
    "ministral 3",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "smollm3",
    "olmo3",
]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_engines(kind: str) -> None:
    shape = tiny.Shape(kind=kind)
    ops = select("cpu", "exact", 2, tiny.cache_dir())
    spec, offset = tiny.spec(shape), tiny.spec(shape).norm_offset
    source = MemorySource({n: v - np.float32(offset) if "norm" in n else v for n, v in tiny.tensors(shape).items()})
    tokens = np.random.default_rng(1).integers(0, 256, (2, 130))
    target = Target(spec, source)
    last = target.hidden(torch.from_numpy(tokens), [len(spec.layers)])[len(spec.layers)]
    got = target.shared().project(target.normed(last)).numpy()
    decoder = Decoder(spec, bind(spec, source, ops), ops, tiny.CONTEXT)
    for row, text in zip(got, tokens, strict=True):
        assert distance(row, logits_of(decoder, text.tolist(), 65)) < 1e-3


def test_a_tap_is_what_enters_its_layer() -> None:
    """The state that enters layer 0 is the embedding, and padding behind a text's end changes nothing before it."""
    shape = tiny.Shape()
    target = Target(tiny.spec(shape), MemorySource(tiny.tensors(shape)))
    tokens = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([tokens, torch.zeros(1, 9, dtype=torch.int64)], 1)
    short, long = target.hidden(tokens, (0, 1, 2)), target.hidden(padded, (0, 1, 2))
    assert torch.equal(short[0], target.shared().embed(tokens))
    for layer in (0, 1, 2):
        torch.testing.assert_close(long[layer][:, :40], short[layer], rtol=1e-5, atol=1e-5)
