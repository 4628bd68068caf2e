"""What a family reads its topology from: typed, bounded values by key. GGUF metadata and config.json both offer it."""

from __future__ import annotations

from typing import Protocol, TypeVar

V = TypeVar("V", bool, int, float, str)


class Metadata(Protocol):
    """Every method raises ModelFileError naming the file and key when a value is missing, of another type or out of range."""

    def has(self, key: str) -> bool:
        """Whether the file states the key."""
        ...

    def require(self, key: str, kind: type[V], low: float | None = None, high: float | None = None) -> V:
        """The value, of exactly this type and within low..high."""
        ...

    def get(self, key: str, kind: type[V], default: V, low: float | None = None, high: float | None = None) -> V:
        """The value, or `default` (taken as it is) where the file does not state it."""
        ...

    def require_list(
        self, key: str, kind: type[V], length: int, low: float | None = None, high: float | None = None
    ) -> list[V]:
        """A list of exactly `length` values; one lone value stands for all."""
        ...
