"""A model's config.json in Hugging Face layout, as typed and bounded values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from power_lab.engine.weights.mapped import read_bounded
from power_lab.engine.weights.strict_json import parse_object
from power_lab.engine.weights.values import TypedValues, brief
from power_lab.errors import ModelFileError

MAX_CONFIG_BYTES = 1 << 24  # configs of quantised mixtures of experts reach some MB


class JsonConfig(TypedValues):
    """Values by dotted key: "rope_parameters.rope_theta" is the member of a nested object. null counts as absent.

    JSON has one kind of number, so a whole number serves where a float is asked for; never the other way round.

    Attributes:
        values: what the file holds.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self._prefix = prefix

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> JsonConfig:
        """Read the file. Raises ModelFileError when it is too large or not strict JSON (see `parse_object`)."""
        path = Path(path)
        return cls(parse_object(read_bounded(path, MAX_CONFIG_BYTES), str(path)), path)

    def section(self, key: str) -> JsonConfig:
        """The object under `key` as a config of its own, such as "text_config". Raises ModelFileError where it is none."""
        return JsonConfig(self.require(key, dict), self.path, f"{self._full(key)}.")

    def _value(self, key: str) -> Any:
        value: Any = self.values
        walked: list[str] = []
        for step in key.split("."):
            if not isinstance(value, Mapping):
                raise ModelFileError(
                    f"{self.path}: key {self._full('.'.join(walked))!r} is {brief(value)}, but an object is expected."
                )
            value = value.get(step)
            if value is None:
                return None
            walked.append(step)
        return value

    def _cast(self, value: Any, kind: type) -> Any:
        if kind is not float or type(value) is not int or value.bit_length() > 1000:  # beyond a float's range
            return value
        return float(value)

    def _full(self, key: str) -> str:
        return self._prefix + key
