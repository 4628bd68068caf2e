"""The forward pass of a decoder-only transformer, written once over the operation table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from power_lab.engine.models.rope import Rope
from power_lab.engine.models.spec import ModelSpec, ModelWeights, attention_shapes
from power_lab.kernels.ops import BLOCK, Array, Batch, KVCache, Ops

if TYPE_CHECKING:
    from power_lab.engine.speculation.drafters.neural import Companion

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Activations for up to `rows` rows and `sampled` logit rows, made once: kernels allocate nothing.

    The widths of `qkv`, `attended` and `gated` may differ by layer: they are flat, and each layer takes what it needs.
    """

    hidden: Array
    normed: Array
    delta: Array
    qkv: Array
    attended: Array
    gated: Array
    gathered: Array
    logits: Array
    groups: Array

    @classmethod
    def make(cls, spec: ModelSpec, ops: Ops, rows: int, sampled: int, operand: str) -> Workspace:
        """operand: `Weight.operand` of the model's matrices."""
        widest = [
            max(sizes)
            for sizes in zip(*((x.attention.qkv_width, x.attention.q_width, x.ffn) for x in spec.layers), strict=True)
        ]
        return cls(
            hidden=ops.empty((rows, spec.width), "float32"),
            normed=ops.empty((rows, spec.width), operand),
            delta=ops.empty((rows, spec.width), "float32"),
            qkv=ops.empty((rows * widest[0],), "float32"),
            attended=ops.empty((rows * widest[1],), operand),
            gated=ops.empty((rows * widest[2],), operand),
            gathered=ops.empty((sampled, spec.width), operand),
            logits=ops.empty((sampled, spec.vocab), "float32"),
            groups=ops.empty((len(attention_shapes(spec.layers)) * (rows + 1),), "int32"),
        )

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.__slots__)


