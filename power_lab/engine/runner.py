"""The runner: the only owner of the device, its caches and its workspace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from power_lab.engine import sampler
from power_lab.engine.batch import Inputs, Layout
from power_lab.engine.graphs import Graphs
from power_lab.engine.models.decoder import Decoder, Workspace
from power_lab.engine.plan import StepPlan
from power_lab.engine.request import Request
from power_lab.engine.shapes import ResumedShape, Shape
from power_lab.engine.speculation.drafters.neural import Companion, Drafting, Resuming
from power_lab.engine.speculation.drafters.neural.inputs import Block
from power_lab.engine.trace import Logprob
from power_lab.kernels.ops import BLOCK, Array, Draw, Fetched, KVCache, Ops

Observer = Callable[[StepPlan, np.ndarray], None]

LISTS = "penalties or biases, whose lists have no fixed size"
SHAPES = 1024  # of steps that resume, of which one object each is kept
CALLED = "this device samples row by row, outside of the recorded operations"


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step's rows came to.

    Attributes:
        tokens: one draw for each sampled row, in plan order.
        logprobs: beside them, or None when nobody asked.
        forward_s, sample_s: seconds spent in the model and in drawing; where both are one captured graph, all are `forward_s`.
        drafts: of each span, those that were made on the device.
    """

    tokens: tuple[int, ...]
    logprobs: list[Logprob] | None
    forward_s: float
    sample_s: float
    drafts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A step on the device, in a shape.

    Attributes:
        fetched: its tokens, drafts that were made in it, and log-probabilities where some request asks for them.
        drafts: of each span, where those of it are in there. marked: whether the device knows where its sequences stand.
        light: whether drafts are made in it, and without a network.
    """

    plan: StepPlan
    shape: Shape
    fetched: Fetched | None
    drafts: tuple[tuple[int, ...], ...]
    with_logprobs: bool
    marked: bool
    light: bool
    forward_s: float
    sample_s: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Most of each: rows, logit rows and spans of a step, tokens of a sequence."""

    rows: int
    sampled: int
    spans: int
    context: int


