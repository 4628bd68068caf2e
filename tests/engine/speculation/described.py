"""What block drafters should draft, by others' code and words: the trunk is transformers' DFlash class (`MuseGlimmerAssistantModel`), and
what no library has (DFlash2's filters and walk, DSpark's Markov and confidence heads) is written down here from its description, row by row
in NumPy. Nothing here is ours but the names of an artifact's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from power_lab.engine.request import SamplingParams
from tests import tiny
from tests.engine.speculation.plain import hidden

LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
    "v": "self_attn.v_proj", "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "gate": "mlp.gate_proj",
    "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
"""An artifact's names -> transformers'."""
OWN = ("markov", "conf", "selector", "draft_ids")
"""Beginnings of names of tensors that transformers' class has not."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens, the probability of each, and of each the scores [V] that it is the best of."""

    tokens: list[int]
    confidence: list[float]
    logits: list[np.ndarray]


class Described:
    """A block drafter, as others have it.

    Args:
        shape: of the target; config, tensors: of the artifact. name: that it drafts under.
    """

    def __init__(
        self, shape: tiny.Shape, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], name: str
    ) -> None:
        spec = tiny.spec(shape)
        self.shape, self.config, self.tensors, self.name = shape, config, tensors, name
        of_target = tiny.tensors(shape)
        self.embedding = np.ascontiguousarray(tiny.values(of_target["token_embd.weight"]), np.float32)
        self.ids = tensors.get("draft_ids", np.arange(spec.vocab))
        head = of_target.get("output.weight")
        self.head = (self.embedding if head is None else tiny.values(head).astype(np.float32))[self.ids]
        self.trunk = self._trunk(spec.width, spec.norm_eps)

    def _trunk(self, width: int, eps: float) -> MuseGlimmerAssistantModel:
        config = self.config
        made = MuseGlimmerAssistantConfig(
            hidden_size=width,
            intermediate_size=config["ffn"],
            num_hidden_layers=config["layers"],
            num_attention_heads=config["heads"],
            num_key_value_heads=config["kv_heads"],
            head_dim=config["head_dim"],
            rms_norm_eps=eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)},
            layer_types=["full_attention"] * config["layers"],
            block_size=config["block_size"],
            target_layer_ids=list(config["taps"]),
            attn_implementation="eager",
        )
        trunk = MuseGlimmerAssistantModel(made).eval()
        if not config.get("qk_norm"):
            for layer in trunk.layers:
                layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
        trunk.load_state_dict({_theirs(n): torch.from_numpy(v) for n, v in self.tensors.items() if _theirs(n)})
        if self.name == "dflash2":
            for i, layer in enumerate(trunk.layers):
                for part, module in (("attn_conv", layer.self_attn), ("ffn_conv", layer.mlp)):
                    self._filter(module, f"layers.{i}.{part}")
        return trunk

    def _filter(self, module: nn.Module, name: str) -> None:
        """A grouped dynamic depthwise convolution around a sublayer, its coefficients from what goes in."""
        base, proj = self.tensors[f"{name}.base"], self.tensors[f"{name}.proj.weight"]
        kept: dict[str, np.ndarray] = {}

        def filtered(side: int, x: np.ndarray) -> torch.Tensor:
            out = np.zeros_like(x)
            for r in range(len(x)):
                for t in range(min(base.shape[1], r + 1)):
                    weight = base[side, t] + np.repeat(kept["delta"][r, side, t], self.config["conv_group"])
                    out[r] += weight * x[r - t]
            return torch.from_numpy(out)[None]

        def prepare(_: nn.Module, args: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            x = (args[0] if args else options["hidden_states"])[0].numpy()
            kept["delta"] = (x @ proj.T).reshape(len(x), 2, base.shape[1], -1)
            new = filtered(0, x)
            return ((new, *args[1:]), options) if args else (args, options | {"hidden_states": new})

        def finish(_: nn.Module, __: tuple, out: Any) -> Any:
            return (filtered(1, out[0][0].numpy()), *out[1:]) if isinstance(out, tuple) else filtered(1, out[0].numpy())

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        module.register_forward_hook(finish)

    @torch.no_grad()
    def _rows(self, tokens: Sequence[int]) -> np.ndarray:
        """What leaves the trunk's final norm [B, D], for a block behind committed tokens, the last of which is its anchor."""
        before, block = len(tokens) - 1, self.config["block_size"]
        states = hidden(self.shape, tokens)
        features = torch.cat([states[layer] for layer in self.config["taps"]], -1)[None, :before]
        noise = self.embedding[[tokens[-1], *[self.config["mask_token"]] * (block - 1)]]
        noise = torch.from_numpy(noise * np.float32(tiny.spec(self.shape).embedding_scale))
        row, key = torch.arange(before, before + block)[:, None], torch.arange(before + block)[None]
        seen = (key <= row) if self.config["causal"] else torch.ones(block, before + block, dtype=torch.bool)
        if self.config["window"]:
            seen &= row - key < self.config["window"]
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        out = self.trunk(noise[None], features, attention_mask={"full_attention": mask, "sliding_attention": mask})
        return out.last_hidden_state[0].numpy()

    def draft(self, tokens: Sequence[int], width: int, params: SamplingParams) -> Drafted:
        assert params.temperature == 0
        rows = self._rows(tokens)[0 if self.config.get("from_anchor") else 1 :][:width]
        head = {"dflash": self._each, "dspark": self._markov, "dflash2": self._walk}[self.name]
        return head(rows, rows @ self.head.T, tokens[-1])

    def _each(self, rows: np.ndarray, logits: np.ndarray, anchor: int) -> Drafted:
        return self._drafted(logits, [softmax(own).max() for own in logits])

    def _markov(self, rows: np.ndarray, logits: np.ndarray, anchor: int) -> Drafted:
        """logits_i + W2 W1[before_i]; sure by sigmoid(w [h_i; W1[before_i]] + b)."""
        w1, w2 = self.tensors["markov_w1.weight"], self.tensors["markov_w2.weight"]
        sure, bias = self.tensors["conf.weight"], self.tensors["conf.bias"]
        before, scores, confidence = anchor, [], []
        for h, base in zip(rows, logits, strict=True):
            scores.append(base + w2 @ w1[before])
            confidence.append(1 / (1 + np.exp(-(sure @ np.concatenate([h, w1[before]]) + bias[0]))))
            before = int(self.ids[scores[-1].argmax()])
        return self._drafted(np.stack(scores), confidence)

    def _walk(self, rows: np.ndarray, logits: np.ndarray, anchor: int) -> Drafted:
        """Of each row's best candidates the one of the best unary + A[before] (S h) B[candidate], one row after the other."""
        a, b = self.tensors["selector_predecessor.weight"], self.tensors["selector_successor.weight"]
        s, most = self.tensors["selector_hidden.weight"], self.config["selector_top_k"]
        cap = tiny.spec(self.shape).final_softcap
        before, scores, confidence = anchor, [], []
        for h, own in zip(rows, logits, strict=True):
            best = np.argsort(-own, kind="stable")[:most]
            unary = cap * np.tanh(own[best] / cap) if cap else own[best]
            weighed = unary + b[self.ids[best]] @ (a[before] * (s @ h))
            scores.append(np.full(len(own), -np.inf, np.float32))
            scores[-1][best] = weighed
            confidence.append(softmax(weighed).max())
            before = int(self.ids[best[weighed.argmax()]])
        return self._drafted(np.stack(scores), confidence)

    def _drafted(self, scores: np.ndarray, confidence: Sequence[float]) -> Drafted:
        whole = np.full((len(scores), len(self.embedding)), -np.inf, np.float32)
        whole[:, self.ids] = scores
        return Drafted([int(row.argmax()) for row in whole], [float(sure) for sure in confidence], list(whole))


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores.astype(np.float64) - scores.max())
    return e / e.sum()


def _theirs(name: str) -> str:
    """transformers' name of an artifact's tensor; "" where its class has none."""
    if name.startswith(OWN) or "_conv." in name:
        return ""
    if name.startswith("layers."):
        _, i, part, kind = name.split(".")
        return f"layers.{i}.{LAYER[part]}.{kind}"
    return {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(name, name)
