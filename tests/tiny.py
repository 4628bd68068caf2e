"""Tiny random Llama models: fast enough for property tests, with transformers' own implementation beside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.loader import Loaded
from power_lab.engine.models import llama
from power_lab.engine.models.decoder import Decoder
from power_lab.engine.models.spec import AttentionSpec, ModelSpec
from power_lab.engine.tokenizer import Tokenizer
from power_lab.engine.trace import EngineFacts
from power_lab.engine.weights.source import MemorySource
from power_lab.kernels.ops import Ops
from power_lab.kernels.quants import QuantType

CONTEXT = 1024
END = 257  # a control token


@dataclass(frozen=True)
class Shape:
    """Topology of a tiny model. `quantised` stores its matrices as Q4_1 and its embedding as Q8_0."""

    layers: int = 2
    width: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    quantised: bool = False
    seed: int = 0
    scale: float = 1.4  # of the weights: outputs repeat themselves at times, but are not one token for ever


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """Byte-level, 256 bytes without merges, then a begin and an end token."""
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in alphabet]
    code = {**{b: chr(b) for b in alphabet}, **{b: chr(256 + i) for i, b in enumerate(rest)}}
    tokens = [code[b] for b in range(256)] + ["<s>", "</s>"]
    types = np.array([1] * 256 + [3, 3], np.int32)
    return Tokenizer(tokens, types, [], "gpt-2", bos_id=256, add_bos=False, end_ids=[END])


def tensors(shape: Shape) -> dict[str, Any]:
    """Random weights by GGUF name."""
    rng = np.random.default_rng(shape.seed)
    vocab = tokenizer().vocab_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (rng.standard_normal((rows, cols)) * shape.scale / cols**0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(shape.width)).astype(np.float32)

    result: dict[str, Any] = {"token_embd.weight": matrix(vocab, shape.width), "output_norm.weight": norm()}
    for i in range(shape.layers):
        result |= {
            f"blk.{i}.attn_norm.weight": norm(),
            f"blk.{i}.attn_q.weight": matrix(q, shape.width),
            f"blk.{i}.attn_k.weight": matrix(kv, shape.width),
            f"blk.{i}.attn_v.weight": matrix(kv, shape.width),
            f"blk.{i}.attn_output.weight": matrix(shape.width, q),
            f"blk.{i}.ffn_norm.weight": norm(),
            f"blk.{i}.ffn_gate.weight": matrix(shape.ffn, shape.width),
            f"blk.{i}.ffn_up.weight": matrix(shape.ffn, shape.width),
            f"blk.{i}.ffn_down.weight": matrix(shape.width, shape.ffn),
        }
    return {name: _stored(name, value) if shape.quantised else value for name, value in result.items()}


def _stored(name: str, value: np.ndarray) -> Any:
    import gguf

    if value.ndim == 1:
        return value
    kind = QuantType.Q8_0 if name == "token_embd.weight" else QuantType.Q4_1
    return kind, gguf.quantize(value, gguf.GGMLQuantizationType(int(kind)))


def spec(shape: Shape) -> ModelSpec:
    attention = AttentionSpec(
        shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, 10000.0, False, shape.head_dim**-0.5
    )
    return ModelSpec("llama", tokenizer().vocab_size, shape.width, shape.layers, shape.ffn, CONTEXT, 1e-5, attention)


def loaded(shape: Shape, ops: Ops) -> Loaded:
    model = spec(shape)
    weights = llama.weights(model, MemorySource(tensors(shape)), ops)
    facts = EngineFacts(
        model="tiny",
        file="",
        sha256=repr(shape),
        license="",
        architecture="llama",
        parameters=weights.parameters,
        context=CONTEXT,
        vocab=model.vocab,
        quantisation=weights.bytes_by_type,
        config={},
        mode=ops.mode,
        device="cpu",
        threads=2,
        digest=ops.digest(),
        revision="",
        versions={},
    )
    return Loaded(Decoder(model, weights, ops, CONTEXT), tokenizer(), facts, CONTEXT, {})


def engine(shape: Shape, ops: Ops, **settings: Any) -> Engine:
    """A tiny engine that the caller steps."""
    options = {"threaded": False} | {
        key: settings.pop(key) for key in ("observer", "threaded", "clock") if key in settings
    }
    config = EngineConfig(**{"kv_tokens": 2048, "step_tokens": 256, **settings})
    return Engine(config, loaded=loaded(shape, ops), **options)


def cache_dir() -> Path:
    from power_lab.engine.config import Paths

    return Paths.default().kernels


HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """A GGUF tensor name in transformers' Llama."""
    if name in HF_NAMES:
        return HF_NAMES[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{HF_NAMES[part]}.weight"


def reference_model(shape: Shape) -> Any:
    """The same model in transformers (f32, eager attention)."""
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=tokenizer().vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    state = {}
    for name, value in tensors(shape).items():
        if isinstance(value, tuple):
            value = gguf.dequantize(value[1], gguf.GGMLQuantizationType(int(value[0])))
        state[hf_name(name)] = torch.from_numpy(np.ascontiguousarray(value))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model
