"""What the exactness probe runs for a model or a drafter: the kinds of matrices and attention that it computes with."""

from __future__ import annotations

from collections.abc import Iterable

from power_lab.engine.models.spec import AttentionSpec, LayerSpec, LayerWeights, ModelSpec, ModelWeights
from power_lab.kernels.ops import Weight
from power_lab.kernels.probe import AttentionShape, LinearShape, Shapes


def probed_shapes(spec: ModelSpec, weights: ModelWeights) -> Shapes:
    """Of a model."""
    return Shapes(
        linears=frozenset(map(linear_shape, weights.matrices())),
        attentions=frozenset(attention_shape(layer.attention) for layer in spec.layers),
        activations=frozenset(layer.activation for layer in spec.layers),
        operand=weights.head.operand,
    )


def drafter_shapes(
    linears: Iterable[LinearShape], specs: Iterable[LayerSpec], layers: Iterable[LayerWeights]
) -> Shapes:
    """Of a drafter with these matrices and layers. Its layers' gates are run as gates, and no other matrix."""
    specs, layers = tuple(specs), tuple(layers)
    return Shapes(
        linears=frozenset(linears),
        attentions=frozenset(attention_shape(spec.attention) for spec in specs),
        activations=frozenset(spec.activation for spec in specs),
        gates=frozenset(linear_shape(layer.gate) for layer in layers),
        operand=layers[0].gate.operand,
    )


def linear_shape(weight: Weight) -> LinearShape:
    return weight.type, weight.rows, weight.cols


def attention_shape(a: AttentionSpec) -> AttentionShape:
    norms = {"": (0, 0), "head": (a.head_dim, a.head_dim), "width": (a.q_width, a.kv_width)}
    return AttentionShape(a.heads, a.kv_heads, a.head_dim, a.window, a.softcap, norms[a.qk_norm])
