"""Keywords of calls as settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from power_lab.engine.config import strict
from power_lab.engine.request import SamplingParams


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
