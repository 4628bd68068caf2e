"""The runner: the only owner of the device, its caches and its workspace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from power_lab.engine import sampler
from power_lab.engine.batch import Inputs
from power_lab.engine.graphs import Graphs
from power_lab.engine.models.decoder import Decoder, Workspace
from power_lab.engine.plan import StepPlan
from power_lab.engine.request import Request
from power_lab.engine.trace import Logprob
from power_lab.kernels.ops import BLOCK, Ops

Observer = Callable[[StepPlan, np.ndarray], None]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step's rows came to.

    Attributes:
        tokens: one draw for each sampled row, in plan order.
        logprobs: beside them, or None when nobody asked.
        forward_s, sample_s: seconds spent in the model and in drawing.
    """

    tokens: tuple[int, ...]
    logprobs: list[Logprob] | None
    forward_s: float
    sample_s: float


class Runner:
    """Executes plans.

    Args:
        model: the decoder with its weights.
        pages: KV pages, the dummy included.
        rows, sampled, spans: most rows, logit rows and spans of a step.
        context: most tokens of a sequence.
        clock: monotonic seconds.
        observer: called with each plan and its logits (f32 [Q, V], valid during the call); for tests and teaching.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        pages: int,
        rows: int,
        sampled: int,
        spans: int,
        context: int,
        clock: Callable[[], float],
        observer: Observer | None = None,
    ) -> None:
        self.model = model
        self.ops: Ops = model.ops
        self.caches = model.caches(pages)
        self.page_bytes = sum(cache.keys.nbytes + cache.values.nbytes for cache in self.caches) // pages
        self.workspace = Workspace.make(model.spec, self.ops, rows, sampled)
        self.inputs = Inputs(self.ops, rows, sampled, spans, -(-context // BLOCK))
        self.graphs = Graphs(self.ops)
        self._tokens = self.ops.empty((sampled,), "int32")
        self._clock = clock
        self.observer = observer

    def release(self) -> None:
        """Free the KV pool and what refers to it; nothing can be executed afterwards."""
        self.graphs.clear()
        self.caches = ()

    def execute(self, plan: StepPlan, requests: Mapping[int, Request]) -> Sampled:
        """Run one step: KV is written for all rows, tokens are drawn for the sampled ones. Nothing else changes."""
        start = self._clock()
        batch = self.inputs.fill(plan)
        rows, sampled = batch.ids.shape[0], batch.sampled.shape[0]
        logits = self.graphs.run(rows, sampled, lambda: self.model.forward(batch, self.caches, self.workspace))
        forwarded = self._clock()
        if self.observer is not None:
            self.observer(plan, self.ops.tohost(logits))
        if not logits.shape[0]:
            return Sampled((), None, forwarded - start, 0.0)
        tokens = self._tokens[: logits.shape[0]]
        self.ops.sample(logits, sampler.controls(plan, requests), tokens)
        logprobs = sampler.logprobs(self.ops, logits, tokens, plan, requests)
        drawn = tuple(self.ops.tohost(tokens).tolist())
        return Sampled(drawn, logprobs, forwarded - start, self._clock() - forwarded)
