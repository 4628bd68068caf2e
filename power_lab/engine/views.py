"""Snapshots and trace events made from the engine's state. Everything here only reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from power_lab.engine.blocks import DUMMY, BlockPool
from power_lab.engine.config import OWNERS, EngineConfig
from power_lab.engine.graphs import KEPT_ROWS
from power_lab.engine.loader import Loaded
from power_lab.engine.memory import PoolPlan
from power_lab.engine.plan import Span, StepPlan
from power_lab.engine.prefix import BLOCK_TOKENS
from power_lab.engine.report import Decision, EngineStatus, MemoryPlan
from power_lab.engine.request import Controlling, Request
from power_lab.engine.runner import Runner
from power_lab.engine.scheduler import Outcome, Scheduler
from power_lab.engine.speculation.drafters.neural import Companion
from power_lab.engine.speculation.metrics import Metrics
from power_lab.engine.speculation.rollback import Replayed
from power_lab.engine.speculation.transaction import Proposal
from power_lab.engine.trace import BlockState, Logprob, Round, Step


@dataclass(slots=True)
class Totals:
    """Counts since the engine started."""

    steps: int = 0
    requests: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    passes: int = 0  # rounds of the target that gave tokens
    preempted: int = 0
    last_step: float | None = None
    speculated: dict[str, Metrics] = field(default_factory=dict)  # by drafter

    def count(self, plan: StepPlan, outcomes: Sequence[Outcome], now: float) -> None:
        self.steps += 1
        self.tokens += sum(len(outcome.emitted) for outcome in outcomes)
        self.drafted += sum(span.drafts for span in plan.spans)
        self.accepted += sum(outcome.accepted for outcome in outcomes)
        self.passes += sum(1 for outcome in outcomes if outcome.emitted)
        self.preempted += len(plan.preempted)
        self.last_step = now

    def count_speculation(self, drafter: str, step: Step, round_: Round | None) -> None:
        if drafter != "off":
            self.speculated.setdefault(drafter, Metrics()).add(step, round_)

    def status(self, scheduler: Scheduler, now: float) -> EngineStatus:
        pool = scheduler.pool
        return EngineStatus(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            steps=self.steps,
            requests=self.requests,
            tokens=self.tokens,
            drafted=self.drafted,
            accepted=self.accepted,
            cached_tokens=self.cached_tokens,
            prompt_tokens=self.prompt_tokens,
            free_blocks=pool.free,
            cached_blocks=pool.cached,
            used_blocks=pool.used,
            last_step_s=-1.0 if self.last_step is None else now - self.last_step,
        )


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the trace events of all requests of a step have in common, counted once.

    Attributes:
        step, rows, requests: number, rows and spans of the step.
        times: forward, sample and commit seconds.
        common: fields of `Step`.
    """

    step: int
    rows: int
    requests: int
    times: tuple[float, float, float]
    common: dict[str, Any]

    @classmethod
    def of(cls, plan: StepPlan, load: dict[str, int], times: tuple[float, float, float], wall_s: float) -> StepFacts:
        """`load` is from after the step's planning."""
        rows: Counter[str] = Counter()
        for span in plan.spans:
            rows[span.phase] += span.rows
        phases = {f"{phase}_rows": rows[phase] for phase in ("prefill", "decode", "verify")}
        common = {"step": plan.step, "preempted": len(plan.preempted), "wall_s": wall_s, **phases, **load}
        return cls(plan.step, rows.total(), len(plan.spans), times, common)

    def step_of(self, span: Span, at: float) -> Step:
        """The trace event of a step, for the request of one of its spans."""
        return Step(own_rows=span.rows, at=at, **self.common)


