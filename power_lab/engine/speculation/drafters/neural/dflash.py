"""DFlash: a few layers that draft a whole block in one pass (arXiv:2602.06036).

Hidden states of several of the target's layers, projected, stand for the context: each drafter layer computes keys and values from them.
The block is the last token, then masks; its rows read the context and each other, and the one `i` behind the last token says the token
that comes there, or (`from_anchor`) the next one, beginning with the last token's own row. With a Markov head beside it (`dspark`) the same
artifact serves both names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta

from power_lab.engine.models.decoder import Decoder, Workspace
from power_lab.engine.models.probed import drafter_shapes
from power_lab.engine.models.spec import ModelSpec, ModelWeights
from power_lab.engine.speculation.drafters import Draft, DraftAsk, Drafter
from power_lab.engine.speculation.drafters.neural import REACH, Drafting, Room
from power_lab.engine.speculation.drafters.neural import layers as llama
from power_lab.engine.speculation.drafters.neural.artifact import Artifact, Binder, Target, refused
from power_lab.engine.speculation.drafters.neural.dspark import Markov, MarkovHead
from power_lab.engine.speculation.drafters.neural.inputs import GREEDY, Block
from power_lab.engine.speculation.drafters.neural.stairs import Stairs
from power_lab.engine.speculation.drafters.neural.steps import BlockSteps, Drawing, Head, cut, drafts_of
from power_lab.kernels.ops import BLOCK, Array, Batch, Draw, KVCache, Ops

SERVES = ("dspark", "dflash")
BEHIND = "the request's last tokens are not computed yet"


class DFlashConfig(llama.LayersConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `LayersConfig`.

    Attributes:
        block_size: rows of a block, the last token's included.
        from_anchor: whether row i of a block, the last token's being 0, says the token i + 1 behind that: a draft for each row. Otherwise
            it says the token i behind, and row 0 none.
        mask_token: token id of the rows behind it.
        causal: whether a row of a block sees only those before it.
        window: keys that a row sees, its own included; 0 is all.
        markov_rank: of the Markov head; 0: there is none.
    """

    block_size: Annotated[int, Meta(ge=2, le=REACH)]
    mask_token: Annotated[int, Meta(ge=0, le=1 << 24)]
    from_anchor: bool = False
    causal: bool = True
    window: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    markov_rank: Annotated[int, Meta(ge=0, le=4096)] = 0


