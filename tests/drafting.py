"""Tiny engines for every drafter that a request can name. The list is the engine's own: a new drafter joins all tests that use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from power_lab.engine.engine import Engine
from power_lab.engine.loader import Loaded, LoadedDraft
from power_lab.engine.request import Controlling, Drafting
from power_lab.kernels.ops import Ops
from tests import drafters, tiny

CONTROLLERS = get_args(Controlling)


def _with_model(shape: tiny.Shape, ops: Ops) -> Loaded:
    """A model of the target's sizes with its embedding and weights rounded to few bits as its draft: often right, not always."""
    other = tiny.loaded(replace(shape, stored="mixed", kind="llama"), ops)
    nbytes = sum(other.facts.quantisation.values())
    draft = LoadedDraft(other.model, "other", other.facts.sha256, nbytes)
    return replace(tiny.loaded(shape, ops), draft=draft)


EQUIPMENT: dict[str, Callable[[tiny.Shape, Ops], Loaded]] = {
    "lookup": tiny.loaded,
    "ngram": tiny.loaded,
    "draft-model": _with_model,
    **drafters.KINDS,
    "hybrid": drafters.KINDS["mtp"],
}
"""Drafter -> a tiny model of two layers that has it."""

NAMES = tuple(name for name in get_args(Drafting) if name not in ("off", "auto"))
DRAFTERS = tuple(name for name in NAMES if name in EQUIPMENT)
"""Those that tests go through; `test_every_drafter_can_be_had` fails while some of NAMES are missing."""


def engine(drafter: str, shape: tiny.Shape, ops: Ops, **settings: Any) -> Engine:
    """A tiny engine, which the caller steps, in which requests may ask for `drafter`, lookup and ngram."""
    return drafters.engine(EQUIPMENT[drafter](shape, ops), **settings)
