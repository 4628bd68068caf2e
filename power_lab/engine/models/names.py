"""The names of a model's tensors: the canonical ones, which are GGUF's, and Hugging Face's beside them."""

from __future__ import annotations

from collections.abc import Iterator

from power_lab.engine.models.spec import LayerSpec, ModelSpec

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def canonical(spec: ModelSpec) -> Iterator[str]:
    """Every tensor that a model of this topology may have; the head among them, though a file may leave it out."""
    yield from _OUTER
    for index, layer in enumerate(spec.layers):
        for part in parts(layer):
            yield f"blk.{index}.{part}"


def huggingface(spec: ModelSpec) -> dict[str, str]:
    """canonical name -> name in a Hugging Face folder, for models with norms before each part."""
    return _map(spec, _LAYER)


def sandwich(spec: ModelSpec) -> dict[str, str]:
    """The same for models with norms after each part, too."""
    return _map(spec, _SANDWICH)


def _map(spec: ModelSpec, stems: dict[str, str]) -> dict[str, str]:
    result = dict(_OUTER)
    for index, layer in enumerate(spec.layers):
        for part in parts(layer):
            stem, _, kind = part.rpartition(".")
            stored = "mlp.gate_up_proj" if layer.fused and stem == "ffn_up" else stems[stem]
            result[f"blk.{index}.{part}"] = f"model.layers.{index}.{stored}.{kind}"
    return result


def parts(layer: LayerSpec) -> Iterator[str]:
    """Names of a layer's tensors behind `blk.N.`."""
    a = layer.attention
    projections = ("attn_qkv",) if layer.fused else ("attn_q", "attn_k", "attn_v")
    yield from (f"{name}.weight" for name in projections)
    if a.bias:
        yield from ("attn_q.bias", "attn_k.bias", "attn_v.bias")
    yield "attn_output.weight"
    if a.out_bias:
        yield "attn_output.bias"
    if a.qk_norm:
        yield from ("attn_q_norm.weight", "attn_k_norm.weight")
    if layer.pre_norms:
        yield from ("attn_norm.weight", "ffn_norm.weight")
    if layer.post_norms:
        yield from ("post_attention_norm.weight", "post_ffw_norm.weight")
    yield from (f"{name}.weight" for name in (("ffn_up",) if layer.fused else ("ffn_gate", "ffn_up")))
    yield "ffn_down.weight"
