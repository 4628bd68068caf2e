"""What a model is, as data: topology and shapes. The runtime derives nothing from names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from power_lab.kernels.ops import Array, Weight


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention with rotary positions.

    Attributes:
        heads, kv_heads, head_dim: query heads, key/value heads, values per head.
        rotary_dim: leading values of a head that are rotated.
        theta: rotary base; interleaved: pairs are (2i, 2i+1), else (i, i + rotary_dim / 2).
        scale: factor on q.k.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    theta: float
    interleaved: bool
    scale: float

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        architecture: the file's name for it (for display only).
        vocab, width, layers, ffn: vocabulary, hidden width, layer count, GLU width.
        context: most positions the model was made for.
        norm_eps: epsilon of all RMS norms.
        attention: the same in every layer.
    """

    architecture: str
    vocab: int
    width: int
    layers: int
    ffn: int
    context: int
    norm_eps: float
    attention: AttentionSpec

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of f32 keys and values of one token over all layers."""
        return self.layers * 2 * self.attention.kv_width * 4


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer's weights, norms as f32 vectors."""

    attn_norm: Array
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    ffn_norm: Array
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """All weights of a model; `head` is `embedding` itself when tied. `bytes_by_type` counts stored bytes."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    head: Weight
    bytes_by_type: dict[str, int] = field(default_factory=dict)
    parameters: int = 0

    def matrices(self) -> Iterator[Weight]:
        """Every matrix that is multiplied with activations."""
        for layer in self.layers:
            yield from (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
        yield self.head
