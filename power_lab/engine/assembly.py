"""What an engine is put together from, once its model is there: runners, KV pools, scheduler, speculation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from power_lab.engine import memory, prefix
from power_lab.engine.blocks import BlockPool
from power_lab.engine.config import EngineConfig
from power_lab.engine.loader import Loaded
from power_lab.engine.memory import PoolPlan
from power_lab.engine.runner import Observer, Runner, Sizes
from power_lab.engine.scheduler import Limits, Scheduler
from power_lab.engine.speculation.drafters import make as make_drafter
from power_lab.engine.speculation.drafters.model import ModelDrafter
from power_lab.engine.speculation.transaction import Proposer
from power_lab.engine.speculation.width.costs import MeasuredCosts


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Of one engine. draft: the draft model as a drafter, if there is one. pool: how the KV pools came to their size."""

    runner: Runner
    draft: ModelDrafter | None
    pool: PoolPlan
    scheduler: Scheduler
    costs: MeasuredCosts
    proposer: Proposer


def assemble(config: EngineConfig, loaded: Loaded, clock: Callable[[], float], observer: Observer | None) -> Parts:
    """Make the parts, and allocate what they need on the device.

    Raises CapacityError with the numbers where it does not fit.
    """
    limits = Limits.of(config)
    longest = min(loaded.context, config.context or loaded.context)
    graphs = config.graph_mb > 0
    budget, draft_budget = memory.graph_budgets(config, loaded.draft is not None)
    sizes = Sizes(limits.step_tokens, limits.sampled_rows, limits.max_batch, longest)
    runner = Runner(loaded.model, sizes, clock=clock, graph_bytes=budget, graphs=graphs, observer=observer)
    draft: ModelDrafter | None = None
    if loaded.draft is not None:  # before anything is captured: both runners' scratch is one
        model = loaded.draft.model
        draft = ModelDrafter(model, limits, longest, clock=clock, graph_bytes=draft_budget, graphs=graphs)
    page_bytes = runner.model.page_bytes + (draft.runner.model.page_bytes if draft is not None else 0)
    pool = memory.plan(config, longest, page_bytes, runner.ops.free_bytes())
    runner.make_pool(pool.pages)
    if draft is not None:
        draft.make_pool(pool.pages)
    root = partial(prefix.model_root, loaded.facts)
    scheduler = Scheduler(BlockPool(pool.pages), limits, root, reuse=config.prefix_cache)
    costs = MeasuredCosts(runner.ops.row_buckets if graphs else ())
    proposer = Proposer(
        partial(make_drafter, draft_model=draft),
        clock,
        loaded.facts.vocab,
        step_rows=limits.step_tokens,
        costs=costs,
        on_draft=costs.add_draft,
    )
    return Parts(runner, draft, pool, scheduler, costs, proposer)
