"""Keywords of calls as settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from power_lab.engine.config import strict
from power_lab.engine.request import SamplingParams
from power_lab.errors import ConfigError

if TYPE_CHECKING:
    from power_lab.engine.request import Prompt


def sampling(params: Mapping[str, Any]) -> SamplingParams:
    """Parameters from keywords; one stop string may stand alone. Raises ConfigError naming the key."""
    settings = plain(params)
    if isinstance(settings.get("stop"), str):
        settings["stop"] = (settings["stop"],)
    return strict(SamplingParams, settings)


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """NumPy scalars as Python numbers, so that values of an arange or linspace can be given as they are."""
    return {
        key: value.item() if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0 else value
        for key, value in settings.items()
    }


def listed(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Several prompts. Raises ConfigError for a single one, and for what cannot be gone through."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        found = type(prompts).__name__
        raise ConfigError("prompts", f"{found} found", "Give a list of prompts; for one there is lab.generate.")
    return list(prompts)
