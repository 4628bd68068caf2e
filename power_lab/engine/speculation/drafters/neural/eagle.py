"""An EAGLE-style assistant that has no keys and values of its own and attends to the target's, as Gemma 4's assistants do.

Reference: transformers' `gemma4_assistant` and `SinglePositionMultiTokenCandidateGenerator`. Every row is at the anchor's position p and
sees what the target has of the positions before it:
    x = embed_proj . embed(t) + hidden_proj . g; layers of queries alone; h = RMSNorm(x, norm); logits = head . h; next g = next_hidden . h,
where t is the anchor and g the target's hidden state at p - 1 for the first draft, then the drafted token and the next g.

A layer turns its queries as the target's layer whose keys it reads has turned these. A factor on a layer's output (Gemma's `layer_scalar`)
is part of the weights: what later layers add to x is divided by it. `windows` count the keys that are seen: transformers shows an assistant
one more than the target's window. Gemma's centroids only save work in the output head; here each token's logit is computed.

Kept of every position: g. The target's keys and values are there anyway.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from power_lab.engine.models.decoder import ITEMSIZE
from power_lab.engine.models.probed import drafter_shapes
from power_lab.engine.models.spec import AttentionSpec, LayerSpec, LayerWeights, ModelSpec, attention_shapes
from power_lab.engine.speculation.drafters import Drafter
from power_lab.engine.speculation.drafters.neural import Room
from power_lab.engine.speculation.drafters.neural.artifact import Artifact, Binder, Target, refused
from power_lab.engine.speculation.drafters.neural.chain import ChainDrafter, ChainSteps, Saying
from power_lab.engine.speculation.drafters.neural.layer import Layer, LayerWorkspace, rope_tables
from power_lab.engine.speculation.drafters.neural.layers import Size
from power_lab.kernels.ops import BLOCK, Activation, Array, Batch, KVCache

Keys = Annotated[int, Meta(ge=0, le=1 << 24)]


class EagleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an assistant is made of.

    Attributes:
        width, heads, ffn: of every layer; head_dim and the KV heads are the target's.
        target_layers: for each layer, the one of the target whose keys and values it reads.
        windows: for each layer, how many of the last keys it sees; 0 is all. Empty: all layers see all.
        scale: factor on q.k; 0: head_dim^-0.5.
        qk_norm: whether queries are normalised, each head by itself.
        post_norms: whether what each part adds is normalised.
        activation: of the gates.
        normed_hidden: whether g is the target's hidden state after its final norm, not before.
    """

    width: Size
    heads: Size
    ffn: Size
    target_layers: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 12)], ...], Meta(min_length=1, max_length=64)]
    windows: Annotated[tuple[Keys, ...], Meta(max_length=64)] = ()
    scale: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    qk_norm: bool = False
    post_norms: bool = False
    activation: Activation = "silu"
    normed_hidden: bool = False

    def specs(self, target: ModelSpec) -> tuple[LayerSpec, ...]:
        """Of its layers. Raises ValueError where they do not fit the target's."""
        windows = self.windows or (0,) * len(self.target_layers)
        if len(windows) != len(self.target_layers):
            raise ValueError(f"{len(windows)} windows for {len(self.target_layers)} target_layers")
        if max(self.target_layers) >= len(target.layers):
            raise ValueError(f"target_layers {list(self.target_layers)} are not all below {len(target.layers)}")
        return tuple(map(self._spec, (target.layers[at].attention for at in self.target_layers), windows))

    def _spec(self, read: AttentionSpec, window: int) -> LayerSpec:
        if self.heads % read.kv_heads:
            raise ValueError(f"{self.heads} heads are no multiple of the target's {read.kv_heads} KV heads")
        scale = self.scale or read.head_dim**-0.5
        norm = "head" if self.qk_norm else ""
        attention = AttentionSpec(self.heads, read.kv_heads, read.head_dim, scale, read.rope, window, qk_norm=norm)
        return LayerSpec(attention, self.ffn, self.activation, post_norms=self.post_norms)


