"""Typed, bounded access to a file's values by key: the one way in for GGUF metadata and config.json."""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from power_lab.errors import ModelFileError

T = TypeVar("T")

MAX_LIST = 1 << 16  # of a list whose length the caller cannot know, such as end tokens


class TypedValues(ABC):
    """What a file states, by key. Every error is a ModelFileError that names file and key.

    Attributes:
        path: the file, for messages.
    """

    path: Path

    @abstractmethod
    def _value(self, key: str) -> Any:
        """The stated value, or None where there is none."""

    def _cast(self, value: Any, kind: type) -> Any:
        """A value that the format writes in more than one way, as `kind`."""
        return value

    def _full(self, key: str) -> str:
        """The key as the file's reader would look it up, for messages."""
        return key

    def has(self, key: str) -> bool:
        """Whether the file states the key."""
        return self._value(key) is not None

    def get(self, key: str, kind: type[T], default: T, low: float | None = None, high: float | None = None) -> T:
        """The value, or `default` (taken as it is) where the key is absent. Checks like `require`."""
        value = self._value(key)
        return default if value is None else self._checked(value, kind, low, high, key)

    def require(self, key: str, kind: type[T], low: float | None = None, high: float | None = None) -> T:
        """The value, of exactly this Python type (bool, int, float, str, list or np.ndarray) and within low..high.

        Raises ModelFileError when the key is missing, of another type, not finite or out of range.
        """
        return self._checked(self._required(key), kind, low, high, key)

    def require_list(
        self, key: str, kind: type[T], length: int | None = None, low: float | None = None, high: float | None = None
    ) -> list[T]:
        """A list of `length` values, each like `require`'s; one lone value stands for all of them.

        Without a length the list may be of any, and a lone value is a list of one. Raises ModelFileError.
        """
        value = self._required(key)
        if not isinstance(value, (list, np.ndarray)):
            return [self._checked(value, kind, low, high, key)] * (1 if length is None else length)
        if length is None and len(value) > MAX_LIST:
            raise self._wrong(key, f"has {len(value)} values; at most {MAX_LIST} are allowed")
        if length is not None and len(value) != length:
            raise self._wrong(key, f"has {len(value)} values, but {length} are expected")
        items = value.tolist() if isinstance(value, np.ndarray) else value
        return [self._checked(item, kind, low, high, f"{key}[{index}]") for index, item in enumerate(items)]

    def _required(self, key: str) -> Any:
        value = self._value(key)
        if value is None:
            raise self._wrong(key, "is missing", "Power Lab cannot load this kind of model.")
        return value

    def _checked(self, value: Any, kind: type[T], low: float | None, high: float | None, key: str) -> T:
        value = self._cast(value, kind)
        if type(value) is not kind:
            raise self._wrong(key, f"is {brief(value)}, but {kind.__name__} is expected")
        if isinstance(value, float) and not math.isfinite(value):
            raise self._wrong(key, f"is {value}, not a finite number")
        if isinstance(value, (int, float)) and not ((low is None or value >= low) and (high is None or value <= high)):
            raise self._wrong(key, f"is {brief(value)}, outside {low}..{high}")
        return value

    def _wrong(self, key: str, what: str, remedy: str = "") -> ModelFileError:
        return ModelFileError(f"{self.path}: key {self._full(key)!r} {what}.", remedy)


def brief(value: object) -> str:
    """Type and value for a message, however long the value is."""
    return f"{type(value).__name__} {reprlib.repr(value)}"
