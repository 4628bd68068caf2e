"""Multi-token prediction, also called NextN: one layer that reads a token and the hidden state before it (DeepSeek-V3, arXiv:2412.19437).

Row p reads t_p and g_(p-1), the target's hidden state at the position before, and predicts the token at p + 1:
    x = embed_proj . RMSNorm(embed(t_p), enorm) + hidden_proj . RMSNorm(g_(p-1), hnorm), with g = 0 before position 0;
    x = layer(x), causal over rows 0..p; logits = head . RMSNorm(x, norm).
It goes on by itself: the row of a draft reads x of the row before in place of g. An artifact of several layers has as many heads, each with
norms and projections of its own: head k reads what head k - 1 makes of the row before, drafts the token k + 1 behind the anchor, and the
last one goes on by itself. `native.py` binds those that a checkpoint has itself.

Kept of every position: g, what each head but the last makes of it, and each head's keys and values. Implementations differ in what g is;
`normed_hidden` and `normed_chain` say so: transformers and Qwen's norm both, vLLM's DeepSeek the target's only. Most of them have no row 0,
which here is one key more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from power_lab.engine.models.decoder import ITEMSIZE
from power_lab.engine.models.probed import drafter_shapes
from power_lab.engine.models.rope import Rope
from power_lab.engine.models.spec import attention_shapes
from power_lab.engine.speculation.drafters import Drafter
from power_lab.engine.speculation.drafters.neural import Room
from power_lab.engine.speculation.drafters.neural import layers as llama
from power_lab.engine.speculation.drafters.neural.artifact import Artifact, Binder, Target, refused
from power_lab.engine.speculation.drafters.neural.chain import ChainDrafter, ChainSteps, Saying
from power_lab.engine.speculation.drafters.neural.layer import Layer, LayerWorkspace, rope_tables
from power_lab.kernels.ops import BLOCK, Array, Batch, KVCache, Weight
from power_lab.kernels.probe import LinearShape


class MtpConfig(llama.LayersConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `LayersConfig`; `layers` is the number of heads, `taps` the target's number of layers alone.

    Attributes:
        normed_hidden: whether g is the target's hidden state after its final norm, not before.
        normed_chain: whether a head hands on x after its own `norm`, not before.
    """

    normed_hidden: bool = False
    normed_chain: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The weights of one head, its layer bound to the device."""

    embedding: Weight  # the target's, unless the head has its own
    enorm: Array
    hnorm: Array
    projection: Weight  # [D, 2 D]: embed_proj beside hidden_proj
    layer: Layer
    norm: Array


class Mtp:
    """Heads, bound to their target. See `Trained`.

    Args:
        name, sha256: of the artifact. target: what they draft for.
        heads: in their order; tables: their rotations, as in `rope_tables`; saying: of all of them.
        normed_hidden, normed_chain: see `MtpConfig`.
        nbytes: of weights that are not the target's. linears: shapes of the matrices that are multiplied with activations.
    """

    kind = "mtp"
    serves: tuple[str, ...] = ("mtp",)

    def __init__(
        self,
        name: str,
        sha256: str,
        target: Target,
        heads: tuple[Head, ...],
        tables: Mapping[Rope, Array],
        saying: Saying,
        *,
        normed_hidden: bool,
        normed_chain: bool,
        nbytes: int,
        linears: Iterable[LinearShape],
    ) -> None:
        self.name, self.sha256, self.nbytes = name, sha256, nbytes
        self.spec, self.ops, self.embedding = target.spec, target.ops, target.weights.embedding
        self.final_norm = target.weights.final_norm
        self.heads, self.tables, self.saying = heads, dict(tables), saying
        self.normed_hidden, self.normed_chain = normed_hidden, normed_chain
        layers = [head.layer for head in heads]
        self.shapes = drafter_shapes(linears, [one.spec for one in layers], [one.weights for one in layers])

    @classmethod
    def of(cls, artifact: Artifact, target: Target, context: int) -> Mtp:
        """Raises ConfigError for key `draft` where the artifact is not sound or not for this target."""
        config, spec, ops = artifact.config(MtpConfig), target.spec, target.ops
        llama.check(artifact, config)
        if config.taps != (len(spec.layers),):
            raise refused(artifact.path, f"'config': taps {list(config.taps)} are not the target's last state alone")
        if artifact.header.serves != cls.serves:
            raise refused(artifact.path, f"'serves' {list(artifact.header.serves)} is not what its kind serves: mtp")
        binder, specs = Binder(artifact, target), llama.specs(config)
        weights, tables = llama.bind(binder, specs, spec.width), rope_tables(ops, specs, context)
        heads = tuple(
            _head(
                binder,
                "" if len(specs) == 1 else f"layers.{i}.",
                target.weights.embedding,
                Layer(ops, one, bound, next(iter(tables.values())), spec.norm_eps),
            )
            for i, (one, bound) in enumerate(zip(specs, weights, strict=True))
        )
        saying, nbytes = Saying.of(artifact, target, binder, spec.width)
        artifact.refuse_unused()
        return cls(
            artifact.header.name or artifact.path.stem,
            artifact.sha256,
            target,
            heads,
            tables,
            saying,
            normed_hidden=config.normed_hidden,
            normed_chain=config.normed_chain,
            nbytes=binder.nbytes + nbytes,
            linears=binder.linears,
        )

    def companion(self, room: Room) -> MtpCompanion:
        return MtpCompanion(self, room)

    def release(self) -> None:
        for name in ("heads", "saying", "tables", "embedding", "final_norm"):
            vars(self).pop(name, None)


class MtpCompanion:
    """See `Companion`, and as a network `Chain`."""

    needs_before = True
    moves = True
    first = 0

    def __init__(self, trained: Mtp, room: Room) -> None:
        self.trained, self.ops, self.saying = trained, trained.ops, trained.saying
        self.serves, self.taps = trained.serves, (len(trained.spec.layers),)
        self._room, self._heads, ops = room, trained.heads, trained.ops
        self._specs = tuple(head.layer.spec for head in trained.heads)
        self.attentions = list(attention_shapes(self._specs))
        self.steps = ChainSteps(self, room)
        rows, width = max(room.rows, self.steps.most.places), trained.spec.width
        self._work = LayerWorkspace.make(ops, self._specs, width, rows, trained.embedding.operand)
        self._x, self._read = ops.empty((rows, width), "float32"), ops.empty((rows, width), "float32")
        self._merged = ops.empty((rows, 2 * width), trained.embedding.operand)
        self._states: tuple[Array, ...] = ()
        self._caches: tuple[KVCache, ...] = ()
        self._drafter = ChainDrafter("mtp", self.steps)

    # --- memory -------------------------------------------------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        kept = len(self._heads) * self.trained.spec.width * ITEMSIZE[self.trained.embedding.operand]
        return BLOCK * (kept + sum(2 * s.attention.kv_width for s in self._specs) * ITEMSIZE[self.ops.kv_dtype])

    @property
    def scratch_bytes(self) -> int:
        return self._room.scratch * self.page_bytes

    @property
    def nbytes(self) -> int:
        own = self._work.nbytes + self._x.nbytes + self._read.nbytes + self._merged.nbytes
        return own + self.steps.nbytes + sum(table.nbytes for table in self.trained.tables.values())

    @property
    def graph_nbytes(self) -> int:
        return self.steps.graphs.nbytes

    def make_pool(self, pages: int, caches: tuple[KVCache, ...]) -> None:
        count, width = pages + self._room.scratch, self.trained.spec.width
        self._states = tuple(
            self.ops.empty((count * BLOCK, width), self.trained.embedding.operand) for _ in self._heads
        )
        self._caches = tuple(self.ops.kv_cache(count, s.attention.kv_heads, s.attention.head_dim) for s in self._specs)
        self.steps.inputs.scratch = pages

    def release(self) -> None:
        self.steps.release()
        self._states, self._caches = (), ()
        for name in ("_work", "_x", "_read", "_merged"):
            vars(self).pop(name, None)

    # --- the target's step --------------------------------------------------------------------------------------------------------

    def tap(self, layer: int, x: Array, delta: Array | None, post: Array | None, batch: Batch) -> None:
        ops, eps, rows = self.ops, self.trained.spec.norm_eps, x.shape[0]
        if not self.trained.normed_hidden:
            ops.tap(x, delta, post, eps, self._states[0], 0, batch.slots)
            return
        whole, normed = self._x[:rows], self._read[:rows]
        ops.tap(x, delta, post, eps, whole, 0, None)
        ops.rms_norm(whole, self.trained.final_norm, eps, normed)
        ops.tap(normed, None, None, eps, self._states[0], 0, batch.slots)

    def observe(self, batch: Batch, drawn: Array | None) -> None:
        """Keys and values of every row and head, and of all heads but the last what the next one reads."""
        seen = self._grouped(batch) if len(self._heads) > 1 else batch
        for at, head in enumerate(self._heads):
            x = self._enter(head, at, batch, drawn)
            if at + 1 < len(self._heads):
                self._finish(head, x, batch, seen, self._caches[at], self._states[at + 1])
            else:
                head.layer.keep(x, batch, self._caches[at], self._work, whole=True)

    # --- drafting -----------------------------------------------------------------------------------------------------------------

    def drafter(self, name: str) -> Drafter:
        return self._drafter

    def advance(self, step: int, batch: Batch, seen: Batch, drawn: Array) -> Array:
        """The row of draft `step` in every head that has not drafted yet; the first of these drafts."""
        last, seen = len(self._heads) - 1, self._grouped(seen)
        drafting = min(step, last)
        if last == 0 and not self.trained.normed_chain:  # the row before is still in the workspace
            head = self._heads[0]
            x = self._enter(head, 0, batch, drawn, self._x if step else None)
            return self._finish(head, x, batch, seen, self._caches[0], None)
        for at in range(last, drafting, -1):
            self._row(at, self._states[min(at + 1, last)] if at < last else None, batch, seen, drawn)
        # The one that drafts comes last: its hidden state stays in the workspace. No head reads what another has made of the same row.
        return self._row(drafting, self._states[min(drafting + 1, last)], batch, seen, drawn)

    def _grouped(self, batch: Batch) -> Batch:
        return self.ops.group(batch, self.attentions, self._work.groups)

    def _row(self, at: int, states: Array | None, batch: Batch, seen: Batch, drawn: Array) -> Array:
        head = self._heads[at]
        return self._finish(head, self._enter(head, at, batch, drawn), batch, seen, self._caches[at], states)

    def _enter(self, head: Head, at: int, batch: Batch, drawn: Array | None, before: Array | None = None) -> Array:
        """What enters a head's layer, in the workspace. before: the rows' states, where they are not in the head's table."""
        ops, trained, rows = self.ops, self.trained, batch.ids.shape[0]
        x, merged = self._x[:rows], self._merged[:rows]
        states, index = (self._states[at], batch.before) if before is None else (before, None)
        assert batch.before is not None
        ops.merge(
            head.embedding, batch.ids, trained.spec.embedding_scale, drawn, head.enorm, states, index, head.hnorm,
            trained.spec.norm_eps, merged,
        )  # fmt: skip
        ops.linear(merged, (head.projection,), x)
        return x

    def _finish(self, head: Head, x: Array, batch: Batch, seen: Batch, cache: KVCache, states: Array | None) -> Array:
        """Run a head's layer, hand on what it makes of the rows by writing it to their slots in `states`, and return its norm."""
        ops, eps, rows, delta = self.ops, self.trained.spec.norm_eps, x.shape[0], self._work.delta[: x.shape[0]]
        post = head.layer.run(x, None, batch, seen, cache, self._work, whole=True)
        normed, h = self._read[:rows], self._work.normed[:rows]
        if states is None or not self.trained.normed_chain:
            ops.add_rms_norm(x, delta, post, head.norm, eps, h)
            if states is not None:
                ops.tap(x, None, None, eps, states, 0, batch.slots)
            return h
        ops.add_rms_norm(x, delta, post, head.norm, eps, normed)
        ops.tap(normed, None, None, eps, states, 0, batch.slots)
        ops.tap(normed, None, None, eps, h, 0, None)
        return h


def _head(binder: Binder, at: str, embedding: Weight, layer: Layer) -> Head:
    width = layer.weights.out.rows
    return Head(
        embedding=embedding,
        enorm=binder.vector(f"{at}enorm.weight", width),
        hnorm=binder.vector(f"{at}hnorm.weight", width),
        projection=binder.beside([f"{at}embed_proj.weight", f"{at}hidden_proj.weight"], width, width),
        layer=layer,
        norm=binder.vector(f"{at}norm.weight", width),
    )
