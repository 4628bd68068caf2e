"""What trained drafters should draft: their plain torch modules on hidden states of transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from power_lab.engine.request import SamplingParams
from power_lab.engine.trace import RunRecord
from power_lab.kernels import reference
from power_lab.training.modules import DFlash, DFlash2, Draft, DrafterConfig, DSpark, Shared
from tests import tiny

NEAR = 1e-3  # two scores that are closer are one to us: the engine sums in another order


@lru_cache(maxsize=4)
def _model(shape: tiny.Shape) -> Any:
    return tiny.reference_model(shape)


@torch.no_grad()
def hidden(shape: tiny.Shape, tokens: Sequence[int]) -> list[Tensor]:
    """f32 [T, D] that enters each layer, and what leaves the last one before the final norm."""
    model, found = _model(shape), []
    layers = model.model.layers
    hooks = [layer.register_forward_pre_hook(lambda _, args: found.append(args[0][0])) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(lambda _, __, out: found.append(out[0] if out.dim() == 3 else out)))
    try:
        model(torch.tensor([list(tokens)]))
    finally:
        for hook in hooks:
            hook.remove()
    return found


class Plain:
    """A drafter's module with an artifact's tensors.

    Args:
        shape: of the target; config, tensors: of the artifact. name: that it drafts under.
    """

    def __init__(
        self, shape: tiny.Shape, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], name: str
    ) -> None:
        spec = tiny.spec(shape)
        self.shape, self.config = shape, config
        whole = torch.from_numpy(np.ascontiguousarray(tiny.values(tiny.tensors(shape)["token_embd.weight"])))
        ids = torch.from_numpy(tensors["draft_ids"]).long() if "draft_ids" in tensors else torch.arange(spec.vocab)
        self.shared = Shared(
            whole * spec.embedding_scale, whole[ids], ids, spec.norm_eps, spec.final_softcap, torch.ones(spec.width)
        )
        made = {"dflash": DFlash, "dspark": DSpark, "dflash2": DFlash2}[name]
        sizes = DrafterConfig(**{"qk_norm": False, **config, "taps": tuple(config["taps"])})
        self.module = made(sizes, spec.width, spec.norm_eps, spec.vocab, len(ids)).eval()
        wanted = self.module.state_dict()
        self.module.load_state_dict({name: torch.from_numpy(tensors[name]) for name in wanted})

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], width: int, params: SamplingParams) -> Draft:
        """Behind committed tokens, the last of which is the anchor."""
        states = hidden(self.shape, tokens)
        features = torch.cat([states[layer] for layer in self.config["taps"]], -1)[: len(tokens) - 1]
        drawn = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed or 0)
        return self.module.draft(
            self.shared,
            features,
            tokens[-1],
            min(width, self.config["block_size"] - (not self.config.get("from_anchor"))),
            lambda logits, position: reference.sample(logits, *drawn, position),
        )


def check(record: RunRecord, plain: Plain, params: SamplingParams, *, every: int = 1) -> int:
    """Assert that a run's drafts are the module's; returns how many rounds were looked at.

    Of a draft that differs, the first difference must be between tokens that the module's logits hardly tell apart.
    """
    known = [*record.prompt_tokens, *record.tokens]
    looked = 0
    for r in record.rounds[::every]:
        if not r.drafted:
            continue
        looked += 1
        want = plain.draft(known[: r.start], len(r.drafted), params)
        at = next((i for i, pair in enumerate(zip(r.drafted, want.tokens, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            gap = want.logits[at][want.tokens[at]] - want.logits[at][r.drafted[at]]
            assert params.temperature == 0 and gap < NEAR, f"round at {r.start}: {r.drafted} and not {want.tokens}"
    return looked
