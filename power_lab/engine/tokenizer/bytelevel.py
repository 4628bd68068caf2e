"""Byte-level BPE (source: GPT-2, Radford et al. 2019): text is cut into words, a word's UTF-8 bytes are merged by rank.

The merging is the `tokenizers` library's.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from power_lab.engine.tokenizer.codec import Spacing
from power_lab.engine.tokenizer.pretokenizers import PreTokenizer
from power_lab.engine.tokenizer.vocabulary import BYTE, NORMAL, Vocabulary
from power_lab.errors import TokenizerError

MAX_MERGES = 1 << 22


def _alphabet() -> dict[int, int]:
    """GPT-2's code: byte -> code point. Printable Latin-1 stands for itself, the others are moved to U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {byte: byte for byte in plain} | {byte: 0x100 + index for index, byte in enumerate(moved)}


_CODE = _alphabet()
_BYTE = {point: chr(byte) for byte, point in _CODE.items()}
_LETTERS = frozenset(map(chr, _CODE.values()))


class ByteLevel:
    """Byte-level BPE over a vocabulary's normal tokens: nothing that is merged comes out as a special token."""

    spacing: Spacing = "never"

    def __init__(self, vocabulary: Vocabulary, merges: list[str], rules: PreTokenizer) -> None:
        """`merges` are "left right", the best first; a repeated one counts where it comes first.

        Raises TokenizerError naming the token or merge that is wrong.
        """
        if vocabulary.of(BYTE):
            raise TokenizerError(
                f"tokenizer.ggml.token_type: token {vocabulary.of(BYTE)[0]} has type {BYTE} (byte), "
                "which byte-level BPE does not have."
            )
        if len(merges) > MAX_MERGES:
            raise TokenizerError(f"tokenizer.ggml.merges: {len(merges)} merges; at most {MAX_MERGES} are allowed.")
        self._tokens = vocabulary.tokens
        self._types = vocabulary.types
        vocab = vocabulary.named(NORMAL)
        _check_code(vocab)
        self.missing_bytes = frozenset(byte for byte, point in _CODE.items() if chr(point) not in vocab)
        self._engine = Engine(models.BPE(vocab, _pairs(merges, vocab), ignore_merges=rules.whole_words))
        self._engine.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
            [pre_tokenizers.Split(Regex(cut), "isolated") for cut in rules.cuts]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def encode(self, text: str, spaced: bool) -> list[int]:
        """Ids of a text; byte-level tokenizers put no space before it."""
        return self._engine.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a normal token stands for."""
        return self._tokens[token].translate(_BYTE).encode("latin-1") if self._types[token] == NORMAL else b""

    def holds(self, char: str) -> bool:
        """Whether tokens stand for all bytes of a character."""
        return self.missing_bytes.isdisjoint(char.encode("utf-8", "replace"))


def _check_code(vocab: dict[str, int]) -> None:
    strange = set("".join(vocab)) - _LETTERS
    if strange or "" in vocab:
        bad = next(token for token in vocab if not token or set(token) & strange)
        raise TokenizerError(f"tokenizer.ggml.tokens: token {vocab[bad]} ({bad[:40]!r}) is not in byte-level code.")


def _pairs(merges: Iterable[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    pairs: dict[tuple[str, str], None] = {}
    for index, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise TokenizerError(
                f"tokenizer.ggml.merges: merge {index} ({merge[:80]!r}) joins tokens that the vocabulary lacks."
            )
        pairs[left, right] = None
    return list(pairs)
