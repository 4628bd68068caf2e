"""Tiny models of every family as GGUF files, written by the `gguf` package as llama.cpp's converters lay them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests import tiny

ARCHITECTURE = {
    "llama": "llama",
    "ministral3": "mistral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
}
"""Hugging Face's model type -> the architecture of its GGUF files; Mistral's own are Llama files without their windows."""

INTERLEAVED = ("llama", "mistral3", "smollm3")  # converters reorder their query and key rows


def write(
    path: Path,
    shape: tiny.Shape,
    *,
    plain: bool = False,
    tokens: list[str] | None = None,
    tensors: Mapping[str, Any] | None = None,
    nextn: int = 0,
) -> None:
    """Write the model that `tiny.loaded(shape)` is; `plain` names its tokens t0, t1, ..., which are text whatever is drawn.

    tokens: the first 256 by name; with "!!" among them, the file has a merge that makes sense.
    tensors: in place of the model's. nextn: how many of the layers are stated to be for multi-token prediction.
    """
    config = tiny.config(shape)
    arch = ARCHITECTURE[config["model_type"]]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(shape.layers)
    if nextn:
        writer.add_nextn_predict_layers(nextn)
    writer.add_context_length(tiny.CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    _positions(writer, arch, config, shape)
    _vocabulary(writer, tokens or ([f"t{i}" for i in range(256)] if plain else tiny.byte_tokens()[:256]))
    for name, stored in (tiny.tensors(shape) if tensors is None else tensors).items():
        value, raw = (stored, None) if isinstance(stored, np.ndarray) else (stored[1], int(stored[0]))
        if arch in INTERLEAVED and (".attn_q." in name or ".attn_k." in name):
            heads = shape.heads if ".attn_q." in name else shape.kv_heads
            value = np.ascontiguousarray(
                value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
            )
        writer.add_tensor(name, value, raw_dtype=None if raw is None else gguf.GGMLQuantizationType(raw))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _positions(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any], shape: tiny.Shape) -> None:
    """Rotary positions, windows and caps."""
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    kind, dim = rope.get("rope_type", "default"), int(shape.head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 64))
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, dim))
    if kind == "longrope":
        for length in ("short", "long"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
        ratio, original = tiny.CONTEXT / 64, 64
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(ratio) / np.log(original))))
    if arch in ("gemma2", "gemma3", "olmo2", "phi3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _llama3_factors(rope: dict[str, Any], dim: int) -> np.ndarray:
    """What each frequency is divided by, as Llama 3.1's reference states the rule by wavelengths."""
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = (turns - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _vocabulary(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, "<s>", "</s>"])
    writer.add_token_types([1] * 256 + [3, 3])
    # Never applied where there is no token "!!"; without any, llama.cpp finds no tokenizer.
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(tiny.END)
    writer.add_add_bos_token(False)
