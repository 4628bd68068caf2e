"""Snapshots and trace events made from the engine's state. Everything here only reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

import msgspec

from power_lab.engine.blocks import DUMMY, BlockPool
from power_lab.engine.config import OWNERS, EngineConfig
from power_lab.engine.graphs import coverage_of
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
from power_lab.kernels.ops import Ops


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
        for outcome in outcomes:
            if outcome.emitted:
                self.passes += 1
                self.tokens += len(outcome.emitted)
                self.accepted += outcome.accepted
        self.drafted += sum([span.drafts for span in plan.spans])
        self.preempted += len(plan.preempted)
        self.last_step = now

    def count_speculation(self, drafter: str, step: Step, round_: Round | None) -> None:
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


class Load(NamedTuple):
    """Requests and blocks, as in `Step`."""

    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the trace events of all requests of a step have in common, counted once.

    Attributes:
        plan: the step. prefill, decode, verify: its rows by phase; rows: all of them.
        load: requests and blocks after its planning.
        forward_s, sample_s, commit_s: seconds of its parts; wall_s: of the whole.
    """

    plan: StepPlan
    prefill: int
    decode: int
    verify: int
    rows: int
    load: Load
    forward_s: float
    sample_s: float
    commit_s: float
    wall_s: float

    @classmethod
    def of(cls, plan: StepPlan, load: Load, times: tuple[float, float, float], wall_s: float) -> StepFacts:
        """times: forward, sample and commit seconds."""
        verify = sum([len(span.tokens) for span in plan.spans if span.drafts])
        decode = sum([span.phase == "decode" for span in plan.spans])
        rows = plan.rows
        return cls(plan, rows - decode - verify, decode, verify, rows, load, *times, wall_s)

    def step_of(self, span: Span, at: float) -> Step:
        """The trace event of a step, for the request of one of its spans."""
        load = self.load
        return Step(  # of at most 15 words: a call with more makes a dictionary of them first, which takes three times as long
            step=self.plan.step,
            prefill_rows=self.prefill,
            decode_rows=self.decode,
            verify_rows=self.verify,
            own_rows=len(span.tokens),
            running=load.running,
            waiting=load.waiting,
            preempted=len(self.plan.preempted),
            free_blocks=load.free_blocks,
            cached_blocks=load.cached_blocks,
            used_blocks=load.used_blocks,
            wall_s=self.wall_s,
            at=at,
        )

    def round_of(
        self,
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
        known = len(span.tokens) - span.drafts
        round_ = Round(  # as above: what only speculation knows is put in behind
            step=self.plan.step,
            start=span.start + known,
            drafted=span.tokens[known:],
            accepted=outcome.accepted,
            emitted=outcome.emitted,
            rows=self.rows,
            requests=len(self.plan.spans),
            draft_s=proposal.seconds if proposal is not None else 0.0,
            forward_s=self.forward_s,
            sample_s=self.sample_s,
            commit_s=self.commit_s,
            at=at,
            logprobs=tuple(logprobs),
        )
        if replayed is not None:
            round_ = msgspec.structs.replace(round_, replays=replayed.passes, replay_s=replayed.seconds)
        if proposal is None:
            return round_
        return msgspec.structs.replace(
            round_,
            note=proposal.told(round_.drafted),
            width=proposal.width,
            why=proposal.why,
            reachable=proposal.reach(outcome.emitted),
            resumed=proposal.resumed and bool(round_.drafted),
            light=proposal.light and bool(round_.drafted),
            drafter=proposal.drafter if round_.drafted else "",
        )


def load_of(scheduler: Scheduler) -> Load:
    """Requests and blocks as they are now."""
    pool = scheduler.pool
    return Load(len(scheduler.running), len(scheduler.waiting), pool.free, pool.cached, pool.used)


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


def _buckets(config: EngineConfig, ops: Ops) -> tuple[str, str]:
    """The row buckets in force, and why these."""
    if ops.mode == "fast" or not config.graph_mb:
        return "none", "no step is recorded"
    declared, rows = config.buckets or ops.row_buckets, coverage_of(ops, config.buckets)
    if not declared:
        return f"1 to {rows.most}", "default: on a CPU nothing is padded; each count of rows is recorded as it is"
    why = (
        "as asked"
        if config.buckets
        else "default: this device's table; `lab.inspect.shapes()` says which would pad less"
    )
    return ", ".join(map(str, declared)), f"{why}; steps of more than {rows.most} rows run operation by operation"


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
    buckets, why_buckets = _buckets(config, ops)
    resolved["buckets"] = buckets
    reasons = loaded.reasons | {"kv_tokens": pool.kv_reason, "buckets": why_buckets}
    if (
        pool.context < facts.context
    ):  # a loaded model that was given to an engine with less room, or what the device has room for
        reasons["context"] = pool.context_reason
    settings = [
        Decision(
            key=key,
            value=str(resolved.get(key, getattr(config, key))) or "none",
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
            else f"the forward pass of up to {coverage_of(ops, config.buckets).most} rows is recorded once for each shape and replayed"
            if not ops.asynchronous
            else f"steps of up to {coverage_of(ops, config.buckets).most} rows, sampling included, are padded to a bucket, recorded once"
            " and replayed",
        ),
        Decision(key="kv_dtype", value=ops.kv_dtype, owner="backend", reason="keys and values are not quantised"),
    ]
    for key in ("rope", "parts"):
        if key in reasons:
            value, _, why = reasons[key].partition(": ")
            mechanisms.append(Decision(key=key, value=value, owner="model", reason=why))
    return tuple(settings + mechanisms)
