"""Every family in both file formats: the same model from either, and llama.cpp's logits beside ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from power_lab.engine.models import ARCHITECTURES, MODEL_TYPES, of_architecture, of_model_type
from power_lab.engine.models.bind import bind
from power_lab.engine.models.decoder import Decoder
from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.errors import ModelFileError
from power_lab.kernels.ops import Ops
from tests import tiny, tiny_gguf
from tests.engine.llama_cpp import LlamaCpp
from tests.engine.test_reference import TOLERANCE, distance, logits_of

TOKENS = np.random.default_rng(0).integers(0, 250, 200).tolist()
KV_IN_F16 = 0.02  # of log-probabilities: llama.cpp keeps keys and values so


def shape_of(kind: str) -> tiny.Shape:
    return tiny.Shape(kind=kind, layers=tiny.FILES[kind][0], scale=1.0, seed=4)


@pytest.mark.parametrize("kind", tiny.FILES)
def test_a_gguf_file_is_the_same_model_and_llama_cpp_agrees(
    kind: str, numba_ops: Callable[[int], Ops], tmp_path: Path
) -> None:
    shape, path, ops = shape_of(kind), tmp_path / "model.gguf", numba_ops(2)
    tiny_gguf.write(path, shape, plain=True)
    with open_checkpoint(path) as checkpoint:
        family = of_architecture(checkpoint.architecture)
        spec = family.from_gguf(checkpoint.metadata, checkpoint.source, tiny.tokenizer().vocab_size)
        got = logits_of(Decoder(spec, bind(spec, checkpoint.source, ops), ops, tiny.CONTEXT), TOKENS, 64)
    assert distance(got, logits_of(tiny.loaded(shape, ops).model, TOKENS, 200)) <= TOLERANCE
    llama_cpp = LlamaCpp(path, 258, 258)
    for length in (1, 63, 130, 200):
        theirs = llama_cpp(TOKENS[:length])
        ours = got[length - 1].astype(np.float64)
        ours[tiny.END] = -np.inf  # it was asked to ignore the end
        ours -= ours.max() + np.log(np.exp(ours - ours.max()).sum())
        assert np.abs(theirs - ours)[: tiny.END - 1].max() < KV_IN_F16


def test_every_family_is_compared() -> None:
    types = {tiny.KINDS[kind][0] for kind in tiny.FILES}
    assert {tiny_gguf.ARCHITECTURE[name] for name in types} == set(ARCHITECTURES)
    elsewhere = {"mimo"}  # Qwen2's layers: transformers has no such model; test_neural_native.py compares it
    assert {model_type for model_type, _ in tiny.KINDS.values()} | elsewhere == set(MODEL_TYPES)


@pytest.mark.parametrize("lookup", [of_architecture, of_model_type])
def test_unknown_families_are_named(lookup: Callable[[str], Any]) -> None:
    with pytest.raises(ModelFileError, match="'gpt5' is not supported"):
        lookup("gpt5")