class Eagle:
    """The artifact, bound to its target. See `Trained`."""

    kind = "eagle"
    serves: tuple[str, ...] = ("eagle",)

    def __init__(self, artifact: Artifact, target: Target, context: int) -> None:
        """Raises ConfigError for key `draft` where the artifact is not sound or not for this target."""
        config, spec, ops = artifact.config(EagleConfig), target.spec, target.ops
        if artifact.header.serves != self.serves:
            raise refused(artifact.path, f"'serves' {list(artifact.header.serves)} is not what its kind serves: eagle")
        try:
            specs = config.specs(spec)
        except ValueError as error:
            raise refused(artifact.path, f"'config': {error}") from None
        self.name, self.sha256 = artifact.header.name or artifact.path.stem, artifact.sha256
        self.config, self.spec, self.ops, self.embedding = config, spec, ops, target.weights.embedding
        self.final_norm = target.weights.final_norm
        binder, self.tables = Binder(artifact, target), rope_tables(ops, specs, context)
        self.embed_proj = binder.matrix("embed_proj.weight", config.width, spec.width)
        self.hidden_proj = binder.matrix("hidden_proj.weight", config.width, spec.width)
        self.layers = tuple(
            Layer(ops, one, _weights(binder, f"layers.{i}", one, config.width), self.table(one), spec.norm_eps)
            for i, one in enumerate(specs)
        )
        self.norm = binder.vector("norm.weight", config.width)
        self.next_hidden = binder.matrix("next_hidden.weight", spec.width, config.width)
        self.saying, nbytes = Saying.of(artifact, target, binder, config.width)
        artifact.refuse_unused()
        self.nbytes = binder.nbytes + nbytes
        self.shapes = drafter_shapes(binder.linears, specs, (layer.weights for layer in self.layers))

    def table(self, spec: LayerSpec) -> Array | None:
        return None if spec.attention.rope is None else self.tables[spec.attention.rope]

    def companion(self, room: Room) -> EagleCompanion:
        return EagleCompanion(self, room)

    def release(self) -> None:
        names = ("layers", "saying", "tables", "embedding", "final_norm", "norm")
        for name in (*names, "embed_proj", "hidden_proj", "next_hidden"):
            vars(self).pop(name, None)


