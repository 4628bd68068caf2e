"""Fixtures of tokenizer tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import models as bpe_models
from tokenizers import pre_tokenizers, trainers

from power_lab.engine.tokenizer import Tokenizer
from power_lab.engine.weights.gguf import GgufFile
from tests.engine.tokenizer.corpus import TEXTS


@pytest.fixture(scope="session")
def smol_metadata(smollm2_path: Path) -> dict[str, Any]:
    with GgufFile.open(smollm2_path) as file:
        return file.metadata


@pytest.fixture(scope="session")
def smol(smol_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smol_metadata)


@pytest.fixture(scope="session")
def uncut_bpe() -> tuple[list[str], list[str]]:
    """Tokens and merges trained on the corpus uncut, so that pieces reach across words and every cut shows in the ids."""
    engine = Engine(bpe_models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=6000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
        max_token_length=12,
    )
    engine.train_from_iterator(TEXTS, trainer)
    model = json.loads(engine.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]
