"""Tiny engines for every drafter that a request can name. The list is the engine's own: a new drafter joins all tests that use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.loader import Loaded, LoadedDraft
from power_lab.engine.request import Controlling, Drafting
from power_lab.kernels.ops import Ops
from tests import tiny

DRAFTERS = tuple(name for name in get_args(Drafting) if name not in ("off", "auto"))
CONTROLLERS = get_args(Controlling)


def _as_is(target: Loaded, shape: tiny.Shape, ops: Ops) -> Loaded:
    return target


def _with_model(target: Loaded, shape: tiny.Shape, ops: Ops) -> Loaded:
    """The target's own weights in four bits as its draft: often right, not always."""
    other = tiny.loaded(replace(shape, stored="mixed", kind="llama"), ops)
    nbytes = sum(other.facts.quantisation.values())
    return replace(target, draft=LoadedDraft(other.model, "other", other.facts.sha256, nbytes))


EQUIPMENT: dict[str, Callable[[Loaded, tiny.Shape, Ops], Loaded]] = {
    "lookup": _as_is,
    "ngram": _as_is,
    "draft-model": _with_model,
}
"""Drafter -> how a tiny model gets what it needs. `test_every_drafter_can_be_had` misses those that are not here."""


def engine(drafter: str, shape: tiny.Shape, ops: Ops, **settings: Any) -> Engine:
    """A tiny engine, which the caller steps, in which requests may ask for `drafter`, lookup and ngram."""
    loaded = EQUIPMENT[drafter](tiny.loaded(shape, ops), shape, ops)
    options = {key: settings.pop(key) for key in ("observer", "clock") if key in settings}
    config = EngineConfig(**{"kv_tokens": 2048, "step_tokens": 256, **settings})
    return Engine(config, loaded=loaded, threaded=False, **options)
