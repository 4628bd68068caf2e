"""What every token id is: its text and its type. Both come from the file; nothing is guessed from how a token looks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from power_lab.errors import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""The token types of the GGUF format document, which are SentencePiece's."""

MAX_VOCAB = 1 << 21
MAX_TOKEN_CHARS = 1 << 12  # the longest tokens in use have some 500: runs of one character
MAX_MARKS = 1 << 16  # special and user-defined tokens; Gemma has 6,414
SPACE = "\u2581"  # what SentencePiece writes for a space


class Vocabulary:
    """Token texts and types, checked.

    Attributes:
        where: how messages name the place that texts come from.
        tokens: text of each id, as the file spells it.
        types: type of each id.
        size: number of ids.
        special: ids of control and unknown tokens: what only templates write.
    """

    def __init__(self, tokens: list[str], types: np.ndarray, where: str = "tokenizer.ggml.tokens") -> None:
        """`types` is one integer a token. Only unused tokens may be empty, and these alone may have a text in common: none.

        Raises TokenizerError naming the key and the token that is wrong.
        """
        if not 1 <= len(tokens) <= MAX_VOCAB or len(types) != len(tokens):
            raise TokenizerError(f"tokenizer.ggml.token_type: {len(types)} types for {len(tokens)} tokens.")
        if types.dtype.kind not in "iu":
            raise TokenizerError(f"tokenizer.ggml.token_type: has {types.dtype} values, not integers.")
        strange = np.flatnonzero((types < NORMAL) | (types > BYTE))
        if len(strange):
            raise TokenizerError(
                f"tokenizer.ggml.token_type: token {strange[0]} has type {types[strange[0]]}, which is unknown."
            )
        self.where = where
        self.tokens = tokens
        self.types: list[int] = types.tolist()
        self.size = len(tokens)
        self._of = {kind: np.flatnonzero(types == kind).tolist() for kind in range(NORMAL, BYTE + 1)}
        self.special = frozenset((*self._of[CONTROL], *self._of[UNKNOWN]))
        self._check_texts()

    def of(self, kind: int) -> list[int]:
        """Ids of one type, rising."""
        return self._of[kind]

    def named(self, kind: int) -> dict[str, int]:
        """Text -> id of one type."""
        return {self.tokens[index]: index for index in self._of[kind]}

    def checked(self, what: str, token: int) -> int:
        """The token, if it is one. Raises TokenizerError, which begins with `what`."""
        if not 0 <= token < self.size:
            raise TokenizerError(f"{what}: {token} is outside the vocabulary of {self.size} tokens.")
        return token

    def byte_ids(self) -> dict[int, int]:
        """Byte -> id, of the tokens of type BYTE, which are named <0x00> to <0xFF>. Raises TokenizerError."""
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        found: dict[int, int] = {}
        for index in self._of[BYTE]:
            if self.tokens[index] not in names:
                raise TokenizerError(
                    f"{self.where}: byte token {index} is named {self.tokens[index][:40]!r}, not like <0x0A>."
                )
            found[names[self.tokens[index]]] = index
        return found

    def _check_texts(self) -> None:
        tokens, where = self.tokens, self.where
        long = next((index for index, token in enumerate(tokens) if len(token) > MAX_TOKEN_CHARS), None)
        if long is not None:
            raise TokenizerError(
                f"{where}: token {long} has {len(tokens[long])} characters; at most {MAX_TOKEN_CHARS} are allowed."
            )
        marks = [*self.special, *self._of[USER_DEFINED]]
        if len(marks) > MAX_MARKS:
            raise TokenizerError(f"{where}: {len(marks)} are special tokens; at most {MAX_MARKS} are allowed.")
        if "" in tokens:
            empty = next((index for index in (*marks, *self._of[NORMAL]) if not tokens[index]), None)
            if empty is not None:
                raise TokenizerError(f"{where}: token {empty} is empty.")
        if len(set(tokens)) != self.size - max(0, tokens.count("") - 1):
            twice = _first_repeated(tokens)
            raise TokenizerError(f"{where}: token {twice} ({tokens[twice][:40]!r}) comes twice.")


def _first_repeated(tokens: Iterable[str]) -> int:
    seen: set[str] = set()
    for index, token in enumerate(tokens):
        if token and token in seen:
            return index
        seen.add(token)
    raise AssertionError("no token is repeated")
