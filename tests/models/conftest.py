from __future__ import annotations

from pathlib import Path

import pytest

from power_lab.engine.config import ModelFolders, Paths


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """A home with empty caches of other programs."""
    for name in ("hub", "llama.cpp", "extra"):
        (tmp_path / name).mkdir()
    others = ModelFolders(tmp_path / "hub", tmp_path / "llama.cpp", (tmp_path / "extra",))
    return Paths(tmp_path / "cache", tmp_path / "run", tmp_path / "state", others)


@pytest.fixture(scope="session")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as transformers saves it, with a model card and a file in the place of a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("saved") / "tiny-llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nA tiny model.\n")
    (folder / "tokenizer.json").write_text("{}")
    return folder
