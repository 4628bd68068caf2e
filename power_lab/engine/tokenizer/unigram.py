"""SentencePiece's unigram tokenizer (source: Kudo 2018): of all ways to cut a text into pieces, the most likely one.

The search is the `tokenizers` library's. What prepares the text is done as SentencePiece and llama.cpp do it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as Engine
from tokenizers import models

from power_lab.engine.tokenizer.charsmap import Charsmap
from power_lab.engine.tokenizer.codec import Spacing
from power_lab.engine.tokenizer.vocabulary import NORMAL, SPACE, USER_DEFINED, Vocabulary
from power_lab.errors import TokenizerError

MAX_PIECE_CHARS = 256  # the search takes the text's length times this


class Unigram:
    """The most likely pieces, with a space written as U+2581 and the unknown token for what no piece holds."""

    missing_bytes = frozenset(range(256))

    def __init__(
        self,
        vocabulary: Vocabulary,
        scores: Sequence[float],
        *,
        unknown: int | None,
        charsmap: Charsmap | None = None,
        spacing: Spacing = "always",
        single_spaces: bool = False,
    ) -> None:
        """Build the table.

        Args:
            scores: log probability of each token.
            charsmap: normalises characters first.
            single_spaces: whether only words count, each with one space before it.

        Raises TokenizerError where there is no unknown token or a piece is too long.
        """
        self.spacing: Spacing = spacing
        self._tokens = vocabulary.tokens
        self._normal = frozenset(vocabulary.of(NORMAL))
        self._user_defined = frozenset(vocabulary.of(USER_DEFINED))
        self._held = vocabulary.named(NORMAL).keys()
        self._charsmap = charsmap
        self._single = single_spaces
        model, self._ids = unigram_model(vocabulary, vocabulary.of(NORMAL), scores, unknown)
        self._engine = Engine(model)

    def encode(self, text: str, spaced: bool) -> list[int]:
        """Ids of a text, with a space before its first word if `spaced`."""
        if self._charsmap is not None:
            text = self._charsmap.normalise(text)
        if self._single:
            text = "".join(SPACE + word for word in text.split(" ") if word)
        else:
            words = text.lstrip(" ")
            before = len(text) - len(words) + (spaced and bool(words))
            text = SPACE * before + words.replace(" ", SPACE)
        return [self._ids[index] for index in self._engine.encode(text, add_special_tokens=False).ids]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a piece stands for; a user-defined token is spelled as text, with spaces."""
        if token in self._normal:
            return self._tokens[token].replace(SPACE, " ").encode()
        return self._tokens[token].encode() if token in self._user_defined else b""

    def holds(self, char: str) -> bool:
        """Whether a character comes back; normalisation may still change it, and surplus spaces go."""
        return SPACE in self._held if char == " " else char != SPACE and char in self._held


def unigram_model(
    vocabulary: Vocabulary, tokens: list[int], scores: Sequence[float], unknown: int | None, byte_fallback: bool = False
) -> tuple[models.Model, list[int]]:
    """The library's unigram over some tokens, and the token that each of its ids means: it names tokens by their place.

    `scores` are of all tokens. Raises TokenizerError where there is no unknown token or a piece is too long.
    """
    texts = vocabulary.tokens
    if unknown is None:
        raise TokenizerError(f"{vocabulary.where}: a unigram tokenizer needs an unknown token.")
    long = next((token for token in tokens if len(texts[token]) > MAX_PIECE_CHARS), None)
    if long is not None:
        raise TokenizerError(f"{vocabulary.where}: token {long} is longer than {MAX_PIECE_CHARS} characters.")
    # The unknown token takes part under an empty name, which no text spells: a piece called <unk> would be found in text.
    # Its score does not count (what is unknown costs 10 more than the worst), but must not be the worst.
    best = max((scores[token] for token in tokens), default=0.0)
    pieces = [("", best), *((texts[token], scores[token]) for token in tokens)]
    return models.Unigram(pieces, 0, byte_fallback), [vocabulary.checked("unknown token", unknown), *tokens]