class DFlash:
    """The artifact, bound to its target. See `Trained`; as a network, see `Trunk`."""

    kind = "dflash"
    names = SERVES
    config_of: type[DFlashConfig] = DFlashConfig

    def __init__(self, artifact: Artifact, target: Target, context: int) -> None:
        """Raises ConfigError for key `draft` where the artifact is not sound or not for this target."""
        config, header = artifact.config(self.config_of), artifact.header
        llama.check(artifact, config)
        spec, ops = target.spec, target.ops
        if config.mask_token >= spec.vocab:
            raise refused(artifact.path, f"'config': mask_token {config.mask_token} is no token of {spec.vocab:,}")
        if (
            config.window and not config.causal
        ):  # a row's window begins at its own position, but it would be cut at the block's end
            raise refused(artifact.path, "'config': a window needs causal blocks")
        self.serves = tuple(name for name in self.names if name in header.serves)
        if set(self.serves) != set(header.serves) or ("dspark" in self.serves) != bool(config.markov_rank):
            raise refused(
                artifact.path, f"'serves' {list(header.serves)} do not fit a markov_rank of {config.markov_rank}"
            )
        self.name, self.sha256, self.config = header.name or artifact.path.stem, artifact.sha256, config
        self.vocab, self.block, self.mask, self.causal = (
            spec.vocab,
            config.block_size,
            config.mask_token,
            config.causal,
        )
        self.lead = 0 if config.from_anchor else 1
        binder = Binder(artifact, target)
        self.fc = binder.matrix("fc.weight", spec.width, len(config.taps) * spec.width)
        self.hidden_norm = binder.vector("hidden_norm.weight", spec.width)
        layers = llama.specs(config, config.window)
        weights = llama.bind(binder, layers, spec.width)
        final_norm = binder.vector("norm.weight", spec.width)
        stored = artifact.ids("draft_ids", spec.vocab)
        ids, kept = target.said(stored)
        said = spec.vocab if ids is None else len(ids)
        rows = spec.vocab if stored is None else len(stored)
        self.markov = (
            Markov.bind(binder, config.markov_rank, spec.vocab, rows, kept, spec.width) if config.markov_rank else None
        )
        self._bind_more(binder, config, spec.width, spec.vocab)
        artifact.refuse_unused()
        self.draft_ids = None if ids is None else ops.asarray(ids)
        self.subset = None if ids is None else frozenset(ids.tolist())
        head = binder.multiplied(target.head(ids))
        self.shapes = drafter_shapes(binder.linears, layers, weights)
        self.nbytes = binder.nbytes + (0 if ids is None else head.data.nbytes)
        own = ModelSpec(
            architecture=self.kind,
            vocab=said,
            embedding_rows=said,
            width=spec.width,
            context=context + REACH,
            norm_eps=spec.norm_eps,
            layers=layers,
            embedding_scale=spec.embedding_scale,
            final_softcap=spec.final_softcap,
        )
        model = ModelWeights(target.weights.embedding, weights, final_norm, head)
        self.decoder = self._made(own, model, ops, context + REACH)

    def _bind_more(self, binder: Binder, config: DFlashConfig, width: int, vocab: int) -> None:
        """Tensors of a kind that has more."""

    def _made(self, spec: ModelSpec, weights: ModelWeights, ops: Ops, positions: int) -> Decoder:
        return Decoder(spec, weights, ops, positions)

    def heads(self, steps: BlockSteps) -> dict[str, Head]:
        """What draws, by the names that it serves."""
        heads: dict[str, Head] = {"dflash": Independent(steps)}
        if self.markov is not None:
            heads["dspark"] = MarkovHead(self.markov, steps)
        return {name: heads[name] for name in self.serves}

    def workspace(self, rows: int, sampled: int) -> Workspace:
        return Workspace.make(self.decoder.spec, self.decoder.ops, rows, sampled, self.fc.operand)

    def forward(self, batch: Batch, seen: Batch, previous: Array, caches: tuple[KVCache, ...], work: Workspace) -> None:
        self.decoder.forward(batch, caches, work, seen=seen)

    def companion(self, room: Room) -> DFlashCompanion:
        return DFlashCompanion(self, room)

    def release(self) -> None:
        self.decoder.release()


class DFlashCompanion:
    """See `Companion`."""

    needs_before = False

    def __init__(self, trained: DFlash, room: Room) -> None:
        self.trained, self.serves, self.taps = trained, trained.serves, trained.config.taps
        self._decoder, self.ops = trained.decoder, trained.decoder.ops
        self._room = room
        ops, spec = self.ops, self._decoder.spec
        attention = spec.layers[0].attention
        self._features = ops.empty((room.rows, len(self.taps) * spec.width), trained.fc.operand)
        self._projected = ops.empty((room.rows, spec.width), "float32")
        self._context = ops.empty((room.rows, spec.width), trained.fc.operand)
        self._kv = ops.empty((room.rows, 2 * attention.kv_width), "float32")
        self.steps = BlockSteps(trained, room)
        self._heads = trained.heads(self.steps)
        self._drafters = {name: _drafter(name, self.steps, self._heads[name]) for name in self.serves}

    @property
    def page_bytes(self) -> int:
        return self._decoder.page_bytes

    @property
    def scratch_bytes(self) -> int:
        return self._room.scratch * self.page_bytes

    @property
    def nbytes(self) -> int:
        arrays = (self._features, self._projected, self._context, self._kv)
        own = sum(part.nbytes for part in (*arrays, *self._heads.values()))
        return own + self.steps.nbytes + self._decoder.table_bytes

    @property
    def graph_nbytes(self) -> int:
        return self.steps.graphs.nbytes

    def make_pool(self, pages: int, caches: tuple[KVCache, ...]) -> None:
        self.steps.make_pool(self._decoder.caches(pages + self._room.scratch), pages)

    def tap(self, layer: int, x: Array, delta: Array | None, post: Array | None, batch: Batch) -> None:
        column = self.taps.index(layer) * x.shape[1]
        self.ops.tap(x, delta, post, self._decoder.spec.norm_eps, self._features[: x.shape[0]], column, None)

    def observe(self, batch: Batch, drawn: Array | None) -> None:
        """Keys and values of every row, from the hidden states that were tapped."""
        ops, model, rows = self.ops, self._decoder, batch.ids.shape[0]
        eps = model.spec.norm_eps
        projected, context, kv = (array[:rows] for array in (self._projected, self._context, self._kv))
        ops.linear(self._features[:rows], (self.trained.fc,), projected)
        ops.rms_norm(projected, self.trained.hidden_norm, eps, context)
        for layer, weights, cache in zip(model.spec.layers, model.weights.layers, self.steps.caches, strict=True):
            ops.linear(context, weights.qkv[1:], kv)
            ops.rope_write(kv, batch, model.rope_table(layer.attention.rope), False, 0, cache, weights.qk_norms, eps)

    def drafter(self, name: str) -> Drafter:
        return self._drafters[name]

    def release(self) -> None:
        self.steps.release()
        for name in ("_features", "_projected", "_context", "_kv"):
            vars(self).pop(name, None)


