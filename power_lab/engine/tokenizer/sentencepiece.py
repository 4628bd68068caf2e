"""SentencePiece's BPE (source: Kudo and Richardson 2018): of all neighbours that make a piece, the best scored merge first.

GGUF files keep a score for each piece and no list of merges. `tokenizers` ranks pairs of pieces, not pieces, so it cannot
hold the rule "of equal scores, the leftmost": in "xyx" with x+y = y+x (runs of spaces are so), one order of the pairs is
right in one place and wrong in another. Hence the merging here. It gives llama.cpp's ids.
"""

from __future__ import annotations

import re
from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy as np

from power_lab.engine.tokenizer.codec import Spacing
from power_lab.engine.tokenizer.vocabulary import NORMAL, SPACE, USER_DEFINED, Vocabulary
from power_lab.errors import TokenizerError

_CACHED_WORDS = 1 << 16
_CACHED_CHARS = 48  # longer words do not come again, and would make the cache's size unbounded


class SentencePiece:
    """BPE by scores over characters, with a space written as U+2581 and bytes for characters that no piece holds.

    Encoding takes O(n log n) time in the length of the longest word, some 5 us a character at worst.
    """

    def __init__(
        self, vocabulary: Vocabulary, scores: np.ndarray, *, unknown: int | None, spacing: Spacing = "always"
    ) -> None:
        """`scores`: one float a token. `unknown`: the token for characters that neither pieces nor bytes can hold.

        Raises TokenizerError naming the key that is wrong.
        """
        normal = vocabulary.of(NORMAL)
        check_scores(scores, vocabulary)
        self._tokens = vocabulary.tokens
        self._types = vocabulary.types
        self.spacing: Spacing = spacing
        self._ids = vocabulary.named(NORMAL)
        _, ranks = np.unique(-scores[normal], return_inverse=True)
        self._ranks: dict[str, int] = dict(zip(self._ids, ranks.tolist(), strict=True))
        self._bytes = vocabulary.byte_ids()
        self._byte_of = {token: bytes([byte]) for byte, token in self._bytes.items()}
        self._unknown = unknown
        self.missing_bytes = frozenset(range(256)) - self._bytes.keys()
        if self.missing_bytes and unknown is None:
            raise TokenizerError(
                f"tokenizer.ggml.tokens: there is no token for byte 0x{min(self.missing_bytes):02X}, "
                "and no unknown token either.",
                "The file needs tokenizer.ggml.unknown_token_id or all of <0x00> to <0xFF>.",
            )
        self._cut = _word_starts(self._ids)
        self._cached = lru_cache(_CACHED_WORDS)(self._merge)

    def encode(self, text: str, spaced: bool) -> list[int]:
        """Ids of a text, with a space before it if `spaced`."""
        text = (SPACE if spaced else "") + text.replace(" ", SPACE)
        ids: list[int] = []
        for word in self._cut.split(text):
            ids += self._cached(word) if len(word) <= _CACHED_CHARS else self._merge(word)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a user-defined one is spelled as text, with spaces."""
        kind = self._types[token]
        if kind == NORMAL:
            return self._tokens[token].replace(SPACE, " ").encode()
        return self._tokens[token].encode() if kind == USER_DEFINED else self._byte_of.get(token, b"")

    def holds(self, char: str) -> bool:
        """Whether a character comes back: U+2581 comes back as a space."""
        if char in (" ", SPACE):
            return char == " " and SPACE in self._ids
        return not self.missing_bytes or char in self._ids or self._has_bytes(char)

    def _has_bytes(self, char: str) -> bool:
        return self.missing_bytes.isdisjoint(char.encode("utf-8", "replace"))

    def _merge(self, word: str) -> list[int]:
        """Ids of a word. A symbol is a part of the word: it begins where one is, and ends at after[begin]."""
        size = len(word)
        rank = self._ranks.get
        after = [*range(1, size + 1), 0]  # 0 where no symbol begins any more
        before = [*range(-1, size)]  # where the symbol begins that ends here
        queue = [(found, i, i + 2) for i in range(size - 1) if (found := rank(word[i : i + 2])) is not None]
        heapify(queue)
        while queue:
            _, begin, end = heappop(queue)
            middle = after[begin]
            if not middle or after[middle] != end:
                continue  # one of the two has grown or was taken
            after[begin], after[middle], before[end] = end, 0, begin
            left, right = before[begin], after[end]
            if left >= 0 and (found := rank(word[left:end])) is not None:
                heappush(queue, (found, left, end))
            if right and (found := rank(word[begin:right])) is not None:
                heappush(queue, (found, begin, right))
        ids: list[int] = []
        at = 0
        while at < size:
            ids += self._symbol(word[at : after[at]])
            at = after[at]
        return ids

    def _symbol(self, symbol: str) -> list[int]:
        """A piece as it is; a character that is none as its bytes, or as the unknown token."""
        token = self._ids.get(symbol)
        if token is not None:
            return [token]
        if self._unknown is not None and self.missing_bytes and not self._has_bytes(symbol):
            return [self._unknown]
        return [self._bytes[byte] for byte in symbol.encode()]


def check_scores(scores: np.ndarray, vocabulary: Vocabulary) -> None:
    """Raises TokenizerError unless there is a finite score for every normal token."""
    if len(scores) != vocabulary.size:
        raise TokenizerError(f"tokenizer.ggml.scores: {len(scores)} scores for {vocabulary.size} tokens.")
    if scores.dtype.kind != "f":
        raise TokenizerError(f"tokenizer.ggml.scores: has {scores.dtype} values, not floats.")
    normal = np.array(vocabulary.of(NORMAL), np.int64)
    bad = normal[~np.isfinite(scores[normal])]
    if len(bad):
        raise TokenizerError(f"tokenizer.ggml.scores: token {bad[0]} has score {scores[bad[0]]}.")


def _word_starts(pieces: dict[str, int]) -> re.Pattern[str]:
    """Matches between a word and the space after it, where no piece reaches across: so each word can be merged alone."""
    inside = {SPACE}
    for piece in pieces:
        at = piece.find(SPACE, 1)
        while at > 0:
            inside.add(piece[at - 1])
            at = piece.find(SPACE, at + 1)
    return re.compile(f"(?<=[^{''.join(map(re.escape, sorted(inside)))}])(?={SPACE})")
