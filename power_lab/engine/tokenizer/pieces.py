"""Tokenizers over characters with U+2581 for a space: BPE by ranked merges (Llama 2, Gemma) and unigram (T5, XLM-R).

The encoding is the `tokenizers` library's.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as Engine
from tokenizers.models import Model
from tokenizers.normalizers import Normalizer
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import Metaspace, PreTokenizer
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from power_lab.engine.tokenizer.charsmap import Charsmap
from power_lab.engine.tokenizer.codec import Spacing
from power_lab.engine.tokenizer.vocabulary import NORMAL, SPACE, USER_DEFINED, Vocabulary


class Pieces:
    """A library model and what prepares text for it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        model: Model,
        ids: Sequence[int] | None,
        *,
        spacing: Spacing,
        charsmap: Charsmap | None = None,
        normalizers: Sequence[Normalizer] = (),
        spaced: Sequence[Normalizer] = (),
        splits: Sequence[PreTokenizer] = (),
        metaspace: bool = False,
        split_words: bool = False,
    ) -> None:
        """Build the two pipelines, with and without a space before the text.

        Args:
            ids: the token that each of the model's ids means; None where they are the tokens' own.
            charsmap: normalises characters first, as SentencePiece does (the library's own looks at graphemes).
            normalizers: applied to every text; `spaced`: before these, where a space is due.
            splits: cuts that come first.
            metaspace: whether U+2581 is put for spaces, also for the one that is due if the text does not begin with one.
            split_words: whether `metaspace` also cuts before each U+2581.
        """
        self.spacing: Spacing = spacing
        self._ids = ids
        self._charsmap = charsmap
        self._tokens = vocabulary.tokens
        bytes_of = {token: bytes([byte]) for byte, token in vocabulary.byte_ids().items()}
        self._bytes = bytes_of
        self._held = vocabulary.named(NORMAL).keys() | vocabulary.named(USER_DEFINED).keys()
        self._text = frozenset((*vocabulary.of(NORMAL), *vocabulary.of(USER_DEFINED)))
        self.missing_bytes = frozenset(range(256)) - {byte[0] for byte in bytes_of.values()}

        def pipeline(due: bool) -> Engine:
            engine = Engine(model)
            engine.normalizer = Normalizers([*(spaced if due else ()), *normalizers])  # pyright: ignore[reportAttributeAccessIssue]
            marks = [Metaspace(SPACE, "always" if due else "never", split_words)] if metaspace else []
            engine.pre_tokenizer = PreTokenizers([*splits, *marks])  # pyright: ignore[reportAttributeAccessIssue]
            return engine

        self._engines = {due: pipeline(due) for due in (False, True)}

    def encode(self, text: str, spaced: bool) -> list[int]:
        """Ids of a text, with a space before it if `spaced`."""
        if self._charsmap is not None:
            text = self._charsmap.normalise(text)
        ids = self._engines[spaced].encode(text, add_special_tokens=False).ids
        return ids if self._ids is None else [self._ids[index] for index in ids]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a piece or byte token stands for."""
        if token in self._text:
            return self._tokens[token].replace(SPACE, " ").encode()
        return self._bytes.get(token, b"")

    def holds(self, char: str) -> bool:
        """Whether a character comes back: U+2581 comes back as a space. What a normaliser changes does not count."""
        if char in (" ", SPACE):
            return char == " " and SPACE in self._held
        return char in self._held or self.missing_bytes.isdisjoint(char.encode("utf-8", "replace"))
