"""The assistant that reads the target's keys and values: its reference agrees with transformers' Gemma 4 assistant; what does not fit is
refused.

What the engine drafts is compared with the reference in test_neural_chains.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from power_lab.errors import ConfigError
from power_lab.kernels.ops import Ops
from tests import drafters, tiny
from tests.chains import EagleChain, Target

TARGET = tiny.Shape()
KINDS = ("sliding_attention", "full_attention")


@pytest.mark.parametrize("position", [3, 9, 24])
@torch.no_grad()
def test_the_reference_is_transformers(position: int) -> None:
    """A chain of four. The window is 8; the assistant sees 9 keys. A factor on a layer's output is in the weights of those behind it."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
    none = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2}
    text = Gemma4TextConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        sliding_window=8,
        layer_types=list(KINDS),
        max_position_embeddings=64,
        **heads,
        **none,
    )
    torch.manual_seed(position)
    theirs = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, backbone_hidden_size=40)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    for layer, factor in zip(theirs.model.layers, (0.7, 1.3), strict=True):
        layer.layer_scalar.fill_(factor)
    embedding, hidden = 0.4 * torch.randn(96, 40), torch.randn(40)
    sizes = [heads["head_dim"], heads["global_head_dim"]]
    kept = {
        kind: (torch.randn(1, 2, position, size), torch.randn(1, 2, position, size))
        for kind, size in zip(KINDS, sizes, strict=True)
    }
    at = torch.tensor([[position]])
    turns = []
    for kind, size in zip(KINDS, sizes, strict=True):
        cos, sin = theirs.model.rotary_emb(hidden, at, kind)
        turns.append(torch.stack([cos[0, 0, : size // 2], sin[0, 0, : size // 2]], -1))
    ours = EagleChain(
        _weights(theirs),
        {"heads": 4, "qk_norm": True, "post_norms": True, "windows": [9, 0], "scale": 1.0, "activation": "gelu_tanh"},
        Target(embedding, torch.zeros(96, 40), torch.ones(40), text.rms_norm_eps),
        11,
        hidden,
        [tuple(one[0].transpose(0, 1) for one in kept[kind]) for kind in KINDS],  # type: ignore[misc]
        turns,
    )
    token, state = 11, hidden[None, None]
    for _ in range(4):
        given = torch.cat([embedding[token][None, None], state], -1)
        made = theirs(inputs_embeds=given, position_ids=at, shared_kv_states=kept)
        torch.testing.assert_close(ours.step(), made.logits[0, 0].double(), rtol=1e-4, atol=2e-4)
        token, state = int(made.logits.argmax()), made.last_hidden_state
        ours.tokens.append(token)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """transformers' names as an artifact's."""
    width = model.post_projection.weight.shape[0]
    made = {
        "embed_proj.weight": model.pre_projection.weight[:, :width],
        "hidden_proj.weight": model.pre_projection.weight[:, width:],
        "next_hidden.weight": model.post_projection.weight,
        "norm.weight": model.model.norm.weight,
        "head.weight": model.lm_head.weight,
    }
    scale = 1.0
    for i, layer in enumerate(model.model.layers):
        for name, module in {
            "q": layer.self_attn.q_proj,
            "q_norm": layer.self_attn.q_norm,
            "o": layer.self_attn.o_proj,
            "attn_norm": layer.input_layernorm,
            "ffn_norm": layer.pre_feedforward_layernorm,
            **{n: getattr(layer.mlp, f"{n}_proj") for n in ("gate", "up", "down")},
        }.items():
            made[f"layers.{i}.{name}.weight"] = module.weight
        made[f"layers.{i}.post_attn_norm.weight"] = layer.post_attention_layernorm.weight / scale
        made[f"layers.{i}.post_ffn_norm.weight"] = layer.post_feedforward_layernorm.weight / scale
        scale *= float(layer.layer_scalar)
    return made


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"target_layers": [0, 2]}, "target_layers"),
        ({"windows": [3]}, "windows"),
        ({"heads": 3}, "heads"),
        ({"activation": "relu"}, "activation"),
        ({"width": 0}, "width"),
        ({"taps": [2]}, "taps"),
        ({"scale": -1.0}, "scale"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused(
    numba_ops: Callable[[int], Ops], changes: dict[str, Any], word: str
) -> None:
    tensors = drafters.eagle(TARGET)
    config = drafters.EAGLE | changes
    with pytest.raises(ConfigError, match=word) as refused:
        drafters.equipped(tiny.loaded(TARGET, numba_ops(2)), TARGET, "eagle", ["eagle"], config, tensors)
    assert refused.value.key == "draft"


@pytest.mark.parametrize("name", ["head.weight", "next_hidden.weight", "layers.1.q.weight", "norm.weight"])
@pytest.mark.parametrize("fault", ["missing", "misshapen", "unknown"])
def test_tensors_that_do_not_fit_are_refused(numba_ops: Callable[[int], Ops], name: str, fault: str) -> None:
    tensors = dict(drafters.eagle(TARGET))
    named = f"{name}.beside" if fault == "unknown" else name
    if fault == "missing":
        del tensors[name]
    else:
        tensors[named] = np.zeros((*tensors[name].shape[:-1], 7), np.float32)
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")) as refused:
        drafters.equipped(tiny.loaded(TARGET, numba_ops(2)), TARGET, "eagle", ["eagle"], drafters.EAGLE, tensors)
    assert refused.value.key == "draft"


def test_it_serves_its_own_name_alone(numba_ops: Callable[[int], Ops]) -> None:
    with pytest.raises(ConfigError, match="serves"):
        drafters.equipped(
            tiny.loaded(TARGET, numba_ops(2)), TARGET, "eagle", ["mtp"], drafters.EAGLE, drafters.eagle(TARGET)
        )
