"""A llama-like layer of a drafter on the device, in the two ways that drafters run it: whole, or for its keys and values alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from power_lab.engine.models.rope import Rope
from power_lab.engine.models.spec import LayerSpec, LayerWeights, attention_shapes
from power_lab.engine.speculation.drafters.neural import REACH
from power_lab.kernels.ops import Array, Batch, KVCache, Ops


@dataclass(frozen=True, slots=True, eq=False)
class LayerWorkspace:
    """Activations of up to `rows` rows. `qkv`, `attended` and `gated` are flat, as widths may differ by layer."""

    normed: Array
    delta: Array
    qkv: Array
    attended: Array
    gated: Array
    groups: Array

    @classmethod
    def make(cls, ops: Ops, layers: tuple[LayerSpec, ...], width: int, rows: int, operand: str) -> LayerWorkspace:
        attentions = [layer.attention for layer in layers]
        return cls(
            normed=ops.empty((rows, width), operand),
            delta=ops.empty((rows, width), "float32"),
            qkv=ops.empty((rows * max(a.qkv_width for a in attentions),), "float32"),
            attended=ops.empty((rows * max(a.q_width for a in attentions),), operand),
            gated=ops.empty((rows * max(layer.ffn for layer in layers),), operand),
            groups=ops.empty((len(attention_shapes(layers)) * (rows + 1),), "int32"),
        )

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.__slots__)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer with its rotary table f32 [positions, pairs, 2] (None: no rotation)."""

    ops: Ops
    spec: LayerSpec
    weights: LayerWeights
    table: Array | None
    eps: float

    def keep(self, x: Array, batch: Batch, cache: KVCache, work: LayerWorkspace, *, whole: bool = False) -> None:
        """x += work.delta unless x is `whole`, then write its keys and values to the rows' slots. x f32 [R, D]."""
        a, w, rows = self.spec.attention, self.weights, x.shape[0]
        h, kv = work.normed[:rows], flat(work.qkv, rows, 2 * a.kv_width)
        bias = None if w.qkv_bias is None else w.qkv_bias[a.q_width :]
        self._enter(x, None, work, whole)
        made = self.ops.parts(kv)
        self.ops.linear(h, w.qkv[1:], made, bias)
        self.ops.rope_write(made, batch, self.table, self._interleaved, 0, cache, w.qk_norms, self.eps)

    def run(
        self,
        x: Array,
        post: Array | None,
        batch: Batch,
        seen: Batch,
        cache: KVCache,
        work: LayerWorkspace,
        *,
        whole: bool = False,
    ) -> Array | None:
        """x += work.delta, normed by `post` if there is one, unless x is `whole`; then all that the layer makes of x f32 [R, D]. What its
        feed-forward part would add is left in work.delta, and the norm of it, or None, is returned.

        seen: the batch with the positions up to which rows attend, grouped as `Ops.group` does it.
        """
        ops, a, w, eps, rows = self.ops, self.spec.attention, self.weights, self.eps, x.shape[0]
        h, delta = work.normed[:rows], work.delta[:rows]
        qkv, attended = flat(work.qkv, rows, sum(weight.rows for weight in w.qkv)), flat(work.attended, rows, a.q_width)
        gated = flat(work.gated, rows, self.spec.ffn)
        self._enter(x, post, work, whole)
        made = ops.parts(qkv)
        ops.linear(h, w.qkv, made, w.qkv_bias)
        ops.rope_write(made, batch, self.table, self._interleaved, a.heads, cache, w.qk_norms, eps)
        ops.attention(qkv, seen, a.heads, a.scale, cache, attended, a.window, a.softcap)
        added = ops.parts(delta)
        ops.linear(attended, (w.out,), added, w.out_bias)
        ops.add_rms_norm(x, added, w.post_attn_norm, w.ffn_norm, eps, h)
        ops.gate_up(h, w.gate, w.up, gated, self.spec.activation)
        ops.linear(gated, (w.down,), delta)
        return w.post_ffn_norm

    def _enter(self, x: Array, post: Array | None, work: LayerWorkspace, whole: bool) -> None:
        rows, norm = x.shape[0], self.weights.attn_norm
        if whole:
            self.ops.rms_norm(x, norm, self.eps, work.normed[:rows])
        else:
            self.ops.add_rms_norm(x, work.delta[:rows], post, norm, self.eps, work.normed[:rows])

    @property
    def _interleaved(self) -> bool:
        rope = self.spec.attention.rope
        return rope is not None and rope.interleaved


def rope_tables(ops: Ops, specs: Iterable[LayerSpec], context: int) -> dict[Rope, Array]:
    """Of each rotation, as the target has it for such a context, and as far as a draft may reach beyond."""
    turns = {spec.attention.rope: spec.attention.rope.within(context) for spec in specs if spec.attention.rope}
    return {rope: ops.rope_tables(context + REACH, turn.frequencies, turn.magnitude) for rope, turn in turns.items()}


def flat(values: Array, rows: int, width: int) -> Array:
    """[rows, width] in the first values of an array."""
    return values[: rows * width].reshape(rows, width)
