"""Plain references of drafters that draft one token after another: dense, in double precision, everything computed anew for each token.

Weights have the names of a drafter's artifact, config is its header's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from power_lab.kernels import reference

Weights = dict[str, Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """What a drafter shares with its model: embedding [V, D] with its scale, output head [V, D], final norm [D], softcap of logits."""

    embedding: Tensor
    head: Tensor
    norm: Tensor
    eps: float
    softcap: float = 0.0

    def hidden(self, hidden: Tensor, config: Config) -> Tensor:
        """[p, D] behind the last layer as the drafter reads it."""
        return norm(hidden, self.norm, self.eps) if config.get("normed_hidden") else hidden.double()

    def logits(self, h: Tensor, weights: Weights) -> Tensor:
        """f64 [V] of one row; -inf outside a draft vocabulary."""
        ids = weights.get("draft_ids")
        ids = torch.arange(len(self.head)) if ids is None else ids.long()
        own = weights.get("head.weight")
        found = h.double() @ (self.head[ids] if own is None else own).double().T
        found = reference.softcap(found, self.softcap) if self.softcap and own is None else found
        return torch.full((len(self.head),), -torch.inf, dtype=torch.float64).index_copy(0, ids, found)


class MtpChain:
    """Multi-token prediction for one request.

    tokens: [p + 1], the anchor last. hidden: [p, D] of those before, behind the target's last layer, before its final norm.
    """

    def __init__(self, weights: Weights, config: Config, target: Target, tokens: Sequence[int], hidden: Tensor) -> None:
        self.w, self.c, self.target, self.tokens = weights, config, target, list(tokens)
        self._hidden = target.hidden(hidden, config)
        self._own: list[Tensor] = []  # what the last head has made of drafted rows

    def step(self) -> Tensor:
        """Logits f64 [V] of the next draft, which is to be appended to `tokens` before the next step."""
        drafted, last = len(self.tokens) - 1 - len(self._hidden), self.c["layers"] - 1
        before = self._hidden
        for head in range(min(drafted, last)):
            before, _ = self._head(head, before)
        passed, normed = self._head(min(drafted, last), torch.cat([before, *self._own]))
        if drafted >= last:
            self._own.append(passed[-1:])
        return self.target.logits(normed[-1], self.w)

    def _head(self, head: int, before: Tensor) -> tuple[Tensor, Tensor]:
        """What a head makes of rows 0..len(before): as the next row, or the next head, reads it; and before the output head."""
        w, eps, at = self.w, self.target.eps, "" if self.c["layers"] == 1 else f"layers.{head}."
        before = torch.cat([torch.zeros(1, self.target.embedding.shape[1], dtype=torch.float64), before])
        embedded = self.target.embedding[torch.tensor(self.tokens[: len(before)])]
        x = norm(embedded, w[f"{at}enorm.weight"], eps) @ w[f"{at}embed_proj.weight"].double().T
        x = x + norm(before, w[f"{at}hnorm.weight"], eps) @ w[f"{at}hidden_proj.weight"].double().T
        x = llama_layer(x, w, f"layers.{head}", self.c, eps)
        normed = norm(x, w[f"{at}norm.weight"], eps)
        return (normed if self.c.get("normed_chain") else x), normed


class EagleChain:
    """An assistant that reads the target's keys and values, for one request.

    token: the anchor. hidden: [D] of the position before it. kv: of each layer, keys and values [p, KV heads, head_dim] as the target has
    them in its cache. turns: of each layer, [pairs, 2], the target's rotation at the anchor's position.
    """

    def __init__(
        self,
        weights: Weights,
        config: Config,
        target: Target,
        token: int,
        hidden: Tensor,
        kv: Sequence[tuple[Tensor, Tensor]],
        turns: Sequence[Tensor],
    ) -> None:
        self.w, self.c, self.target, self.tokens, self._kv, self._turns = weights, config, target, [token], kv, turns
        self._hidden = target.hidden(hidden, config)

    def step(self) -> Tensor:
        """Logits f64 [V] of the next draft, which is to be appended to `tokens` before the next step."""
        w, eps = self.w, self.target.eps
        x = self.target.embedding[self.tokens[-1]].double() @ w["embed_proj.weight"].double().T
        x = x + self._hidden @ w["hidden_proj.weight"].double().T
        for layer in range(len(self._kv)):
            x = self._layer(layer, x)
        h = norm(x, w["norm.weight"], eps)
        self._hidden = h @ w["next_hidden.weight"].double().T
        return self.target.logits(h, w)

    def _layer(self, layer: int, x: Tensor) -> Tensor:
        w, c, eps, at, (keys, values) = self.w, self.c, self.target.eps, f"layers.{layer}", self._kv[layer]
        hd = keys.shape[-1]
        q = (norm(x, w[f"{at}.attn_norm.weight"], eps) @ w[f"{at}.q.weight"].double().T).reshape(c["heads"], hd)
        q = norm(q, w[f"{at}.q_norm.weight"], eps) if c.get("qk_norm") else q
        q = reference.rope(q[None], self._turns[layer][None], c.get("interleaved", False))[0]
        window = c["windows"][layer] if c.get("windows") else 0
        a = reference.attention(q, keys, values, c.get("scale") or hd**-0.5, window).reshape(-1)
        a = a @ w[f"{at}.o.weight"].double().T
        x = x + (norm(a, w[f"{at}.post_attn_norm.weight"], eps) if c.get("post_norms") else a)
        h = norm(x, w[f"{at}.ffn_norm.weight"], eps)
        names = (f"{at}.{name}.weight" for name in ("gate", "up", "down"))
        gate, up, down = (w[name].double() for name in names)
        f = reference.linear(reference.gate_up(h[None], gate, up, c.get("activation", "silu")), down)[0]
        return x + (norm(f, w[f"{at}.post_ffn_norm.weight"], eps) if c.get("post_norms") else f)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return reference.rms_norm(x, weight, eps)


def llama_layer(x: Tensor, w: Weights, at: str, c: Config, eps: float) -> Tensor:
    """A causal layer over rows at positions 0, 1, ...: x f64 [T, D]."""
    rows, hd = len(x), c["head_dim"]
    turn = reference.rope_tables(rows, reference.frequencies(hd, c.get("rope_theta", 10000.0)))
    h = norm(x, w[f"{at}.attn_norm.weight"], eps)
    q, k, v = (
        (h @ w[f"{at}.{name}.weight"].double().T).reshape(rows, heads, hd)
        for name, heads in (("q", c["heads"]), ("k", c["kv_heads"]), ("v", c["kv_heads"]))
    )
    if c.get("qk_norm"):
        q, k = norm(q, w[f"{at}.q_norm.weight"], eps), norm(k, w[f"{at}.k_norm.weight"], eps)
    q, k = reference.rope(q, turn, False), reference.rope(k, turn, False)
    k, v = (t.repeat_interleave(c["heads"] // c["kv_heads"], dim=1) for t in (k, v))
    hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    scores = (hd**-0.5 * torch.einsum("qhd,khd->hqk", q, k)).masked_fill(hidden, -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(rows, -1)
    x = x + attended @ w[f"{at}.o.weight"].double().T
    h = norm(x, w[f"{at}.ffn_norm.weight"], eps)
    gate, up, down = (w[f"{at}.{name}.weight"].double() for name in ("gate", "up", "down"))
    return x + reference.linear(reference.gate_up(h, gate, up), down)
