"""The forward pass of a decoder-only transformer, written once over the operation table."""

from __future__ import annotations

from dataclasses import dataclass

from power_lab.engine.models.spec import LayerWeights, ModelSpec, ModelWeights
from power_lab.kernels.ops import Array, Batch, KVCache, Ops


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Activations for up to `rows` rows and `sampled` logit rows, made once: kernels allocate nothing."""

    hidden: Array
    normed: Array
    delta: Array
    qkv: Array
    attended: Array
    gated: Array
    gathered: Array
    logits: Array

    @classmethod
    def make(cls, spec: ModelSpec, ops: Ops, rows: int, sampled: int) -> Workspace:
        a = spec.attention
        return cls(
            hidden=ops.empty((rows, spec.width), "float32"),
            normed=ops.empty((rows, spec.width), "float32"),
            delta=ops.empty((rows, spec.width), "float32"),
            qkv=ops.empty((rows, a.q_width + 2 * a.kv_width), "float32"),
            attended=ops.empty((rows, a.q_width), "float32"),
            gated=ops.empty((rows, spec.ffn), "float32"),
            gathered=ops.empty((sampled, spec.width), "float32"),
            logits=ops.empty((sampled, spec.vocab), "float32"),
        )

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.__slots__)


class Decoder:
    """A model on a device.

    Args:
        spec, weights: what it is.
        ops: the device's operation table.
        positions: longest context that will be run; sizes the rotary table.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, ops: Ops, positions: int) -> None:
        self.spec = spec
        self.weights = weights
        self.ops = ops
        self._rope = ops.rope_tables(positions, spec.attention.rotary_dim, spec.attention.theta)

    @property
    def table_bytes(self) -> int:
        """Bytes of the rotary tables."""
        return self._rope.nbytes

    def forward(self, batch: Batch, caches: tuple[KVCache, ...], work: Workspace) -> Array:
        """Run all rows and return logits f32 [Q, V] of the sampled ones (a view of the workspace)."""
        rows, sampled = batch.ids.shape[0], batch.sampled.shape[0]
        spec, ops, weights = self.spec, self.ops, self.weights
        x, h, delta = work.hidden[:rows], work.normed[:rows], work.delta[:rows]
        ops.embed(weights.embedding, batch.ids, x)
        ops.rms_norm(x, weights.layers[0].attn_norm, spec.norm_eps, h)
        for index, layer in enumerate(weights.layers):
            if index:
                ops.add_rms_norm(x, delta, layer.attn_norm, spec.norm_eps, h)
            self._layer(layer, caches[index], batch, work, rows)
        ops.add_rms_norm(x, delta, weights.final_norm, spec.norm_eps, h)
        gathered, logits = work.gathered[:sampled], work.logits[:sampled]
        if sampled:
            ops.gather(h, batch.sampled, gathered)
            ops.linear(gathered, (weights.head,), logits)
        return logits

    def _layer(self, layer: LayerWeights, cache: KVCache, batch: Batch, work: Workspace, rows: int) -> None:
        """Attention, then the gated feed-forward; leaves the layer's last contribution in `delta`."""
        a, ops = self.spec.attention, self.ops
        x, h, delta = work.hidden[:rows], work.normed[:rows], work.delta[:rows]
        qkv, attended, gated = work.qkv[:rows], work.attended[:rows], work.gated[:rows]
        ops.linear(h, (layer.q, layer.k, layer.v), qkv)
        ops.rope_write(qkv, batch, self._rope, a.interleaved, a.heads, cache)
        ops.attention(qkv, batch, a.heads, a.scale, cache, attended)
        ops.linear(attended, (layer.o,), delta)
        ops.add_rms_norm(x, delta, layer.ffn_norm, self.spec.norm_eps, h)
        ops.gate_up(h, layer.gate, layer.up, gated)
        ops.linear(gated, (layer.down,), delta)
