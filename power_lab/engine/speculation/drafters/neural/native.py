"""The layers for multi-token prediction that a checkpoint has itself (`models/nextn.py`), as the drafter `mtp`: no file beside the model's.

They share with the target's layers what trained ones do not have (biases, rotations, windows, caps, how they are stored), and may have an
embedding, or a single one an output head, of their own.
"""

from __future__ import annotations

import numpy as np

from power_lab.engine.models.bind import Binder, layer_weights
from power_lab.engine.models.nextn import NextN
from power_lab.engine.models.probed import linear_shape
from power_lab.engine.models.spec import LayerSpec
from power_lab.engine.speculation.drafters.neural.artifact import Target
from power_lab.engine.speculation.drafters.neural.chain import Saying
from power_lab.engine.speculation.drafters.neural.layer import Layer, rope_tables
from power_lab.engine.speculation.drafters.neural.mtp import Head, Mtp
from power_lab.errors import ModelFileError
from power_lab.kernels.ops import Array, Weight

NAME = "nextn"


def bind(nextn: NextN, target: Target, context: int) -> tuple[Mtp | None, str]:
    """The drafter, or None, and what it is or why there is none: the model runs without it.

    context: longest request in tokens.
    """
    count = len(nextn.layers)
    what = f"the {'NextN layer' if count == 1 else f'{count} NextN layers'} in the model's own files"
    if nextn.fault:
        return None, f"{what} cannot draft: {nextn.fault}"
    try:
        return _bound(nextn, target, context), f"is {what}" if count == 1 else f"are {what}"
    except ModelFileError as error:
        return None, f"{what} cannot draft: {error.message.removesuffix('.')}"


def _bound(nextn: NextN, target: Target, context: int) -> Mtp:
    """Raises ModelFileError naming a tensor that is missing, misshapen or in no form that is computed on."""
    parts = _Parts(nextn, target)
    tables = rope_tables(target.ops, nextn.layers, context)
    heads = tuple(
        parts.head(k, layer, None if layer.attention.rope is None else tables[layer.attention.rope])
        for k, layer in enumerate(nextn.layers)
    )
    saying = parts.saying()
    matrices = [saying.head, *(matrix for head in heads for matrix in _matrices(head))]
    return Mtp(
        NAME,
        target.sha256,
        target,
        heads,
        tables,
        saying,
        normed_hidden=nextn.normed_hidden,
        normed_chain=nextn.normed_chain,
        nbytes=parts.nbytes,
        linears=set(map(linear_shape, matrices)),
    )


class _Parts:
    """The parts of one checkpoint's heads on the target's device."""

    def __init__(self, nextn: NextN, target: Target) -> None:
        self._nextn, self._target, self._stored = nextn, target, frozenset(nextn.source.names())
        self.binder = Binder(target.spec, nextn.source, target.ops, target.operand)
        self.made = 0

    @property
    def nbytes(self) -> int:
        return self.made + sum(self.binder.bytes_by_type.values())

    def head(self, k: int, layer: LayerSpec, table: Array | None) -> Head:
        target, spec, at = self._target, self._target.spec, f"blk.{self._nextn.first + k}"
        weights = layer_weights(self.binder, at, spec.width, layer)
        own = self._own(f"{at}.nextn.embed_tokens.weight", "token_embd.weight")
        norm = f"{at}.nextn.shared_head_norm.weight"
        return Head(
            embedding=own or target.weights.embedding,
            enorm=self.binder.norm(f"{at}.nextn.enorm.weight", spec.width),
            hnorm=self.binder.norm(f"{at}.nextn.hnorm.weight", spec.width),
            projection=self._projection(f"{at}.nextn.eh_proj.weight"),
            layer=Layer(target.ops, layer, weights, table, spec.norm_eps),
            # llama.cpp, too, takes the model's where a file has none
            norm=self.binder.norm(norm, spec.width) if norm in self._stored else target.weights.final_norm,
        )

    def saying(self) -> Saying:
        """By an output head of their own, if there is a single layer with one."""
        target, spec = self._target, self._target.spec
        names = [f"blk.{self._nextn.first + k}.nextn.shared_head_head.weight" for k in range(len(self._nextn.layers))]
        ids, kept = target.said(None)
        own = [self._own(name, target.head_name, kept) for name in names]
        if len(own) > 1 and any(own):
            raise ModelFileError(
                f"Tensor {names[0]!r}: several layers with output heads of their own are not supported."
            )
        if ids is None:
            return Saying(own[0] or target.weights.head, spec.final_softcap, spec.vocab, None, None)
        head = own[0]
        if head is None:
            head = target.head(ids)
            self.made += head.data.nbytes
        return Saying(head, spec.final_softcap, spec.vocab, target.ops.asarray(ids), frozenset(ids.tolist()))

    def _own(self, name: str, shared: str, kept: np.ndarray | None = None) -> Weight | None:
        """A table of tokens that is not a copy of the target's, of these rows (None: all); None where it is, or where there is none."""
        spec, source = self._target.spec, self._nextn.source
        if name not in self._stored:
            return None
        kind, host = source.matrix(name, spec.embedding_rows, spec.width)
        if self._target.holds(shared, kind, host):
            return None
        if kept is None:
            return self.binder.rows(name, spec.embedding_rows, spec.width, spec.vocab)[0]
        rows = np.ascontiguousarray(host[kept])
        self.made += rows.nbytes
        return self._target.ops.weight(kind, len(rows), spec.width, rows, self._target.operand)

    def _projection(self, name: str) -> Weight:
        """[D, 2 D], the embedding's part first."""
        target, width = self._target, self._target.spec.width
        if not self._nextn.hidden_first:
            return self.binder.matrix(name, width, 2 * width)
        kind, host = self._nextn.source.matrix(name, width, 2 * width)  # of plain values: only folders have this order
        self.made += host.nbytes
        return target.ops.weight(kind, width, 2 * width, np.roll(host, width, axis=1), target.operand)


def _matrices(head: Head) -> tuple[Weight, ...]:
    w = head.layer.weights
    return (head.projection, *w.qkv, w.out, w.gate, w.up, w.down)