class Decoder:
    """A model on a device.

    Args:
        spec, weights: what it is.
        ops: the device's operation table.
        positions: longest context that will be run; sizes the rotary tables and, where a model has two, chooses between them.
    """

    def __init__(self, spec: ModelSpec, weights: ModelWeights, ops: Ops, positions: int) -> None:
        self.spec = spec
        self.weights = weights
        self.ops = ops
        self._tables: dict[Rope, Array] = {}
        self._temperatures: dict[tuple[float, int], Array] = {}
        for a in (layer.attention for layer in spec.layers):
            if a.rope is not None and a.rope not in self._tables:
                turn = a.rope.within(positions)
                self._tables[a.rope] = ops.rope_tables(positions, turn.frequencies, turn.magnitude)
            if a.temperature is not None and a.temperature not in self._temperatures:
                self._temperatures[a.temperature] = ops.asarray(_temperature(positions, *a.temperature))
        self._layers = list(zip(spec.layers, weights.layers, strict=True))
        self._attentions = attention_shapes(spec.layers)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables that are indexed by position."""
        return sum(table.nbytes for tables in (self._tables, self._temperatures) for table in tables.values())

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page over all layers."""
        values = sum(2 * layer.attention.kv_width for layer in self.spec.layers) * BLOCK
        return values * ITEMSIZE[self.ops.kv_dtype]

    def release(self) -> None:
        """Let go of weights and tables; nothing can be run afterwards."""
        vars(self).pop("weights", None)
        self._layers.clear()
        self._tables.clear()
        self._temperatures.clear()

    def rope_table(self, rope: Rope | None) -> Array | None:
        """Of one of its layers' ropes."""
        return None if rope is None else self._tables[rope]

    def caches(self, pages: int) -> tuple[KVCache, ...]:
        """Key and value pages of every layer."""
        shapes = ((layer.attention.kv_heads, layer.attention.head_dim) for layer in self.spec.layers)
        return tuple(self.ops.kv_cache(pages, *shape) for shape in shapes)

    def forward(
        self,
        batch: Batch,
        caches: tuple[KVCache, ...],
        work: Workspace,
        drawn: Array | None = None,
        companion: Companion | None = None,
        seen: Batch | None = None,
    ) -> Array:
        """Run all rows and return logits f32 [Q, V] of the sampled ones (a view of the workspace).

        drawn: int32, the tokens of the step before, for ids below 0 as in `Ops.embed`.
        companion: reads the hidden states that it taps, and changes none of them.
        seen: the batch with the positions up to which rows attend, where these are not their own.
        """
        taps = () if companion is None else companion.taps
        rows, sampled = batch.ids.shape[0], batch.sampled.shape[0]
        spec, ops, weights, eps = self.spec, self.ops, self.weights, self.spec.norm_eps
        x, h, delta = work.hidden[:rows], work.normed[:rows], work.delta[:rows]
        ops.embed(weights.embedding, batch.ids, x, spec.embedding_scale, drawn)
        grouped = ops.group(seen or batch, self._attentions, work.groups)
        post: Array | None = None  # norm of what the part before has left in delta
        left = delta  # or its parts, which the norm behind adds up
        for index, (_, w) in enumerate(self._layers):
            if index:
                ops.add_rms_norm(x, left, post, w.attn_norm, eps, h)
            elif w.attn_norm is not None:
                ops.rms_norm(x, w.attn_norm, eps, h)
            if companion is not None and index in taps:
                companion.tap(index, x, None, None, batch)
            source = x if w.attn_norm is None else h
            left = self._left(delta)
            self._attend(index, batch, grouped, caches[index], work, source, left)
            ops.add_rms_norm(x, left, w.post_attn_norm, w.ffn_norm, eps, h)
            left = delta if index + 1 == len(self._layers) else self._left(delta)  # the last is read by companions, too
            self._feed(index, work, x if w.ffn_norm is None else h, left)
            post = w.post_ffn_norm
        if companion is not None:
            if len(self._layers) in taps:
                companion.tap(len(self._layers), x, delta, post, batch)
            companion.observe(batch, drawn)
        gathered, logits = work.gathered[:sampled], work.logits[:sampled]
        if sampled:
            ops.gather_rms_norm(x, delta, post, weights.final_norm, eps, batch.sampled, gathered)
            ops.linear(gathered, (weights.head,), logits)
            if spec.final_softcap:
                ops.softcap(logits, spec.final_softcap)
        return logits

    def _left(self, out: Array) -> Array:
        """What a part leaves to the norm behind it: `out`, or its parts, where nothing else reads it."""
        return self.ops.parts(out)

    def _attend(
        self, index: int, batch: Batch, seen: Batch, cache: KVCache, work: Workspace, x: Array, out: Array
    ) -> None:
        """out, or its parts = the attention part's contribution for input x; keys and values are written to the cache first."""
        ops, rows = self.ops, x.shape[0]
        layer, w = self._layers[index]
        a = layer.attention
        qkv, attended = _view(work.qkv, rows, a.qkv_width), _view(work.attended, rows, a.q_width)
        made = ops.parts(qkv)
        ops.linear(x, w.qkv, made, w.qkv_bias)
        interleaved = a.rope is not None and a.rope.interleaved
        ops.rope_write(
            made, batch, self.rope_table(a.rope), interleaved, a.heads, cache, w.qk_norms, self.spec.norm_eps
        )
        temperature = None if a.temperature is None else self._temperatures[a.temperature]
        ops.attention(qkv, seen, a.heads, a.scale, cache, attended, a.window, a.softcap, temperature)
        ops.linear(attended, (w.out,), out, w.out_bias)

    def _feed(self, index: int, work: Workspace, x: Array, out: Array) -> None:
        """out, or its parts = the feed-forward part's contribution for input x."""
        layer, w = self._layers[index]
        gated = _view(work.gated, x.shape[0], layer.ffn)
        self.ops.gate_up(x, w.gate, w.up, gated, layer.activation)
        self.ops.linear(gated, (w.down,), out)


def _view(flat: Array, rows: int, width: int) -> Array:
    return flat[: rows * width].reshape(rows, width)


def _temperature(positions: int, beta: float, step: int) -> np.ndarray:
    """1 + beta * log(1 + floor(p / step)) for each position."""
    return (1 + beta * np.log1p(np.arange(positions) // step)).astype(np.float32)