def round_of(
    shared: StepFacts,
    span: Span,
    outcome: Outcome,
    proposal: Proposal | None,
    at: float,
    logprobs: Sequence[Logprob],
    replayed: Replayed | None = None,
) -> Round | None:
    """The trace event of a sampled span; None for rows inside a prompt and where nothing could be drawn."""
    if not outcome.emitted:
        return None
    drafted = span.tokens[span.rows - span.drafts :]
    return Round(
        step=shared.step,
        start=span.start + span.rows - span.drafts,
        drafted=drafted,
        accepted=outcome.accepted,
        emitted=outcome.emitted,
        rows=shared.rows,
        requests=shared.requests,
        draft_s=proposal.seconds if proposal is not None else 0.0,
        forward_s=shared.times[0],
        sample_s=shared.times[1],
        commit_s=shared.times[2],
        at=at,
        logprobs=tuple(logprobs),
        note=proposal.told(drafted) if proposal is not None else "",
        width=proposal.width if proposal is not None else -1,
        why=proposal.why if proposal is not None else "",
        reachable=proposal.reach(outcome.emitted) if proposal is not None else -1,
        resumed=proposal is not None and proposal.resumed and bool(drafted),
        light=proposal is not None and proposal.light and bool(drafted),
        replays=replayed.passes if replayed is not None else 0,
        replay_s=replayed.seconds if replayed is not None else 0.0,
        drafter=proposal.drafter if proposal is not None and drafted else "",
    )


def load_of(scheduler: Scheduler) -> dict[str, int]:
    """Requests and blocks as they are now, by the names of `Step`'s fields."""
    pool = scheduler.pool
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "free_blocks": pool.free,
        "cached_blocks": pool.cached,
        "used_blocks": pool.used,
    }


def blocks(pool: BlockPool, requests: Sequence[Request]) -> tuple[BlockState, ...]:
    """Every block with its owners; `tokens` counts committed tokens in it."""
    owners: dict[int, list[int]] = {}
    filled: dict[int, int] = {}
    for request in requests:
        for index, block in enumerate(request.blocks):
            owners.setdefault(block, []).append(request.id)
            filled[block] = max(filled.get(block, 0), min(BLOCK_TOKENS, request.computed - index * BLOCK_TOKENS))
    return tuple(_block(pool, i, tuple(owners.get(i, ())), filled.get(i, 0)) for i in range(pool.total))


def _block(pool: BlockPool, block_id: int, owners: tuple[int, ...], filled: int) -> BlockState:
    block = pool[block_id]
    if block_id == DUMMY:
        state = "dummy"
    elif block.refs > 1:
        state = "shared"
    elif block.refs:
        state = "used"
    else:
        state = "free" if block.digest is None else "cached"
    parent = pool.lookup(block.parent) if block.parent is not None else None
    return BlockState(
        id=block_id,
        state=state,
        refs=block.refs,
        hash="" if block.digest is None else block.digest.hex(),
        owners=owners,
        tokens=BLOCK_TOKENS if block.digest is not None else filled,
        parent=-1 if parent is None else parent,
        depth=block.depth,
    )


def memory(
    loaded: Loaded,
    runner: Runner,
    draft: Runner | None,
    pool: PoolPlan,
    resident: int,
    companion: Companion | None = None,
) -> MemoryPlan:
    """Bytes of model and drafter together; `draft` is the draft model's runner."""
    page_bytes = pool.nbytes // pool.pages
    weights = sum(loaded.facts.quantisation.values())
    where = (
        "weights are mapped from the file; KV pages are touched one by one"
        if runner.ops.free_bytes() is None
        else f"weights are copied to the device; the KV pool: {pool.kv_reason}"
    )
    graphs, workspace, of_draft = runner.graphs.nbytes, runner.nbytes, ""
    if draft is not None and loaded.draft is not None:
        own, kv = draft.own_nbytes, pool.pages * draft.model.page_bytes
        of_draft = f"; of these the draft model's: {loaded.draft.weights} weights, {kv} pool, {own} workspace"
        weights, graphs, workspace = weights + loaded.draft.weights, graphs + draft.graphs.nbytes, workspace + own
    if companion is not None and loaded.trained is not None:
        own, kv = companion.nbytes + companion.scratch_bytes, pool.pages * companion.page_bytes
        of_draft = f"; of these the drafter's: {loaded.trained.nbytes} weights, {kv} pool, {own} workspace"
        weights, workspace = weights + loaded.trained.nbytes, workspace + own
        graphs += companion.graph_nbytes
    return MemoryPlan(
        weights=weights,
        pool=pool.nbytes,
        pages=pool.pages,
        page_bytes=page_bytes,
        states=0,
        graphs=graphs,
        workspace=workspace,
        resident=resident,
        reason=f"{where}; KV of {page_bytes // BLOCK_TOKENS} bytes a token ({runner.ops.name}){of_draft}",
    )


