"""The Llama family: RMS norms, grouped-query attention with rotary positions, SwiGLU. Data and wiring only.

Tensor names and metadata keys are those of the GGUF format document; query and key rows are stored for interleaved rotary pairs.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np

from power_lab.engine.models.spec import AttentionSpec, LayerWeights, ModelSpec, ModelWeights
from power_lab.engine.weights.source import WeightSource, refuse_unused
from power_lab.errors import ModelFileError
from power_lab.kernels.ops import Array, Ops, Weight
from power_lab.kernels.quants import QuantType

V = TypeVar("V", int, float, str)


class Metadata(Protocol):
    """Typed, bounded access to a model file's metadata; `GgufFile` is one."""

    def require(self, key: str, kind: type[V], low: float | None = None, high: float | None = None) -> V: ...

    def get(self, key: str, kind: type[V], default: V, low: float | None = None, high: float | None = None) -> V: ...


def spec(meta: Metadata, vocab: int) -> ModelSpec:
    """Read the topology. Raises ModelFileError naming a missing, absurd or unsupported key."""
    scaling, factor = meta.get("llama.rope.scaling.type", str, "none"), meta.get("llama.rope.scale_linear", float, 1.0)
    if scaling != "none" or factor != 1.0:  # ignored, they would make every logit wrong
        raise ModelFileError(
            f"llama.rope.scaling.type {scaling!r} with llama.rope.scale_linear {factor} is not supported.",
            "Use a model whose rotary positions are not scaled.",
        )
    heads = meta.require("llama.attention.head_count", int, 1, 1024)
    width = meta.require("llama.embedding_length", int, 1, 1 << 16)
    head_dim = meta.get("llama.attention.key_length", int, width // heads, 8, 1024)
    kv_heads = meta.get("llama.attention.head_count_kv", int, heads, 1, heads)
    rotary_dim = meta.get("llama.rope.dimension_count", int, head_dim, 2, head_dim)
    if heads % kv_heads or head_dim % 8 or rotary_dim % 2:
        raise ModelFileError(
            f"llama: {heads} heads over {kv_heads} KV heads of {head_dim} values, {rotary_dim} of them rotated, do not divide.",
            "KV heads must divide heads, 8 must divide the head size.",
        )
    attention = AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        theta=meta.get("llama.rope.freq_base", float, 10000.0, 1.0, 1e12),
        interleaved=True,
        scale=head_dim**-0.5,
    )
    return ModelSpec(
        architecture="llama",
        vocab=vocab,
        width=width,
        layers=meta.require("llama.block_count", int, 1, 1024),
        ffn=meta.require("llama.feed_forward_length", int, 1, 1 << 18),
        context=meta.require("llama.context_length", int, 1, 1 << 24),
        norm_eps=meta.require("llama.attention.layer_norm_rms_epsilon", float, 0.0, 1.0),
        attention=attention,
    )


def weights(model: ModelSpec, source: WeightSource, ops: Ops) -> ModelWeights:
    """Bind the file's tensors to the device. Raises ModelFileError naming a tensor that is missing, misshapen or left over."""
    binder = _Binder(source, ops)
    a = model.attention
    embedding = binder.matrix("token_embd.weight", model.vocab, model.width)
    layers = tuple(_layer(binder, f"blk.{i}", model, a) for i in range(model.layers))
    final_norm = binder.vector("output_norm.weight", model.width)
    head = binder.matrix("output.weight", model.vocab, model.width) if "output.weight" in source.names() else embedding
    refuse_unused(source, binder.bound)
    return ModelWeights(embedding, layers, final_norm, head, binder.bytes_by_type, binder.parameters)


def _layer(binder: _Binder, prefix: str, model: ModelSpec, a: AttentionSpec) -> LayerWeights:
    return LayerWeights(
        attn_norm=binder.vector(f"{prefix}.attn_norm.weight", model.width),
        q=binder.matrix(f"{prefix}.attn_q.weight", a.q_width, model.width),
        k=binder.matrix(f"{prefix}.attn_k.weight", a.kv_width, model.width),
        v=binder.matrix(f"{prefix}.attn_v.weight", a.kv_width, model.width),
        o=binder.matrix(f"{prefix}.attn_output.weight", model.width, a.q_width),
        ffn_norm=binder.vector(f"{prefix}.ffn_norm.weight", model.width),
        gate=binder.matrix(f"{prefix}.ffn_gate.weight", model.ffn, model.width),
        up=binder.matrix(f"{prefix}.ffn_up.weight", model.ffn, model.width),
        down=binder.matrix(f"{prefix}.ffn_down.weight", model.width, model.ffn),
    )


class _Binder:
    """Takes tensors from a source to a device and keeps the account."""

    def __init__(self, source: WeightSource, ops: Ops) -> None:
        self._source = source
        self._ops = ops
        self.bound: set[str] = set()
        self.bytes_by_type: dict[str, int] = {}
        self.parameters = 0

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        kind, host = self._source.matrix(name, rows, cols)
        self._count(name, kind, host, rows * cols)
        return self._ops.weight(kind, rows, cols, host)

    def vector(self, name: str, size: int) -> Array:
        kind, host = self._source.vector(name, size)
        self._count(name, kind, host, size)
        return self._ops.vector(kind, host)

    def _count(self, name: str, kind: QuantType, host: np.ndarray, values: int) -> None:
        self.bound.add(name)
        self.bytes_by_type[kind.name] = self.bytes_by_type.get(kind.name, 0) + host.nbytes
        self.parameters += values
