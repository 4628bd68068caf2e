"""Tiny random models of every family: fast enough for property tests, with transformers' own implementation beside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.loader import Loaded
from power_lab.engine.models import of_model_type
from power_lab.engine.models.bind import bind
from power_lab.engine.models.decoder import Decoder
from power_lab.engine.models.spec import LayerSpec, ModelSpec
from power_lab.engine.tokenizer import Tokenizer
from power_lab.engine.trace import EngineFacts
from power_lab.engine.weights.config_json import JsonConfig
from power_lab.engine.weights.quantise import quantise
from power_lab.engine.weights.source import MemorySource
from power_lab.kernels.dequantise import dequantise
from power_lab.kernels.ops import Ops
from power_lab.kernels.quants import GEOMETRY, QuantType
from tests.engine.tokenizer.toys import byte_level

CONTEXT = 1024
END = 257  # a control token

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
UNTIED = {"tie_word_embeddings": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama biased": ("llama", {"attention_bias": True}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama yarn": ("llama", {"rope_parameters": YARN | {"beta_fast": 16.0, "truncate": False}}),
    "llama 3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": 40}),
    "ministral": (
        "ministral",
        {
            "sliding_window": 100,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_theta": 1e6},
        },
    ),
    "ministral 3": (
        "ministral3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 70,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 100,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 90, "pad_token_id": 0}),
    "phi3 long": (
        "phi3",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "pad_token_id": 0}),
    "olmo2": ("olmo2", UNTIED),
    "olmo3": (
        "olmo3",
        UNTIED
        | {
            "sliding_window": 80,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": YARN | {"attention_factor": 1.2},
            },
        },
    ),
}
"""name -> (Hugging Face's model type, what its config says besides sizes)."""

FILES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "llama file": (2, "llama", {}),
    "llama linear file": (2, *KINDS["llama linear"]),
    "llama yarn file": (2, "llama", {"rope_parameters": YARN}),
    "llama 3 file": (2, *KINDS["llama 3"]),
    "ministral 3 file": (2, *KINDS["ministral 3"]),
    "qwen2 file": (2, "qwen2", {}),
    "qwen3 file": (2, "qwen3", {}),
    "gemma2 file": (
        2,
        "gemma2",
        {
            "sliding_window": 70,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma3 file": (
        7,
        "gemma3_text",
        {
            "sliding_window": 100,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "phi3 file": (2, "phi3", {"pad_token_id": 0}),
    "phi3 long file": (2, *KINDS["phi3 long"]),
    "smollm3 file": (5, "smollm3", {"pad_token_id": 0}),
    "olmo2 file": (2, "olmo2", UNTIED),
    "olmo3 file": (
        5,
        "olmo3",
        UNTIED
        | {
            "sliding_window": 80,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": YARN | {"rope_theta": 1e4},
            },
        },
    ),
}
"""Models that say in GGUF what they say in Hugging Face's layout: name -> (layers, as in KINDS).

Patterns of layers are the family's own.
"""

KINDS |= {name: rest for name, (_, *rest) in FILES.items()}  # type: ignore[misc]


@dataclass(frozen=True)
class Shape:
    """A tiny model. `kind` is one of KINDS; `stored` names the type of its matrices, "mixed" Q4_1 with a Q8_0 embedding."""

    layers: int = 2
    width: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    stored: str = "F32"
    seed: int = 0
    scale: float = 1.4  # of the weights: outputs repeat themselves at times, but are not one token for ever
    kind: str = "llama"

    @classmethod
    def wide(cls, stored: str, **options: Any) -> Shape:
        """One layer whose rows fit every storage type."""
        return cls(**{"layers": 1, "width": 256, "ffn": 256, "heads": 4, "head_dim": 64, "stored": stored, **options})


def byte_tokens() -> list[str]:
    """256 bytes in byte-level code, then a begin and an end token."""
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in alphabet]
    code = {**{b: chr(b) for b in alphabet}, **{b: chr(256 + i) for i, b in enumerate(rest)}}
    return [code[b] for b in range(256)] + ["<s>", "</s>"]


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """Byte-level, without merges."""
    types = np.array([1] * 256 + [3, 3], np.int32)
    return byte_level(byte_tokens(), types, bos_id=256, add_bos=False, end_ids=[END])


def config(shape: Shape) -> dict[str, Any]:
    """The model's config.json."""
    model_type, extra = KINDS[shape.kind]
    gemma = model_type.startswith("gemma")
    if extra.get("rope_parameters", {}).get("rope_type") == "longrope":
        pairs = shape.head_dim // 4
        lists = {"short_factor": np.linspace(1, 1.5, pairs).tolist(), "long_factor": np.linspace(1, 9, pairs).tolist()}
        extra = extra | {"rope_parameters": extra["rope_parameters"] | lists}
    return {
        "model_type": model_type,
        "vocab_size": tokenizer().vocab_size,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_activation" if gemma else "hidden_act": "gelu_pytorch_tanh" if gemma else "silu",
        "bos_token_id": 256,
        "eos_token_id": END,
        **extra,
    }


def spec(shape: Shape) -> ModelSpec:
    family = of_model_type(KINDS[shape.kind][0])
    return family.from_config(JsonConfig(config(shape), Path("config.json")), tokenizer().vocab_size)


@lru_cache(maxsize=32)
def tensors(shape: Shape) -> dict[str, Any]:
    """Random weights by canonical name, as a GGUF file would hold them (norms with their offset added)."""
    rng, model = np.random.default_rng(shape.seed), spec(shape)

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (rng.standard_normal((rows, cols)) * shape.scale / cols**0.5).astype(np.float32)

    def vector(size: int, mean: float) -> np.ndarray:
        return (mean + 0.2 * rng.standard_normal(size)).astype(np.float32)

    result: dict[str, Any] = {
        "token_embd.weight": matrix(model.vocab, model.width),
        "output_norm.weight": vector(model.width, 1),
    }
    if not model.tied:
        result["output.weight"] = matrix(model.vocab, model.width)
    for i, layer in enumerate(model.layers):
        for name, size in _sizes(layer, model.width).items():
            made = matrix(*size) if len(size) == 2 else vector(*size, mean=name.endswith("weight"))
            result[f"blk.{i}.{name}"] = made
    return {name: _stored(name, value, shape.stored) for name, value in result.items()}


def _sizes(layer: LayerSpec, width: int) -> dict[str, tuple[int, ...]]:
    a = layer.attention
    sizes: dict[str, tuple[int, ...]] = {}
    if layer.fused:
        sizes |= {"attn_qkv.weight": (a.qkv_width, width), "ffn_up.weight": (2 * layer.ffn, width)}
    else:
        sizes |= {"attn_q.weight": (a.q_width, width), "attn_k.weight": (a.kv_width, width)}
        sizes |= {"attn_v.weight": (a.kv_width, width)}
        sizes |= {"ffn_gate.weight": (layer.ffn, width), "ffn_up.weight": (layer.ffn, width)}
    sizes |= {"attn_output.weight": (width, a.q_width), "ffn_down.weight": (width, layer.ffn)}
    if a.bias:
        sizes |= {"attn_q.bias": (a.q_width,), "attn_k.bias": (a.kv_width,), "attn_v.bias": (a.kv_width,)}
    if a.out_bias:
        sizes |= {"attn_output.bias": (width,)}
    if a.qk_norm:
        q, k = (a.head_dim, a.head_dim) if a.qk_norm == "head" else (a.q_width, a.kv_width)
        sizes |= {"attn_q_norm.weight": (q,), "attn_k_norm.weight": (k,)}
    if layer.pre_norms:
        sizes |= {"attn_norm.weight": (width,), "ffn_norm.weight": (width,)}
    if layer.post_norms:
        sizes |= {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
    return sizes


def _stored(name: str, value: np.ndarray, stored: str) -> Any:
    if value.ndim == 1 or stored == "F32":
        return value
    if stored == "mixed":
        stored = "Q8_0" if name == "token_embd.weight" else "Q4_1"
    kind = QuantType[stored]
    return kind, quantise(value, kind)


def values(stored: Any) -> np.ndarray:
    """The f32 values that a tensor stands for."""
    if isinstance(stored, np.ndarray):
        return stored
    kind, data = stored
    cols = data.shape[-1] // GEOMETRY[kind][1] * GEOMETRY[kind][0] if data.dtype == np.uint8 else data.shape[-1]
    return dequantise(data, kind, cols)


def loaded(shape: Shape, ops: Ops) -> Loaded:
    model = spec(shape)
    offset = model.norm_offset
    stored = {
        name: value - np.float32(offset) if offset and "norm" in name else value
        for name, value in tensors(shape).items()
    }
    weights = bind(model, MemorySource(stored), ops)
    facts = EngineFacts(
        model="tiny",
        file="",
        sha256=repr(shape),
        license="",
        architecture=model.architecture,
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


def reference_model(shape: Shape) -> Any:
    """The same model in transformers (f32, eager attention)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, _ = KINDS[shape.kind]
    settings = {key: value for key, value in config(shape).items() if key != "model_type"}
    made = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    ours = spec(shape)
    names = of_model_type(model_type).names(ours)
    state = {}
    for name, stored in tensors(shape).items():
        value = values(stored) - (ours.norm_offset if "norm" in name else 0)
        state[names[name]] = torch.from_numpy(np.ascontiguousarray(value, np.float32))
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state)
    return model
