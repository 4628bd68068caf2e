"""Tiny checkpoints that have layers for multi-token prediction of their own, in every form that is read, and what these should draft."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from power_lab.engine.loader import Loaded
from power_lab.engine.models import of_model_type
from power_lab.engine.models.bind import bind
from power_lab.engine.models.decoder import Decoder
from power_lab.engine.models.describe import describe
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters.neural import native
from power_lab.engine.speculation.drafters.neural.artifact import Target
from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.kernels import reference
from power_lab.kernels.ops import Ops
from tests import tiny, tiny_gguf
from tests.engine.speculation.plain_chains import Drafted

Tensors = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """How a checkpoint is written, and what its layers read.

    Attributes:
        kind: of the model, as in `tiny.KINDS`; gguf: else a folder. layout: of a folder, "deepseek" or "mimo".
        config: what the folder's config.json says besides.
        hidden_first, normed_hidden, normed_chain: as published implementations of this form compute.
    """

    kind: str
    gguf: bool = False
    layout: str = "deepseek"
    config: tuple[tuple[str, Any], ...] = ()
    hidden_first: bool = False
    normed_hidden: bool = True
    normed_chain: bool = True


FORMS: dict[str, Form] = {
    "mimo": Form("qwen2", layout="mimo", hidden_first=True, normed_hidden=False),
    "fastmtp": Form("qwen2", layout="mimo", config=(("num_speculative_steps", 3),), hidden_first=True),
    "folder": Form("qwen3"),
    "folder, hidden first": Form("llama biased", config=(("mtp_hidden_states_first", True),), hidden_first=True),
    "folder, fused": Form("phi3"),
    "folder, yarn": Form("llama yarn"),
    "gguf llama": Form("llama file", gguf=True),
    "gguf qwen2": Form("qwen2 file", gguf=True),
    "gguf qwen3": Form("qwen3 file", gguf=True),
    "gguf gemma2": Form("gemma2 file", gguf=True),
}

_TOKENS = [*tiny.byte_tokens()[:255], "!!"]

_LAYOUTS = {
    "deepseek": ("model.layers.{}.", {"shared_head_norm": "shared_head.norm", "shared_head_head": "shared_head.head"}),
    "mimo": (
        "model.mtp_layers.{}.",
        {
            "eh_proj": "input_proj",
            "enorm": "token_layernorm",
            "hnorm": "hidden_layernorm",
            "shared_head_norm": "final_layernorm",
        },
    ),
}


def whole(shape: tiny.Shape, count: int) -> tiny.Shape:
    """The model with so many layers more, which are the first parts of its NextN layers: those before are as they were."""
    return replace(shape, layers=shape.layers + count)


@lru_cache(maxsize=16)
def tensors(shape: tiny.Shape, count: int = 1, seed: int = 11) -> Tensors:
    """All tensors of such a checkpoint by canonical names."""
    rng, width, made = np.random.default_rng(seed), shape.width, dict(tiny.tensors(whole(shape, count)))
    for k in range(shape.layers, shape.layers + count):
        made[f"blk.{k}.nextn.eh_proj.weight"] = (rng.standard_normal((width, 2 * width)) / width**0.5).astype("f4")
        for name in ("enorm", "hnorm", "shared_head_norm"):
            made[f"blk.{k}.nextn.{name}.weight"] = (1 + 0.2 * rng.standard_normal(width)).astype("f4")
    return made


def write(folder: Path, form: Form, shape: tiny.Shape, made: Mapping[str, Any], count: int = 1, **config: Any) -> Path:
    """A checkpoint of these tensors by canonical names, with so many such layers (0: none is stated).

    config: what its config.json says besides.
    """
    if form.gguf:
        tiny_gguf.write(folder / "model.gguf", whole(shape, count), tokens=_TOKENS, tensors=made, nextn=count)
        return folder / "model.gguf"
    from safetensors.numpy import save_file

    spec, stored = tiny.spec(whole(shape, count)), {}
    names = of_model_type(tiny.KINDS[shape.kind][0]).names(spec)
    prefix, parts = _LAYOUTS[form.layout]
    for name, value in made.items():
        _, _, part = name.partition(".nextn.")
        block = int(name.split(".")[1]) if name.startswith("blk.") else 0
        mine = prefix.format(block if form.layout == "deepseek" else block - shape.layers)
        if part:
            stem = part.removesuffix(".weight")
            stored[f"{mine}{parts.get(stem, stem)}.weight"] = value
        elif block >= shape.layers:
            stored[mine + names[name].removeprefix(f"model.layers.{block}.")] = value
        else:
            stored[names[name]] = value
    said = tiny.config(shape) | {"num_nextn_predict_layers": count} | dict(form.config) | config
    if form.layout == "mimo":
        said["model_type"] = "mimo"
    (folder / "config.json").write_text(json.dumps(said))
    save_file({name: np.ascontiguousarray(value) for name, value in stored.items()}, folder / "model.safetensors")
    return folder


def loaded(path: Path, shape: tiny.Shape, ops: Ops, *said: Any) -> Loaded:
    """The model of a checkpoint with the tiny tokenizer, and its own layers as its drafter, as the loader has it.

    said: the last arguments of `Target`.
    """
    with open_checkpoint(path) as checkpoint:
        described = describe(checkpoint, tiny.tokenizer().vocab_size)
        weights = bind(described.spec, described.source, ops)
        model = Decoder(described.spec, weights, ops, tiny.CONTEXT)
        plain = tiny.loaded(shape, ops)
        target = Target(described.spec, weights, ops, described.source, plain.facts.sha256, *said)
        none = None, "none comes with this model"
        trained, why = none if described.nextn is None else native.bind(described.nextn, target, tiny.CONTEXT)
    return Loaded(model, plain.tokenizer, plain.facts, plain.context, {"draft": why}, trained=trained)


class Published:
    """What such layers draft, by published descriptions: transformers' own layers around a dense, step-by-step rollout in f32.

    Row p reads t_p and the hidden state before it, as in `MtpChain`; there is a row 0 behind a hidden state of zeros.
    """

    def __init__(self, form: Form, shape: tiny.Shape, made: Mapping[str, Any], count: int = 1) -> None:
        self.form, self.shape, self.count = form, shape, count
        self._model = _model(whole(shape, count))
        self._made = {name: torch.from_numpy(np.ascontiguousarray(tiny.values(value))) for name, value in made.items()}

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], width: int, params: SamplingParams) -> Drafted:
        """Behind committed tokens, the last of which is the anchor."""
        known, rows, own = list(tokens), [], []
        drawn = (params.temperature, params.top_k, params.top_p, params.min_p, params.seed or 0)
        g = self._hidden(known)[: len(known) - 1]
        for step in range(width):
            before, last = g, self.count - 1
            for head in range(min(step, last)):
                before, _ = self._head(head, known, before)
            passed, normed = self._head(min(step, last), known, torch.cat([before, *own]))
            if step >= last:
                own.append(passed[-1:])
            rows.append(self._logits(normed[-1]).double())
            known.append(reference.sample(rows[-1], *drawn, len(known)))
        return Drafted(tuple(known[len(tokens) :]), torch.stack(rows))

    def _head(self, k: int, known: list[int], before: Tensor) -> tuple[Tensor, Tensor]:
        at = f"blk.{self.shape.layers + k}.nextn."
        before = torch.cat([torch.zeros(1, self.shape.width), before])
        table = self._made.get(f"{at}embed_tokens.weight", self._model.model.embed_tokens.weight)
        e = self._norm(table[torch.tensor(known[: len(before)])], f"{at}enorm.weight")
        h = self._norm(before, f"{at}hnorm.weight")
        both = torch.cat([h, e] if self.form.hidden_first else [e, h], -1)
        x = self._layer(self.shape.layers + k, both @ self._made[f"{at}eh_proj.weight"].T)
        normed = self._norm(x, f"{at}shared_head_norm.weight")
        return (normed if self.form.normed_chain else x), normed

    def _logits(self, normed: Tensor) -> Tensor:
        own = self._made.get(f"blk.{self.shape.layers}.nextn.shared_head_head.weight")
        logits = normed @ (self._model.lm_head.weight if own is None else own).T
        cap = tiny.spec(self.shape).final_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._made.get(name)
        if weight is None:  # llama.cpp's rule
            weight = self._made["output_norm.weight"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    def _layer(self, index: int, x: Tensor) -> Tensor:
        """Layer `index` of transformers' model over rows at positions 0, 1, ..."""
        rows, positions = len(x), torch.arange(len(x))[None]
        window = tiny.spec(whole(self.shape, self.count)).layers[index].attention.window or rows
        distance = positions.T - positions
        mask = torch.where((distance < 0) | (distance >= window), -torch.inf, 0.0)[None, None]
        turns = self._model.model.rotary_emb(x[None], positions)
        out = self._model.model.layers[index](
            x[None], attention_mask=mask, position_ids=positions, position_embeddings=turns
        )
        return (out[0] if isinstance(out, tuple) else out)[0]

    def _hidden(self, tokens: Sequence[int]) -> Tensor:
        """g of every position: behind the layers of the model alone."""
        found: list[Tensor] = []
        layer = self._model.model.layers[self.shape.layers]
        hook = layer.register_forward_pre_hook(lambda _, args: found.append(args[0][0]))
        try:
            self._model(torch.tensor([list(tokens)]))
        finally:
            hook.remove()
        return self._norm(found[0], "output_norm.weight") if self.form.normed_hidden else found[0]


@lru_cache(maxsize=8)
def _model(shape: tiny.Shape) -> Any:
    return tiny.reference_model(shape)