class Runner:
    """Executes plans.

    Args:
        model: the decoder with its weights.
        sizes: the bounds.
        graph_bytes: budget of captured graphs. graphs: False runs every step operation by operation. buckets: as of `Graphs`.
        clock: monotonic seconds.
        observer: called with each plan and its logits (f32 [Q, V], valid during the call); for tests and teaching.
        companion: a trained drafter that rides along in every forward pass.

    Attributes:
        resumes: whether a step can go on from the one before it on the device.
    """

    def __init__(
        self,
        model: Decoder,
        sizes: Sizes,
        *,
        clock: Callable[[], float],
        graph_bytes: int,
        graphs: bool = True,
        buckets: tuple[int, ...] = (),
        observer: Observer | None = None,
        companion: Companion | None = None,
    ) -> None:
        self.companion = companion
        self.model = model
        self.ops: Ops = model.ops
        self.graphs = Graphs(self.ops, graph_bytes, graphs, buckets)
        rows, sampled = (self.graphs.coverage.cover(count) or count for count in (sizes.rows, sizes.sampled))
        pages = -(-sizes.context // BLOCK)
        self.workspace = Workspace.make(model.spec, self.ops, rows, sampled, model.weights.head.operand)
        before = companion is not None and companion.needs_before
        # An observer is told of a step's logits when it is launched, with their positions.
        self.resumes = companion is not None and self.ops.asynchronous and observer is None
        self.inputs = Inputs(self.ops, rows, sampled, sizes.spans, pages, before=before, resumes=self.resumes)
        self._marks = self.ops.empty((sizes.spans + 1, 2), "int64")
        heads = [(a.heads, a.kv_heads, a.head_dim) for a in (layer.attention for layer in model.spec.layers)]
        self.ops.reserve(rows, sampled, model.spec.vocab, heads, pages)
        self._tokens = self.ops.empty((sampled,), "int32")
        self._drawn: dict[int, Array] = {}  # the first so many of them: to cut an array takes microseconds
        self._shapes: dict[ResumedShape, ResumedShape] = {}
        self._asked = sampler.Asked.of([])  # by the last step
        self.caches: tuple[KVCache, ...] = ()
        self._clock = clock
        self.observer = observer

    @property
    def nbytes(self) -> int:
        """Activations, scratch, index arrays and tables; neither the KV pool nor graphs."""
        return self.own_nbytes + self.ops.nbytes

    @property
    def own_nbytes(self) -> int:
        """The same without scratch, which all runners of an operation table share."""
        return self.workspace.nbytes + self.inputs.nbytes + self.model.table_bytes

    def make_pool(self, pages: int) -> None:
        """Allocate the KV pool, the dummy page included, before the first step."""
        self.caches = self.model.caches(pages)
        if self.companion is not None:
            self.companion.make_pool(pages, self.caches)

    def release(self, weights: bool) -> None:
        """Free what lies on the device, of the model its weights only if they are its own; nothing can be executed afterwards."""
        self.graphs.clear()
        self.caches = ()
        if self.companion is not None:
            self.companion.release()
        for name in ("workspace", "inputs", "_tokens", "_drawn", "_marks"):
            vars(self).pop(name, None)
        if weights:
            self.model.release()

    def launch(self, plan: StepPlan, requests: Mapping[int, Request], drafter: Resuming | None = None) -> Launched:
        """Begin a step: KV is written for all rows, tokens are drawn for the sampled ones. Nothing else changes.

        A token id below 0 in the plan, -q - 1, stands for draw q of the step launched before this one. Of spans that resume, tokens and
        places are what that step comes to. drafter: makes their drafts.
        """
        start = self._clock()
        wanted = self._wanted(plan, requests)
        lists = sampler.lists(plan, requests) if wanted.listed else None
        sampled = sum([span.sampled for span in plan.spans])
        asked = self._shape(plan.rows, sampled, wanted.draw, wanted.listed)
        shape = self.graphs.cover(asked)
        layout = self.inputs.layout(shape.rows, shape.sampled)
        resumed = any(span.resumes >= 0 for span in plan.spans)
        with self.ops.step():
            drafting = self._drafting(plan, requests, drafter) if resumed else None
            drafts = _by_span(plan, drafting)
            self.inputs.fill(layout, plan, requests, lists, drafts)
            if resumed:
                asked, shape = (self._resumed(one, drafting) for one in (asked, shape))
            run = self._resume if resumed else self._run
            logits = self.graphs.run(asked, shape, lambda: run(layout, shape, drafting))
            forwarded = self._clock()
            if self.observer is not None:
                self.observer(plan, self.ops.tohost(logits[:sampled]))
            if not sampled:
                return Launched(plan, shape, None, drafts, False, False, False, forwarded - start, 0.0)
            if shape.sampling == "apart":
                self._draw_apart(layout, logits[:sampled], lists, wanted.draw)
            top = wanted.logprobs
            if sampled not in self._drawn:
                self._drawn[sampled] = self._tokens[:sampled]
            tokens = self._drawn[sampled]
            beside = () if top is None else self.ops.logprobs(logits[:sampled], tokens, top)
            fetched = self.ops.fetch(tokens, *(() if drafting is None else (drafting.tokens,)), *beside)
        marked = self.resumes and shape.sampling != "apart"
        times = (forwarded - start, self._clock() - forwarded)
        light = drafting is not None and drafting.light
        return Launched(plan, shape, fetched, drafts, top is not None, marked, light, *times)

    def collect(self, launched: Launched, requests: Mapping[int, Request]) -> Sampled:
        """Wait for a step's draws. May be called again."""
        if launched.fetched is None:
            return Sampled((), None, launched.forward_s, launched.sample_s, launched.drafts)
        tokens, *beside = launched.fetched.get()
        drafts = launched.drafts
        if any(drafts):
            made = beside.pop(0).tolist()
            drafts = tuple(tuple(max(0, made[row]) for row in rows) for rows in drafts)  # as the device takes them
        logprobs = sampler.logprobs(beside, launched.plan, requests) if launched.with_logprobs else None
        on_device = launched.fetched.seconds
        times = (on_device, 0.0) if on_device else (launched.forward_s, launched.sample_s)
        return Sampled(tuple(tokens.tolist()), logprobs, *times, drafts)

    def _wanted(self, plan: StepPlan, requests: Mapping[int, Request]) -> sampler.Asked:
        """What draws ask for: mostly what they asked for in the step before, of the same requests, whose parameters never change."""
        params = sampler.params_of(plan, requests)
        if params != self._asked.params:
            self._asked = sampler.Asked.of(params)
        return self._asked

    def _shape(self, rows: int, sampled: int, draw: Draw, listed: bool) -> Shape:
        if not sampled:
            return Shape(rows, 0, "none")
        if listed:
            return Shape(rows, sampled, "apart", LISTS)
        return Shape(rows, sampled, draw) if self.ops.asynchronous else Shape(rows, sampled, "apart", CALLED)

    def _resumed(self, shape: Shape, drafting: Drafting | None) -> ResumedShape:
        made = None if drafting is None else drafting.shape
        resumed = ResumedShape(shape.rows, shape.sampled, shape.sampling, shape.reason, made)
        if shape.reason:
            return resumed
        if len(self._shapes) >= SHAPES:
            self._shapes.clear()
        return self._shapes.setdefault(resumed, resumed)  # the same object each time is found without comparing fields

    def _drafting(self, plan: StepPlan, requests: Mapping[int, Request], drafter: Resuming | None) -> Drafting | None:
        blocks = [
            Block(0, 0, span.drafts, span.blocks, requests[span.request_id].params, span.resumes, span.request_id)
            for span in plan.spans
            if span.resumes >= 0 and span.drafts
        ]
        if not blocks:
            return None
        assert drafter is not None, "drafts are planned that nobody makes"
        return drafter.resume(blocks, self._marks)

    def _resume(self, layout: Layout, shape: Shape, drafting: Drafting | None) -> Array:
        """A step that goes on from the one before it, its drafts first."""
        if drafting is not None:
            drafting.forward()
        drafts = self._tokens if drafting is None else drafting.tokens
        assert layout.onward is not None and layout.moved is not None
        to, moved = layout.moved
        self.ops.resume(layout.batch, layout.onward, self._marks, drafts, layout.draws.positions, to)
        return self._run(moved, shape)

    def _run(self, layout: Layout, shape: Shape, _: object = None) -> Array:
        """What is captured: the forward pass, and the draws where they are part of it."""
        logits = self.model.forward(layout.batch, self.caches, self.workspace, self._tokens, self.companion)
        if shape.sampling in ("greedy", "random", "limited"):
            self.ops.sample(logits, layout.draws, self._tokens[: shape.sampled], shape.sampling)
            if layout.onward is not None:
                self.ops.mark(layout.batch, layout.onward, self._tokens, self._marks)
        return logits

    def _draw_apart(self, layout: Layout, logits: Array, lists: sampler.Lists | None, draw: Draw) -> None:
        count, rows = logits.shape[0], layout.draws
        if lists is not None:
            history, ids, values = map(self.ops.asarray, (lists.history, lists.bias_ids, lists.bias_values))
            rows = replace(rows, history=history, bias_ids=ids, bias_values=values)
        if count < rows.positions.shape[0]:  # the layout is padded
            rows = replace(rows, **{name: getattr(rows, name)[:count] for name in sampler.COLUMNS})
        self.ops.sample(logits, rows, self._tokens[:count], draw)


def _by_span(plan: StepPlan, drafting: Drafting | None) -> tuple[tuple[int, ...], ...]:
    """Of each span, where its drafts are drawn."""
    if drafting is None:
        return ((),) * len(plan.spans)
    made = iter(drafting.rows)
    return tuple(next(made) if span.resumes >= 0 and span.drafts else () for span in plan.spans)
