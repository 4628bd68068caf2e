"""What a model is, as data: topology, shapes and state layout. The runtime derives nothing from names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from power_lab.engine.models.rope import Rope
from power_lab.kernels.ops import Activation, Array, Weight

QKNorm = Literal["", "head", "width"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    Attributes:
        heads, kv_heads, head_dim: query heads, key/value heads, values per head.
        scale: factor on q.k.
        rope: rotary positions of queries and keys; None leaves them as they are.
        window: keys that a query sees, itself included; 0 is all before it.
        softcap: s becomes softcap * tanh(s / softcap) after scaling; 0 is off.
        qk_norm: RMS norm of queries and keys before they are rotated: of each head, or over all heads at once ("width").
        bias, out_bias: whether the q, k, v projections, and the output projection, add a vector.
        temperature: (beta, n): queries at position p are multiplied by 1 + beta * log(1 + floor(p / n)); None is off.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    window: int = 0
    softcap: float = 0.0
    qk_norm: QKNorm = ""
    bias: bool = False
    out_bias: bool = False
    temperature: tuple[float, int] | None = None

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: attention, then a gated feed-forward, each added to the residual stream.

    Attributes:
        attention: see AttentionSpec.
        ffn: width of the gated unit; activation: of its gate.
        pre_norms, post_norms: RMS norms of each part's input, and of its output before it is added.
        fused: whether q, k, v are stored as one matrix, and gate and up as another.
    """

    attention: AttentionSpec
    ffn: int
    activation: Activation = "silu"
    pre_norms: bool = True
    post_norms: bool = False
    fused: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        architecture: the file's name for it (for display only).
        vocab, width: token ids that the model reads and draws, and hidden width.
        embedding_rows: rows of the stored embedding and head, of which the first `vocab` are used.
        context: most positions the model was made for.
        norm_eps: epsilon of all RMS norms.
        layers: one after another.
        embedding_scale: factor on embedding rows.
        final_softcap: as AttentionSpec.softcap, on the logits.
        tied: whether the file must not have an output head besides the embedding; None where it is the file's choice.
        norm_offset: added to stored norm weights (some formats store w of 1 + w).
        topology_tensors: names of tensors that were read into this spec.
    """

    architecture: str
    vocab: int
    embedding_rows: int
    width: int
    context: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    embedding_scale: float = 1.0
    final_softcap: float = 0.0
    tied: bool | None = None
    norm_offset: float = 0.0
    topology_tensors: tuple[str, ...] = ()

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of f32 keys and values of one token over all layers."""
        return sum(2 * layer.attention.kv_width * 4 for layer in self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer's weights, vectors as f32; None where the spec has none. `qkv` is the queries' alone where keys and values are others'."""

    attn_norm: Array | None
    qkv: tuple[Weight, ...]
    qkv_bias: Array | None
    qk_norms: tuple[Array, Array] | None
    out: Weight
    out_bias: Array | None
    post_attn_norm: Array | None
    ffn_norm: Array | None
    gate: Weight
    up: Weight
    down: Weight
    post_ffn_norm: Array | None


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
            yield from (*layer.qkv, layer.out, layer.gate, layer.up, layer.down)
        yield self.head


def attention_shapes(layers: Iterable[LayerSpec]) -> tuple[tuple[int, int, int], ...]:
    """(query heads, KV heads, head_dim) of these layers, each once."""
    return tuple(dict.fromkeys((a.heads, a.kv_heads, a.head_dim) for a in (layer.attention for layer in layers)))
