"""From a source's stored tensors to a device's weights: every name of the topology, and no other."""

from __future__ import annotations

import numpy as np

from power_lab.engine.models.spec import LayerSpec, LayerWeights, ModelSpec, ModelWeights
from power_lab.engine.weights.source import WeightSource, refuse_unused
from power_lab.kernels.ops import Array, Ops, Weight
from power_lab.kernels.quants import QuantType


def bind(spec: ModelSpec, source: WeightSource, ops: Ops) -> ModelWeights:
    """Bind tensors by their canonical names. Raises ModelFileError naming one that is missing, misshapen or left over."""
    binder = Binder(spec, source, ops)
    (embedding,) = binder.rows("token_embd.weight", spec.embedding_rows, spec.width, spec.vocab)
    layers = tuple(layer_weights(binder, f"blk.{i}", spec.width, layer) for i, layer in enumerate(spec.layers))
    final_norm = binder.norm("output_norm.weight", spec.width)
    head = embedding
    if "output.weight" in source.names():
        (head,) = binder.rows("output.weight", spec.embedding_rows, spec.width, spec.vocab)
    refuse_unused(source, binder.bound, spec.topology_tensors)
    return ModelWeights(embedding, layers, final_norm, head, binder.bytes_by_type, binder.parameters)


def layer_weights(binder: Binder, prefix: str, width: int, layer: LayerSpec) -> LayerWeights:
    """One layer's, by the canonical names that begin with `prefix`. Raises ModelFileError naming a tensor."""
    a = layer.attention
    q, kv = a.q_width, a.kv_width
    if layer.fused:
        qkv = binder.rows(f"{prefix}.attn_qkv.weight", a.qkv_width, width, q, kv, kv)
        gate, up = binder.rows(f"{prefix}.ffn_up.weight", 2 * layer.ffn, width, layer.ffn, layer.ffn)
    else:
        qkv = tuple(
            binder.matrix(f"{prefix}.attn_{name}.weight", rows, width)
            for name, rows in (("q", q), ("k", kv), ("v", kv))
        )
        gate, up = (binder.matrix(f"{prefix}.ffn_{name}.weight", layer.ffn, width) for name in ("gate", "up"))
    norm_sizes = (a.head_dim, a.head_dim) if a.qk_norm == "head" else (q, kv)
    norms = [f"{prefix}.attn_{name}_norm.weight" for name in ("q", "k")]
    qk_norms = tuple(map(binder.norm, norms, norm_sizes)) if a.qk_norm else None

    def norm(name: str, wanted: bool) -> Array | None:
        return binder.norm(f"{prefix}.{name}.weight", width) if wanted else None

    return LayerWeights(
        attn_norm=norm("attn_norm", layer.pre_norms),
        qkv=qkv,  # type: ignore[arg-type]
        qkv_bias=binder.biases([(f"{prefix}.attn_{n}.bias", rows) for n, rows in (("q", q), ("k", kv), ("v", kv))])
        if a.bias
        else None,
        qk_norms=qk_norms,  # type: ignore[arg-type]
        out=binder.matrix(f"{prefix}.attn_output.weight", width, q),
        out_bias=binder.biases([(f"{prefix}.attn_output.bias", width)]) if a.out_bias else None,
        post_attn_norm=norm("post_attention_norm", layer.post_norms),
        ffn_norm=norm("ffn_norm", layer.pre_norms),
        gate=gate,
        up=up,
        down=binder.matrix(f"{prefix}.ffn_down.weight", width, layer.ffn),
        post_ffn_norm=norm("post_ffw_norm", layer.post_norms),
    )


class Binder:
    """Takes tensors from a source to a device and keeps the account.

    Args:
        spec: of the model that they belong to. operand: `Weight.operand` of all matrices; by default the source's types decide.
    """

    def __init__(self, spec: ModelSpec, source: WeightSource, ops: Ops, operand: str = "") -> None:
        self._offset = spec.norm_offset
        self._source = source
        self._ops = ops
        kinds = (QuantType[kind] for kind in source.kinds() if kind in QuantType.__members__)
        self._operand = operand or ops.operand(kinds)
        self.bound: set[str] = set()
        self.bytes_by_type: dict[str, int] = {}
        self.parameters = 0

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        return self.rows(name, rows, cols, rows)[0]

    def rows(self, name: str, rows: int, cols: int, *parts: int) -> tuple[Weight, ...]:
        """A stored matrix [rows, cols] as several, of so many rows each; rows behind the last are padding."""
        kind, host = self._source.matrix(name, rows, cols)
        self._count(name, kind, host, rows * cols)
        ends = np.cumsum(parts).tolist()
        return tuple(
            self._ops.weight(kind, part, cols, host[end - part : end], self._operand)
            for part, end in zip(parts, ends, strict=True)
        )

    def norm(self, name: str, size: int) -> Array:
        vector = self._vector(name, size)
        if not self._offset:
            return vector
        return self._ops.asarray(self._ops.tohost(vector) + np.float32(self._offset))

    def biases(self, names: list[tuple[str, int]]) -> Array:
        """Several vectors as one."""
        return self._ops.asarray(np.concatenate([self._ops.tohost(self._vector(*name)) for name in names]))

    def _vector(self, name: str, size: int) -> Array:
        kind, host = self._source.vector(name, size)
        self._count(name, kind, host, size)
        return self._ops.vector(kind, host)

    def _count(self, name: str, kind: QuantType, host: np.ndarray, values: int) -> None:
        self.bound.add(name)
        self.bytes_by_type[kind.name] = self.bytes_by_type.get(kind.name, 0) + host.nbytes
        self.parameters += values