def drafters(loaded: Loaded, companion: Companion | None) -> list[str]:
    """What requests may ask for, the best one last."""
    trained = list(reversed(companion.serves)) if companion is not None else []
    return ["lookup", "ngram", *(["draft-model"] if loaded.draft is not None else []), *trained]


def explain(config: EngineConfig, loaded: Loaded, pool: PoolPlan, companion: Companion | None) -> tuple[Decision, ...]:
    """Settings with their owners and reasons, then the mechanisms. The pool's context may be below the model's."""
    facts, ops = loaded.facts, loaded.model.ops
    defaults = EngineConfig(device=config.device)
    beside = loaded.draft or loaded.trained
    draft = beside.name if beside is not None else "none"
    resolved = {
        "draft": draft,
        "device": facts.device,
        "threads": facts.threads,
        "context": pool.context,
        "kv_tokens": pool.kv_tokens,
    }
    reasons = loaded.reasons | {"kv_tokens": pool.kv_reason}
    if (
        pool.context < facts.context
    ):  # a loaded model that was given to an engine with less room, or what the device has room for
        reasons["context"] = pool.context_reason
    settings = [
        Decision(
            key=key,
            value=str(resolved.get(key, getattr(config, key))),
            owner=owner,
            reason=reasons.get(key) or ("default" if getattr(config, key) == getattr(defaults, key) else "as asked"),
        )
        for key, owner in OWNERS.items()
    ]
    exact = facts.mode == "exact"
    mechanisms = [
        Decision(key="kernels", value=ops.name, owner="backend", reason=reasons.get("kernels", "")),
        Decision(
            key="arithmetic",
            value=facts.digest[:16],
            owner="backend",
            reason="bits are compared only where digests are equal",
        ),
        Decision(
            key="exactness",
            value="bit for bit" if exact else "not kept",
            owner="runtime",
            reason="row-invariant kernels, probed at load"
            if exact
            else "fast mode: library matrix products depend on the batch",
        ),
        Decision(
            key="speculation",
            value=", ".join(drafters(loaded, companion)),
            owner="runtime",
            reason=f"asked per request (speculate=); auto is {drafters(loaded, companion)[-1]}"
            + (
                ""
                if loaded.trained is not None
                else f"; no trained drafter: {reasons.get('draft') or 'none is loaded'}"
            ),
        ),
        Decision(
            key="width",
            value=", ".join(get_args(Controlling)),
            owner="runtime",
            reason="what chooses the drafts of a round, asked per request (controller=), at most width=, up to the first one"
            " that its drafter is less sure of than gate=; by default the most tokens a second by measured costs",
        ),
        Decision(
            key="graphs",
            value="off" if ops.mode == "fast" or not config.graph_mb else "on",
            owner="backend",
            reason="library calls are made anew each time"
            if ops.mode == "fast"
            else "as asked (graph_mb=0)"
            if not config.graph_mb
            else f"the forward pass of up to {KEPT_ROWS} rows is recorded once for each shape and replayed"
            if not ops.asynchronous
            else f"steps of up to {max(ops.row_buckets)} rows, sampling included, are padded to a bucket, recorded once and replayed",
        ),
        Decision(key="kv_dtype", value=ops.kv_dtype, owner="backend", reason="keys and values are not quantised"),
    ]
    for key in ("rope", "parts"):
        if key in reasons:
            value, _, why = reasons[key].partition(": ")
            mechanisms.append(Decision(key=key, value=value, owner="model", reason=why))
    return tuple(settings + mechanisms)
