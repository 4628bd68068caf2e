"""The settings that a sweep may vary: whose they are, whether they may change a token, and in which order engines are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from power_lab.engine.config import AUTO_DRAFT, TRAINED_DRAFTS, EngineConfig
from power_lab.errors import ConfigError
from power_lab.keywords import plain, sampling

MOST_CELLS = 4096
CACHES = ("cold", "warm")
OWN = {"cache": "cold", "batch": 1}
"""Settings of the sweep itself, with their defaults: what the prefix cache holds before a pass, and how many requests are in flight."""

ENGINE = EngineConfig.__struct_fields__
REQUEST = tuple(key for key in type(sampling({})).__struct_fields__ if key != "record")
WHOLE = ("stop", "stop_tokens", "logit_bias")  # a list or mapping is one value of these, not several
IDLE_WITHOUT_DRAFTS = ("width", "controller", "gate")

SAME_TOKENS = frozenset(
    {
        "draft",
        "draft_vocabulary",
        "draft_ranking",
        "threads",
        "kv_tokens",
        "step_tokens",
        "max_batch",
        "queue_limit",
        "prefix_cache",
        "overlap",
        "graph_mb",
        "buckets",
        "host_profile",
        "logprobs",
        "speculate",
        "width",
        "controller",
        "gate",
        *OWN,
    }
)
"""What the exact mode promises never to change a token. Points that differ in these alone must have equal outputs."""

Values = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One measurement to make: settings of the engine, of the requests and of the sweep.

    Attributes:
        config: the engine's, complete; engine, request, own: what was asked for.
        cells: flat indices of the cube that it fills. Several where settings differ that have no effect, such as `width` without drafts.
    """

    config: EngineConfig
    engine: Values
    request: Values
    own: Values
    cells: tuple[int, ...] = ()

    @property
    def settings(self) -> Values:
        return {**self.engine, **self.request, **self.own}

    @property
    def family(self) -> tuple[tuple[str, str], ...]:
        """The settings that may change tokens: points of one family must have the same outputs in exact mode."""
        asked = {**self.engine, **self.request, "model": self.config.model, "mode": self.config.mode}
        return tuple(sorted((key, repr(value)) for key, value in asked.items() if key not in SAME_TOKENS))


@dataclass(frozen=True)
class Plan:
    """What a sweep measures.

    Attributes:
        axes: swept setting -> its values, in the order given: the cube's dimensions.
        fixed: settings that all points share.
        groups: trials by engine, in the order in which engines are loaded.
    """

    axes: dict[str, tuple[Any, ...]]
    fixed: Values
    groups: tuple[tuple[Trial, ...], ...] = field(default=())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(values) for values in self.axes.values())

    def told(self, trial: Trial) -> str:
        """A trial in a few words: the swept settings that have an effect there."""
        found = {key: trial.settings[key] for key in self.axes if key in trial.settings}
        return " · ".join(worded(key, value) for key, value in found.items()) or "as it is"

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All of them, in the order of measuring."""
        return tuple(trial for group in self.groups for trial in group)


def worded(key: str, value: Any) -> str:
    """A setting in words: a drafter or a state by itself, anything else with its name."""
    if key in ("speculate", "controller"):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{key} {value:,}"
    return f"{key} {value}"


def plan(settings: Mapping[str, Any], base: EngineConfig) -> Plan:
    """A sweep over `settings`: a list, tuple, range or array is swept, anything else is the same for all points.

    Engines come in the order of first need, the one in use first; each is loaded once. Where `draft` is not given, an engine holds
    the trained drafter that its points use and no other, so that what a drafter costs is in its own points alone.

    Raises ConfigError naming a setting that is unknown or has a wrong value, before anything is loaded.
    """
    axes, fixed = _split(settings)
    size = math.prod(len(values) for values in axes.values())
    if size > MOST_CELLS:
        raise ConfigError("settings", f"{size:,} points; at most {MOST_CELLS:,} are taken", "Sweep fewer values.")
    groups: dict[EngineConfig, dict[str, Trial]] = {base: {}}
    for cell, values in enumerate(product(*axes.values())):
        trial = _trial({**fixed, **dict(zip(axes, values, strict=True))}, base, "draft" in settings)
        found = groups.setdefault(trial.config, {})
        known = found.get(repr(trial.settings))
        cells = (*known.cells, cell) if known else (cell,)
        found[repr(trial.settings)] = Trial(trial.config, trial.engine, trial.request, trial.own, cells)
    return Plan(axes, fixed, tuple(tuple(found.values()) for found in groups.values() if found))


def _split(settings: Mapping[str, Any]) -> tuple[dict[str, tuple[Any, ...]], Values]:
    axes: dict[str, tuple[Any, ...]] = {}
    fixed: Values = {}
    for key, value in plain(settings).items():
        if key not in (*ENGINE, *REQUEST, *OWN):
            known = ", ".join((*REQUEST, *ENGINE, *OWN))
            raise ConfigError(key, "unknown setting", f"Known settings: {known}.")
        whole = key in WHOLE or (key == "buckets" and all(isinstance(one, int) for one in value))
        if whole or isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            fixed[key] = value
            continue
        values = tuple(plain({"": one})[""] for one in value)
        if not values:
            raise ConfigError(key, "there is no value to sweep over", "Give at least one.")
        if len(set(map(repr, values))) < len(values):
            raise ConfigError(key, "a value is given twice", "Give each value once; `repeats` measures again.")
        axes[key] = values
    return axes, fixed


def _trial(settings: Values, base: EngineConfig, draft_given: bool) -> Trial:
    own = {**OWN, **{key: value for key, value in settings.items() if key in OWN}}
    _check_own(own)
    request = {key: value for key, value in settings.items() if key in REQUEST}
    wanted = sampling(request)
    if wanted.speculate == "off":
        request = {key: value for key, value in request.items() if key not in IDLE_WITHOUT_DRAFTS}
    engine = {key: value for key, value in settings.items() if key in ENGINE}
    changes = dict(engine)
    if not draft_given:
        changes |= _draft(wanted.speculate, base.draft)
    return Trial(EngineConfig.of({**base.asked(), **changes}), engine, request, own)


def _draft(speculate: str, own: str) -> Values:
    """The drafter that an engine must hold for points of this kind; `off`, lookup and n-grams need none."""
    if speculate in TRAINED_DRAFTS:
        return {} if own.endswith(".safetensors") else {"draft": speculate}
    return {"draft": ""} if speculate in ("off", "lookup", "ngram") and own in (AUTO_DRAFT, *TRAINED_DRAFTS) else {}


def _check_own(own: Values) -> None:
    if own["cache"] not in CACHES:
        raise ConfigError("cache", f"{own['cache']!r} is not a state of the cache", f"Use one of {', '.join(CACHES)}.")
    batch = own["batch"]
    if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= 256:
        raise ConfigError("batch", f"{batch!r} is not a number of requests", "Use a whole number from 1 to 256.")
