"""Multi-token prediction: its reference agrees with transformers, and artifacts that are not sound are refused.

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
from power_lab.training.modules import MTP, DrafterConfig, Shared
from tests import drafters, tiny
from tests.chains import MtpChain, Target

TARGET = tiny.Shape()


@pytest.mark.parametrize(("heads", "drafts"), [(1, 3), (2, 4), (3, 3)])
@torch.no_grad()
def test_the_reference_is_transformers(heads: int, drafts: int) -> None:
    """Row 0, which transformers leaves out, is put before its rows as a token behind a hidden state of zeros."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    config.num_mtp_layers, config.mtp_layer_types = heads, ["full_attention"] * heads
    torch.manual_seed(heads)
    target = _scattered(Qwen3ForCausalLM(config))
    theirs = MtpModel(target, heads)
    _scattered(theirs.layers)
    tokens = torch.randint(96, (1, 11))
    states: list[torch.Tensor] = []
    target.model.norm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    normed = target.model(tokens[:, :-1]).last_hidden_state
    ours = MtpChain(
        _weights(theirs),
        {"layers": heads, "heads": 4, "kv_heads": 2, "head_dim": 8, "qk_norm": True, "rope_theta": 10000.0}
        | {"normed_hidden": True, "normed_chain": True},
        Target(target.model.embed_tokens.weight, target.lm_head.weight, target.model.norm.weight, config.rms_norm_eps),
        tokens[0].tolist(),
        states[0][0],
    )
    assert config.rope_parameters["rope_theta"] == 10000.0

    def run(head: int, before: torch.Tensor) -> torch.Tensor:
        rows = before.shape[1] + 1
        before = torch.cat([torch.zeros_like(before[:, :1]), before], 1)
        at, cache = torch.arange(rows)[None], MtpCache(config=theirs.config)
        return theirs.forward_layer(head, before, at, cache, input_ids=tokens[:, :rows])

    own: list[torch.Tensor] = []
    for draft in range(drafts):
        before = normed
        for head in range(min(draft, heads - 1)):
            before = run(head, before)
        made = run(min(draft, heads - 1), torch.cat([before, *own], 1))
        if draft >= heads - 1:
            own.append(made[:, -1:])
        want, logits = theirs._project_to_logits(made[0, -1]).double(), ours.step()
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)
        token = int(want.argmax())
        ours.tokens.append(token)
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)


def _scattered(module: Any) -> Any:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return module.eval()


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """transformers' names as an artifact's."""
    made, width = {}, model.config.hidden_size
    for i, layer in enumerate(model.layers):
        at = "" if len(model.layers) == 1 else f"layers.{i}."
        made |= {f"{at}enorm.weight": layer.enorm.weight, f"{at}hnorm.weight": layer.hnorm.weight}
        made |= {f"{at}norm.weight": layer.post_norm.weight, f"{at}embed_proj.weight": layer.eh_proj.weight[:, :width]}
        made[f"{at}hidden_proj.weight"] = layer.eh_proj.weight[:, width:]
        block = layer.mtp_block
        for name, module in {
            **{n: getattr(block.self_attn, f"{n}_proj") for n in "qkvo"},
            **{n: getattr(block.mlp, f"{n}_proj") for n in ("gate", "up", "down")},
            **{f"{n}_norm": getattr(block.self_attn, f"{n}_norm") for n in "qk"},
            "attn_norm": block.input_layernorm,
            "ffn_norm": block.post_attention_layernorm,
        }.items():
            made[f"layers.{i}.{name}.weight"] = module.weight
    return made


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"taps": [1]}, "taps"), ({"heads": 3}, "heads"), ({"layers": 0}, "layers"), ({"normed": True}, "normed")],
    ids=str,
)
def test_a_config_that_does_not_fit_is_refused(
    numba_ops: Callable[[int], Ops], changes: dict[str, Any], word: str
) -> None:
    config = drafters.MTP | changes
    with pytest.raises(ConfigError, match=word) as refused:
        drafters.equipped(tiny.loaded(TARGET, numba_ops(2)), TARGET, "mtp", ["mtp"], config, drafters.mtp(TARGET))
    assert refused.value.key == "draft"


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("fault", ["missing", "misshapen", "unknown"])
def test_tensors_that_do_not_fit_are_refused(numba_ops: Callable[[int], Ops], heads: int, fault: str) -> None:
    config = drafters.MTP | {"layers": heads}
    tensors = dict(drafters.mtp(TARGET, config))
    name = "hidden_proj.weight" if heads == 1 else "layers.1.hidden_proj.weight"
    named = f"{name}.beside" if fault == "unknown" else name
    if fault == "missing":
        del tensors[name]
    else:
        tensors[named] = np.zeros((TARGET.width, 7), np.float32)
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")) as refused:
        drafters.equipped(tiny.loaded(TARGET, numba_ops(2)), TARGET, "mtp", ["mtp"], config, tensors)
    assert refused.value.key == "draft"


@torch.no_grad()
def test_the_reference_is_what_is_trained() -> None:
    """The module that `power_lab.training` trains, with an artifact's tensors, drafts the same chain."""
    tensors = {name: torch.from_numpy(value) for name, value in drafters.mtp(TARGET, said=90).items()}
    spec = tiny.spec(TARGET)
    stored = tiny.tensors(TARGET)
    embedding, ids = torch.from_numpy(tiny.values(stored["token_embd.weight"])), tensors["draft_ids"].long()
    shared = Shared(embedding, embedding[ids], ids, spec.norm_eps, 0.0, torch.ones(spec.width))
    sizes = DrafterConfig(**{"qk_norm": False, **drafters.MTP, "taps": tuple(drafters.MTP["taps"])})
    module = MTP(sizes, spec.width, spec.norm_eps, spec.vocab, len(ids)).eval()
    module.load_state_dict({name: tensors[name] for name in module.state_dict()})
    torch.manual_seed(0)
    tokens, hidden = torch.randint(spec.vocab, (12,)).tolist(), torch.randn(11, spec.width)
    target = Target(embedding, embedding, torch.ones(spec.width), spec.norm_eps)
    ours = MtpChain(tensors, drafters.MTP, target, tokens, hidden)
    theirs = module.draft(shared, tokens[:-1], hidden, tokens[-1], 4)
    for logits, token in zip(theirs.logits, theirs.tokens, strict=True):
        torch.testing.assert_close(ours.step(), logits.double(), rtol=0, atol=1e-4)
        ours.tokens.append(token)
