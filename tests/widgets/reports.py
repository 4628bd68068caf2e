"""Reports of an engine, made by hand."""

from __future__ import annotations

import time
from typing import Any

from power_lab.engine.bucket_report import planned
from power_lab.engine.shapes import Coverage
from power_lab.engine.vitals import (
    DeviceVitals,
    EngineVitals,
    LookupReport,
    PrefixNode,
    PrefixTree,
    ShapeRow,
    ShapesReport,
    Vitals,
)


def node(block: int, parent: int = -1, **changes: Any) -> PrefixNode:
    """A block whose hash is its number."""
    facts: dict[str, Any] = {
        "hash": f"{block:064x}",
        "parent": "" if parent < 0 else f"{parent:064x}",
        "depth": 0,
        "namespace": "",
        "tokens": tuple(range(64)),
        "piece": f"text of {block} ",
        "hits": 0,
        "tokens_saved": 0,
        "seconds_saved": 0.0,
        "age_s": 10.0,
        "last_hit_s": None,
        "refs": 0,
        "eviction": block,
        "nbytes": 1000,
    }
    return PrefixNode(block=block, **(facts | changes))


def prefix_tree(*nodes: PrefixNode, **changes: Any) -> PrefixTree:
    facts: dict[str, Any] = {
        "block_tokens": 64,
        "lookups": 4,
        "hits": 3,
        "tokens": 1000,
        "hit_tokens": 640,
        "seconds_saved": 1.5,
        "seconds_a_token": 0.002,
        "evictions": 0,
        "free_blocks": 7,
        "nbytes": sum(one.nbytes for one in nodes),
    }
    return PrefixTree(nodes=nodes, **(facts | changes))


def forked() -> PrefixTree:
    """1 - 2, then either 3 - 4 or 5; and 6 by itself."""
    return prefix_tree(
        node(1, hits=3, tokens_saved=192, refs=1, eviction=-1),
        node(6, piece="<script>alert(1)</script>"),
        node(2, 1, depth=1, hits=3, tokens_saved=192, refs=1, eviction=-1),
        node(3, 2, depth=2, eviction=1, piece="the same beginning, and then this"),
        node(5, 2, depth=2, eviction=0, piece="the same beginning, and then that"),
        node(4, 3, depth=3, eviction=2),
    )


def lookup_report(count: int = 200, served: int = 128, **changes: Any) -> LookupReport:
    facts: dict[str, Any] = {
        "namespace": "",
        "tokens": tuple(range(count)),
        "pieces": tuple(f" t{at}" for at in range(count)),
        "blocks": tuple(range(1, 1 + served // 64)),
        "hashes": tuple(f"{at:064x}" for at in range(count // 64)),
        "served": served,
        "computed": count - served,
        "stop": served,
        "reason": "differs",
        "why": "The next block differs at token 140.",
        "differs_at": 140,
        "nearest": 3,
        "seconds_saved": 0.25,
    }
    return LookupReport(**(facts | changes))


def shape(rows: int, **changes: Any) -> ShapeRow:
    facts: dict[str, Any] = {
        "logits": 1,
        "sampling": "inside",
        "captures": 1,
        "replays": 10 * rows,
        "eager": 0,
        "evictions": 0,
        "why": {},
        "apart": {},
        "real_rows": 11 * rows - 3,
        "padding_rows": 3,
        "nbytes": 1 << 20,
        "held": True,
        "last_step": 5,
    }
    return ShapeRow(rows=rows, **(facts | changes))


def shapes_report(*shapes: ShapeRow, demand: dict[int, int] | None = None, **changes: Any) -> ShapesReport:
    demand = {3: 50, 5: 100, 7: 2} if demand is None else demand
    facts: dict[str, Any] = {
        "enabled": True,
        "why": "",
        "steps": sum(demand.values()),
        "captures": sum(one.captures for one in shapes),
        "replays": sum(one.replays for one in shapes),
        "eager": sum(one.eager for one in shapes),
        "evictions": 0,
        "graphs": sum(one.held for one in shapes),
        "nbytes": sum(one.nbytes for one in shapes),
        "budget": 1 << 29,
        "hit_rate": 0.9,
        "window": 100,
        "history": tuple((at, int(at % 4 > 0)) for at in range(40)),
        "demand": demand,
        "planned": planned(demand, Coverage((1, 4, 8))),
    }
    return ShapesReport(shapes=shapes, **(facts | changes))


def vitals(
    seq: int = 1, at: float | None = None, engines: tuple[EngineVitals, ...] | None = None, **changes: Any
) -> Vitals:
    engine = EngineVitals(
        engine="one", model="smollm2", device="cpu", mode="exact", state="ready", stage="", clients=("a",), **changes
    )
    return Vitals(
        at=time.time() if at is None else at,
        seq=seq,
        pid=1,
        package="0",
        revision="r",
        uptime_s=1.0,
        resident=1,
        clients=("a",),
        ends_in_s=None,
        engines=(engine,) if engines is None else engines,
        device=DeviceVitals(name="cpu"),
    )