class EagleCompanion:
    """See `Companion`, and as a network `Chain`."""

    needs_before = False
    moves = False
    first = 1

    def __init__(self, trained: Eagle, room: Room) -> None:
        self.trained, self.ops, self.saying, self._room = trained, trained.ops, trained.saying, room
        self.serves, self.taps = trained.serves, (len(trained.spec.layers),)
        specs = tuple(layer.spec for layer in trained.layers)
        self.attentions = list(attention_shapes(specs))
        self.steps = ChainSteps(self, room)
        ops, rows, width = self.ops, self.steps.most.places, trained.spec.width
        self._work = LayerWorkspace.make(ops, specs, trained.config.width, rows, trained.embedding.operand)
        self._x = ops.empty((rows, trained.config.width), "float32")
        self._wide = ops.empty((rows, width), "float32")
        self._embedded, self._hidden = (ops.empty((rows, width), trained.embedding.operand) for _ in range(2))
        tapped = room.rows if trained.config.normed_hidden else 1
        self._tapped, self._normed = (ops.empty((tapped, width), "float32") for _ in range(2))
        self._states: Array | None = None
        self._caches: tuple[KVCache, ...] = ()
        self._drafter = ChainDrafter("eagle", self.steps)

    # --- memory -------------------------------------------------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        return BLOCK * self.trained.spec.width * ITEMSIZE[self.trained.embedding.operand]

    @property
    def scratch_bytes(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        arrays = (self._x, self._wide, self._embedded, self._hidden, self._tapped, self._normed)
        own = self._work.nbytes + sum(array.nbytes for array in arrays)
        return own + self.steps.nbytes + sum(table.nbytes for table in self.trained.tables.values())

    @property
    def graph_nbytes(self) -> int:
        return self.steps.graphs.nbytes

    def make_pool(self, pages: int, caches: tuple[KVCache, ...]) -> None:
        self._states = self.ops.empty((pages * BLOCK, self.trained.spec.width), self.trained.embedding.operand)
        self._caches = tuple(caches[at] for at in self.trained.config.target_layers)

    def release(self) -> None:
        self.steps.release()
        self._states, self._caches = None, ()
        for name in ("_work", "_x", "_wide", "_embedded", "_hidden", "_tapped", "_normed"):
            vars(self).pop(name, None)

    # --- the target's step --------------------------------------------------------------------------------------------------------

    def tap(self, layer: int, x: Array, delta: Array | None, post: Array | None, batch: Batch) -> None:
        ops, eps, rows = self.ops, self.trained.spec.norm_eps, x.shape[0]
        if not self.trained.config.normed_hidden:
            ops.tap(x, delta, post, eps, self._states, 0, batch.slots)
            return
        ops.tap(x, delta, post, eps, self._tapped[:rows], 0, None)
        ops.rms_norm(self._tapped[:rows], self.trained.final_norm, eps, self._normed[:rows])
        ops.tap(self._normed[:rows], None, None, eps, self._states, 0, batch.slots)

    def observe(self, batch: Batch, drawn: Array | None) -> None:
        """All that is kept was tapped."""

    # --- drafting -----------------------------------------------------------------------------------------------------------------

    def drafter(self, name: str) -> Drafter:
        return self._drafter

    def advance(self, step: int, batch: Batch, seen: Batch, drawn: Array) -> Array:
        """The assistant once for each row; what it hands on to the next step stays in the workspace, row by row."""
        ops, trained, work, eps = self.ops, self.trained, self._work, self.trained.spec.norm_eps
        rows = batch.ids.shape[0]
        x, wide, embedded, hidden = (a[:rows] for a in (self._x, self._wide, self._embedded, self._hidden))
        h, delta = work.normed[:rows], work.delta[:rows]
        ops.embed(trained.embedding, batch.ids, wide, trained.spec.embedding_scale, drawn)
        seen = ops.group(seen, self.attentions, work.groups)
        ops.tap(wide, None, None, eps, embedded, 0, None)
        ops.linear(embedded, (trained.embed_proj,), x)
        if step == 0:
            ops.take(self._states, batch.before, hidden)
        ops.linear(hidden, (trained.hidden_proj,), delta)
        post: Array | None = None
        for layer, cache in zip(trained.layers, self._caches, strict=True):
            post = layer.run(x, post, batch, seen, cache, work)
        ops.add_rms_norm(x, delta, post, trained.norm, eps, h)
        ops.linear(h, (trained.next_hidden,), wide)
        ops.tap(wide, None, None, eps, hidden, 0, None)
        return h


def _weights(binder: Binder, at: str, layer: LayerSpec, width: int) -> LayerWeights:
    a = layer.attention
    sizes = {"gate": (layer.ffn, width), "up": (layer.ffn, width), "down": (width, layer.ffn)}
    gate, up, down = (binder.matrix(f"{at}.{name}.weight", *size) for name, size in sizes.items())
    posts = ("post_attn_norm", "post_ffn_norm")
    post = [binder.vector(f"{at}.{name}.weight", width) if layer.post_norms else None for name in posts]
    q_norm = binder.vector(f"{at}.q_norm.weight", a.head_dim) if a.qk_norm else None
    return LayerWeights(
        attn_norm=binder.vector(f"{at}.attn_norm.weight", width),
        qkv=(binder.matrix(f"{at}.q.weight", a.q_width, width),),
        qkv_bias=None,
        qk_norms=None if q_norm is None else (q_norm, q_norm),
        out=binder.matrix(f"{at}.o.weight", width, a.q_width),
        out_bias=None,
        post_attn_norm=post[0],
        ffn_norm=binder.vector(f"{at}.ffn_norm.weight", width),
        gate=gate,
        up=up,
        down=down,
        post_ffn_norm=post[1],
    )
