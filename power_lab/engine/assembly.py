"""What an engine is put together from, once its model is there: runners, KV pools, scheduler, speculation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from power_lab.engine import memory, prefix
from power_lab.engine.blocks import BlockPool
from power_lab.engine.config import EngineConfig
from power_lab.engine.graphs import coverage_of
from power_lab.engine.loader import Loaded
from power_lab.engine.memory import PoolPlan
from power_lab.engine.runner import Observer, Runner, Sizes
from power_lab.engine.scheduler import Limits, Scheduler
from power_lab.engine.speculation.drafters import Drafter, resolve
from power_lab.engine.speculation.drafters import make as make_drafter
from power_lab.engine.speculation.drafters.model import ModelDrafter
from power_lab.engine.speculation.drafters.neural import Companion, Room, hybrid
from power_lab.engine.speculation.drafters.neural.choice import remedy
from power_lab.engine.speculation.rollback import Cursor, Rollback
from power_lab.engine.speculation.transaction import Proposer
from power_lab.engine.speculation.width import make as make_controller
from power_lab.engine.speculation.width.costs import MeasuredCosts, RoundCosts


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Of one engine.

    Attributes:
        draft: the draft model as a drafter, companion: the trained drafter, if there is one.
        pool: how the KV pools came to their size.
        rollback: brings what is kept of requests back behind refused drafts.
        costs: of steps and drafter calls; rounds: of steps that resume, their drafts included.
        resolve: the drafter that a request's `speculate` means.
        recorded: drafters that read more than tokens, by name.
    """

    runner: Runner
    draft: ModelDrafter | None
    companion: Companion | None
    pool: PoolPlan
    scheduler: Scheduler
    rollback: Rollback
    costs: MeasuredCosts
    rounds: RoundCosts
    proposer: Proposer
    resolve: Callable[[str], str]
    recorded: dict[str, Drafter]


def assemble(config: EngineConfig, loaded: Loaded, clock: Callable[[], float], observer: Observer | None) -> Parts:
    """Make the parts, and allocate what they need on the device.

    Raises CapacityError with the numbers where it does not fit.
    """
    limits = Limits.of(config)
    longest = min(loaded.context, config.context or loaded.context)
    graphs = config.graph_mb > 0
    drafts = loaded.draft is not None or loaded.trained is not None
    budget, draft_budget = memory.graph_budgets(config, drafts)
    sizes = Sizes(limits.step_tokens, limits.sampled_rows, limits.max_batch, longest)
    companion: Companion | None = None
    if loaded.trained is not None:  # before anything is captured: all scratch is one
        rows = coverage_of(loaded.model.ops, config.buckets).cover(limits.step_tokens) or limits.step_tokens
        room = Room(
            rows=rows, batch=limits.max_batch, context=longest, clock=clock, graph_bytes=draft_budget, graphs=graphs
        )
        companion = hybrid.beside(loaded.trained.companion(room), loaded.model.ops, room)
    runner = Runner(
        loaded.model,
        sizes,
        clock=clock,
        graph_bytes=budget,
        graphs=graphs,
        buckets=config.buckets,
        observer=observer,
        companion=companion,
    )
    draft: ModelDrafter | None = None
    if loaded.draft is not None:  # before anything is captured: both runners' scratch is one
        model = loaded.draft.model
        draft = ModelDrafter(model, limits, longest, clock=clock, graph_bytes=draft_budget, graphs=graphs)
    page_bytes = runner.model.page_bytes + (draft.runner.model.page_bytes if draft is not None else 0)
    page_bytes += companion.page_bytes if companion is not None else 0
    free = runner.ops.free_bytes()
    if free is not None and companion is not None:
        free = max(0, free - companion.scratch_bytes)
    pool = memory.plan(config, longest, page_bytes, free)
    runner.make_pool(pool.pages)
    if draft is not None:
        draft.make_pool(pool.pages)
    root = partial(prefix.model_root, loaded.facts)
    scheduler = Scheduler(BlockPool(pool.pages, clock), limits, root, reuse=config.prefix_cache)
    kept = [Cursor("the target's KV")]
    if companion is not None:
        kept.append(Cursor(f"the trained drafter's in the same pages ({', '.join(companion.serves)})"))
    if draft is not None:
        kept.append(Cursor("the draft model's KV"))
    rollback = Rollback(kept, clock)
    have = {"draft_model": draft, "companion": companion}
    buckets = config.buckets or runner.ops.row_buckets if graphs else ()
    costs, rounds = MeasuredCosts(buckets), RoundCosts(buckets)
    facts = loaded.facts
    lacking = {
        "remedy": partial(remedy, model=facts.model, sha256=facts.sha256, native=loaded.native),
        "why": loaded.reasons.get("draft", "") if draft is None else "",
    }
    proposer = Proposer(
        partial(make_drafter, **have, **lacking),
        clock,
        facts.vocab,
        step_rows=limits.step_tokens,
        costs=costs,
        rounds=rounds,
        on_draft=costs.add_draft,
        make_controller=partial(make_controller, rollback=rollback.depth),
    )
    recorded: dict[str, Drafter] = {} if companion is None else {n: companion.drafter(n) for n in companion.serves}
    if draft is not None:
        recorded[draft.name] = draft
    return Parts(
        runner, draft, companion, pool, scheduler, rollback, costs, rounds, proposer, partial(resolve, **have), recorded
    )
