"""Byte-level BPE (source: GPT-2, Radford et al. 2019): text is cut into words, a word's UTF-8 bytes are merged by rank.

The merging is the `tokenizers` library's.
"""

from __future__ import annotations

from tokenizers import Tokenizer as Engine
from tokenizers import models
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from power_lab.engine.tokenizer.codec import Spacing
from power_lab.engine.tokenizer.vocabulary import NORMAL, USER_DEFINED, Vocabulary
from power_lab.errors import TokenizerError


def _alphabet() -> dict[int, int]:
    """GPT-2's code: byte -> code point. Printable Latin-1 stands for itself, the others are moved to U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {byte: byte for byte in plain} | {byte: 0x100 + index for index, byte in enumerate(moved)}


_CODE = _alphabet()
_BYTE = {point: chr(byte) for byte, point in _CODE.items()}
_LETTERS = frozenset(map(chr, _CODE.values()))


class ByteLevel:
    """Byte-level BPE."""

    spacing: Spacing = "never"

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab: dict[str, int],
        merges: list[tuple[str, str]],
        pre_tokenizer: PreTokenizer,
        *,
        normalizer: Normalizer | None = None,
        whole_words: bool = False,
    ) -> None:
        """Build the tables.

        Args:
            vocab: what merging may come to. Tokens that are left out, the special ones, never come out of plain text.
            merges: pairs of `vocab` that make a third, the best first. The same pair twice counts where it comes last.
            pre_tokenizer: cuts text into words and spells them in byte-level code.
            normalizer: applied to the text before anything else.
            whole_words: whether a word that is in `vocab` is taken whole, whatever the merges say.

        Raises TokenizerError naming the token that is not in byte-level code.
        """
        self._tokens = vocabulary.tokens
        _check_code(vocabulary)
        self._coded = frozenset(index for token, index in vocab.items() if _LETTERS.issuperset(token))
        self._user_defined = frozenset(vocabulary.of(USER_DEFINED))
        self.missing_bytes = frozenset(byte for byte, point in _CODE.items() if chr(point) not in vocab)
        self._engine = Engine(models.BPE(vocab, merges, ignore_merges=whole_words))
        self._engine.pre_tokenizer = pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        if normalizer is not None:
            self._engine.normalizer = normalizer  # pyright: ignore[reportAttributeAccessIssue]

    def encode(self, text: str, spaced: bool) -> list[int]:
        """Ids of a text; byte-level tokenizers put no space before it."""
        return self._engine.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a user-defined one that is not in `vocab` is spelled as text."""
        if token in self._coded:
            return self._tokens[token].translate(_BYTE).encode("latin-1")
        return self._tokens[token].encode() if token in self._user_defined else b""

    def holds(self, char: str) -> bool:
        """Whether tokens stand for all bytes of a character."""
        return self.missing_bytes.isdisjoint(char.encode("utf-8", "replace"))


def _check_code(vocabulary: Vocabulary) -> None:
    tokens, normal = vocabulary.tokens, vocabulary.of(NORMAL)
    if set("".join([tokens[index] for index in normal])) <= _LETTERS:
        return
    bad = next(index for index in normal if not _LETTERS.issuperset(tokens[index]))
    raise TokenizerError(f"{vocabulary.where}: token {bad} ({tokens[bad][:40]!r}) is not in byte-level code.")
