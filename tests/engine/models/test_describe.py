"""Folders as transformers writes them: the same logits, in every form that a checkpoint may take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from power_lab.engine.models.bind import bind
from power_lab.engine.models.decoder import Decoder
from power_lab.engine.models.describe import describe
from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.errors import ModelFileError
from power_lab.kernels.ops import Ops
from tests import tiny
from tests.engine.test_reference import TOLERANCE, distance, logits_of

TOKENS = np.random.default_rng(1).integers(0, 250, 150).tolist()


def logits(folder: Path, ops: Ops) -> np.ndarray:
    with open_checkpoint(folder) as checkpoint:
        described = describe(checkpoint, 258)
        decoder = Decoder(described.spec, bind(described.spec, described.source, ops), ops, tiny.CONTEXT)
    return logits_of(decoder, TOKENS, 64)


def reference(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].float().numpy()


@pytest.mark.parametrize("kind", [kind for kind in tiny.KINDS if kind not in tiny.FILES])
def test_a_folder_is_its_model(kind: str, numba_ops: Callable[[int], Ops], tmp_path: Path) -> None:
    model = tiny.reference_model(tiny.Shape(kind=kind, seed=5))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert distance(logits(tmp_path, numba_ops(2)), reference(model)) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats_are_read_as_they_are(dtype: str, numba_ops: Callable[[int], Ops], tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tiny.reference_model(tiny.Shape(kind="qwen2", seed=6)).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert distance(logits(tmp_path, numba_ops(2)), reference(model)) <= TOLERANCE


def test_older_configs_state_rope_apart(numba_ops: Callable[[int], Ops], tmp_path: Path) -> None:
    model = tiny.reference_model(tiny.Shape(kind="llama 3", seed=7))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": rope.pop("rope_type")}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert distance(logits(tmp_path, numba_ops(2)), reference(model)) <= TOLERANCE


@pytest.mark.parametrize("newer", [False, True])
def test_the_text_model_of_a_folder_that_sees_images(
    newer: bool, numba_ops: Callable[[int], Ops], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {key: value for key, value in tiny.config(tiny.Shape(kind="gemma3")).items() if key != "model_type"}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    numbers = {"image_token_index": 251, "boi_token_index": 252, "eoi_token_index": 253}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, **numbers)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if newer:
        state = load_file(file)
        save_file(
            {name.replace("language_model.model.", "model.language_model."): t for name, t in state.items()}, file
        )
    with open_checkpoint(tmp_path) as checkpoint:
        assert describe(checkpoint).left_out == ("vision_tower", "multi_modal_projector")
    assert distance(logits(tmp_path, numba_ops(2)), reference(model)) <= TOLERANCE


@pytest.mark.parametrize(
    ("kind", "change", "error"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias is not supported"),
        ("llama", {"num_key_value_heads": 3}, "3 KV heads do not divide 4 heads"),
        ("llama", {"head_dim": 12}, "heads of 12 values"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic' is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "low_freq_factor' is missing"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers.*outside 1..1024"),
        ("llama", {"num_hidden_layers": 3}, "model.layers.2.*missing"),
        ("llama", {"num_hidden_layers": 1}, "does not use these tensors of the file: 'model.layers.1"),
        ("llama", {"hidden_size": 128}, r"embed_tokens.weight' has shape \[258, 64\]"),
        ("llama", {"tie_word_embeddings": False}, "lm_head"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping' is missing"),
        ("gemma3", {"layer_types": ["chunked_attention", "full_attention"]}, r"layer_types\[0\]"),
        (
            "phi3 long",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor",
        ),
        ("qwen3", {"model_type": "qwen3_moe"}, "model_type: 'qwen3_moe' is not supported"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
        ("llama", {"quantization": {"bits": 4}}, "quantization is not supported"),
    ],
)
def test_what_a_config_must_not_say(
    kind: str, change: dict[str, Any], error: str, numba_ops: Callable[[int], Ops], tmp_path: Path
) -> None:
    tiny.reference_model(tiny.Shape(kind=kind)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelFileError, match=error):
        logits(tmp_path, numba_ops(2))


@pytest.mark.parametrize(
    ("inside", "outside", "expected"), [(None, True, True), (False, True, False), (None, None, False)]
)
def test_a_wrapper_may_say_for_its_text_model_that_the_head_is_the_embedding(
    inside: bool | None, outside: bool | None, expected: bool, tmp_path: Path
) -> None:
    tiny.reference_model(tiny.Shape(kind="ministral 3")).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    text = json.loads(path.read_text()) | {"tie_word_embeddings": inside}
    path.write_text(json.dumps({"model_type": "mistral3", "tie_word_embeddings": outside, "text_config": text}))
    from safetensors.numpy import load_file, save_file

    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, file)
    with open_checkpoint(tmp_path) as checkpoint:
        assert describe(checkpoint, 258).spec.tied is expected
