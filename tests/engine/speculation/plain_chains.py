"""What chain drafters should draft: their plain references on the states of transformers' own forward pass of a tiny target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from power_lab.engine.request import SamplingParams
from power_lab.kernels import reference
from tests import tiny
from tests.chains import EagleChain, MtpChain, Target
from tests.engine.speculation.plain import _model, hidden


@dataclass(frozen=True)
class Drafted:
    """tokens; logits f64 [width, V]."""

    tokens: tuple[int, ...]
    logits: Tensor


class PlainChain:
    """A chain drafter's reference, for a tiny target.

    Args:
        kind: "mtp" or "eagle"; config, tensors: of the artifact.
    """

    def __init__(
        self, shape: tiny.Shape, kind: str, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
    ) -> None:
        spec, stored = tiny.spec(shape), tiny.tensors(shape)
        dense = {name: torch.from_numpy(np.ascontiguousarray(tiny.values(stored[name]))) for name in _shared(stored)}
        embedding = dense["token_embd.weight"] * spec.embedding_scale
        head = dense.get("output.weight", dense["token_embd.weight"])
        self.shape, self.kind, self.config = shape, kind, dict(config)
        self.target = Target(embedding, head, dense["output_norm.weight"], spec.norm_eps, spec.final_softcap)
        self.weights = {name: torch.from_numpy(value) for name, value in tensors.items()}

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], width: int, params: SamplingParams) -> Drafted:
        """Behind committed tokens, the last of which is the anchor."""
        chain, rows, said = self._chain(tokens), [], []
        drawn = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed or 0)
        for at in range(len(tokens), len(tokens) + width):
            rows.append(chain.step())
            logits = rows[-1].clone()
            for token, bias in params.logit_bias.items():
                logits[token] += bias
            said.append(reference.sample(logits, *drawn, at))
            chain.tokens.append(said[-1])
        return Drafted(tuple(said), torch.stack(rows))

    def _chain(self, tokens: Sequence[int]) -> MtpChain | EagleChain:
        states = hidden(self.shape, tokens)[-1][: len(tokens) - 1]
        if self.kind == "mtp":
            return MtpChain(self.weights, self.config, self.target, tokens, states)
        ropes = [tiny.spec(self.shape).layers[at].attention.rope for at in self.config["target_layers"]]
        turns = [
            torch.zeros(0, 2)
            if rope is None
            else reference.rope_tables(len(tokens), list(rope.frequencies), rope.magnitude)[-1]
            for rope in ropes
        ]
        return EagleChain(self.weights, self.config, self.target, tokens[-1], states[-1], self._kv(tokens), turns)

    def _kv(self, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """What the target's layers keep of the tokens before the anchor, as transformers has it in its cache."""
        cache = _model(self.shape)(torch.tensor([list(tokens)]), use_cache=True).past_key_values
        layers = [cache.layers[at] for at in self.config["target_layers"]]
        return [tuple(t[0].transpose(0, 1)[: len(tokens) - 1] for t in (kv.keys, kv.values)) for kv in layers]  # type: ignore[misc]


def _shared(stored: Mapping[str, Any]) -> list[str]:
    return [name for name in ("token_embd.weight", "output.weight", "output_norm.weight") if name in stored]