class Independent:
    """Each token of a block is drawn by itself."""

    resumes = True

    nbytes = 0

    def __init__(self, steps: BlockSteps) -> None:
        self._ops, self._trunk = steps.ops, steps.trunk

    def draw(self, on: Drawing, draw: Draw) -> None:
        if self._trunk.draft_ids is not None:
            self._ops.scatter_columns(on.logits, self._trunk.draft_ids, on.full)
        rows = cut(on.rows, 0, on.stairs.sampled)
        self._ops.sample(on.full, rows, on.tokens, draw)

    def confidence(self, on: Drawing) -> tuple[Array, ...]:
        return self._ops.logprobs(on.full, on.tokens, 0)[:1]

    def drafts(self, fetched: Sequence[np.ndarray], stairs: Stairs, blocks: Sequence[Block]) -> list[Draft]:
        tokens, logprobs = fetched
        return drafts_of(tokens, np.exp(np.minimum(logprobs.astype(np.float64), 0.0)), stairs, blocks)


class BlockDrafter:
    """Drafts under one name. Everything that it keeps of a request lies in the target's pages."""

    def __init__(self, name: str, steps: BlockSteps, head: Head) -> None:
        self.name, self.subset = name, steps.trunk.subset
        self._steps, self._head = steps, head

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None:
        """Nothing is kept but what the target's steps write."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        ready = [ask.computed == len(ask.tokens) - 1 and len(ask.blocks) == -(-ask.computed // BLOCK) for ask in asks]
        blocks = [self._block(ask) for ask, now in zip(asks, ready, strict=True) if now]
        drafts = iter(self._steps.draft(blocks, self._head) if blocks else ())
        return [next(drafts) if now else Draft(note=BEHIND) for now in ready]

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        """The target's next step writes what is kept of these."""

    def end(self, request_id: int) -> None:
        """Its pages go where the target's go."""

    def _block(self, ask: DraftAsk) -> Block:
        width = min(ask.width, self._steps.most)
        return Block(ask.tokens[-1], ask.computed, width, ask.blocks, ask.params or GREEDY)


class ResumingDrafter(BlockDrafter):
    """One whose drafts can stay on the device. See `Resuming`."""

    @property
    def most(self) -> int:
        return self._steps.most

    @property
    def places(self) -> int:
        return self._steps.places

    def resume(self, blocks: Sequence[Block], marks: Array) -> Drafting:
        return self._steps.resume(blocks, marks, self._head)

    def light(self, request_id: int) -> bool:
        return False


def _drafter(name: str, steps: BlockSteps, head: Head) -> BlockDrafter:
    return (ResumingDrafter if head.resumes else BlockDrafter)(name, steps, head)
