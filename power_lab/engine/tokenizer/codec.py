"""What turns text without special tokens into ids, and single ids into bytes."""

from __future__ import annotations

from typing import Literal, Protocol

Spacing = Literal["never", "first", "always"]
"""Where a space is put before the text that an encoder is given: nowhere, at the beginning of a prompt, or there and after
every special token."""


class Codec(Protocol):
    """One kind of tokenizer over one vocabulary. Immutable, safe to use from several threads.

    Attributes:
        spacing: where the caller asks for a space before the text.
        missing_bytes: bytes that no token stands for.
    """

    @property
    def spacing(self) -> Spacing: ...

    @property
    def missing_bytes(self) -> frozenset[int]: ...

    def encode(self, text: str, spaced: bool) -> list[int]:
        """Ids of a text that is not empty. `spaced`: whether the space of `spacing` is due here."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token that is not special; b"" for one that stands for nothing."""
        ...

    def holds(self, char: str) -> bool:
        """Whether encoding keeps this character."""
        ...
