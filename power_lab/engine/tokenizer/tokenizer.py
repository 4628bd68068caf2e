"""Byte-level BPE tokenizers built from a GGUF file's own vocabulary, merges and token types.

The merging itself is the `tokenizers` library's. What counts as a special token comes from the file's token types
alone, never from how a token looks; whether a text may contain them is the caller's explicit choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from power_lab.engine import chat
from power_lab.engine.chat import ChatTemplate, Message
from power_lab.errors import TokenizerError

MAX_VOCAB = 1 << 21
MAX_MERGES = 1 << 22
MAX_MARKS = 1 << 16  # control and user-defined tokens: they make a regular expression
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # the format document's token types; 6 (byte) is SPM's
_END_KEYS = ("eos", "eot", "eom")


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's code: byte -> code point. Printable Latin-1 stands for itself, the others are moved to U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {byte: byte for byte in plain} | {byte: 0x100 + index for index, byte in enumerate(moved)}


_CODE = _byte_alphabet()
_BYTE = {point: chr(byte) for byte, point in _CODE.items()}
_ALPHABET = frozenset(map(chr, _CODE.values()))


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging.

    Attributes:
        cuts: regular expressions, applied one after another; every match stands alone.
        whole_words: whether a piece that is in the vocabulary is taken whole, whatever the merges say.
        bos: whether a beginning-of-text token is put first when the file does not say.
    """

    cuts: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False


_GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": PreTokenizer((_LLAMA3,), whole_words=True, bos=True),
    "qwen2": PreTokenizer((_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),)),
}
"""`tokenizer.ggml.pre` -> rules, as llama.cpp and the models' own tokenizers state them. Text is never normalised."""


class Tokenizer:
    """Text to token ids and back. Immutable and safe to use from several threads.

    Attributes:
        vocab_size: number of token ids.
        bos_id: beginning-of-text token, or None.
        add_bos: whether this model's prompts begin with it.
        end_ids: tokens with which the model ends a turn or the text (the file's eos, eot and eom).
        special_ids: control tokens; they carry no text.
        chat_template: the file's template, or None.
        missing_bytes: bytes that no token stands for. Text that holds them loses them, as in the model's own tokenizer.
    """

    def __init__(
        self,
        tokens: list[str],
        types: np.ndarray,
        merges: list[str],
        pre: str,
        *,
        bos_id: int | None = None,
        add_bos: bool | None = None,
        end_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """The first of `end_ids` is what templates call `eos_token`.

        Raises TokenizerError when the parts do not make a whole byte-level tokenizer.
        """
        if pre not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            raise TokenizerError(f"tokenizer.ggml.pre: {pre!r} is not supported.", f"Supported: {known}.")
        rules = PRE_TOKENIZERS[pre]
        if not 1 <= len(tokens) <= MAX_VOCAB or len(types) != len(tokens):
            raise TokenizerError(f"tokenizer.ggml.token_type: {len(types)} types for {len(tokens)} tokens.")
        if len(merges) > MAX_MERGES:
            raise TokenizerError(f"tokenizer.ggml.merges: {len(merges)} merges; at most {MAX_MERGES} are allowed.")
        marks = int(np.isin(types, (CONTROL, USER_DEFINED)).sum())
        if marks > MAX_MARKS:
            raise TokenizerError(f"tokenizer.ggml.token_type: {marks} special tokens; at most {MAX_MARKS} are allowed.")
        self._tokens = tokens
        self._types: list[int] = types.tolist()
        self.vocab_size = len(tokens)
        self.special_ids = frozenset(np.flatnonzero(types == CONTROL).tolist())
        vocab = _vocabulary(tokens, self._types)
        self.missing_bytes = frozenset(byte for byte, point in _CODE.items() if chr(point) not in vocab)
        self._bpe = Engine(models.BPE(vocab, _pairs(merges, vocab), ignore_merges=rules.whole_words))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
            [pre_tokenizers.Split(Regex(cut), "isolated") for cut in rules.cuts]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        plain = {tokens[index]: index for index in np.flatnonzero(types == USER_DEFINED).tolist()}
        self._marks = {False: plain, True: {tokens[index]: index for index in sorted(self.special_ids)} | plain}
        self._control = _alternation({tokens[index]: index for index in self.special_ids})
        self._splits = {special: _alternation(marks) for special, marks in self._marks.items()}
        self.bos_id = self._checked("tokenizer.ggml.bos_token_id", bos_id)
        self.add_bos = (rules.bos if add_bos is None else add_bos) and bos_id is not None
        ends = [self._checked("end token", index) for index in end_ids]
        self.end_ids = frozenset(ends)
        self.chat_template = None
        if chat_template is not None:
            eos = self._text(ends[0] if ends else None)
            self.chat_template = ChatTemplate(chat_template, bos=self._text(bos_id), eos=eos)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that a GGUF file describes. Raises TokenizerError naming a missing or unsupported key."""

        def value(name: str, *kinds: type, needed: bool = False) -> Any:
            key = f"tokenizer.{name}"
            found = metadata.get(key)
            if found is None and not needed:
                return None
            if type(found) not in kinds:
                state = "missing" if found is None else f"{type(found).__name__}, not {kinds[0].__name__}"
                raise TokenizerError(f"{key}: is {state}.", "The model file has no tokenizer that can be used.")
            return found

        model = value("ggml.model", str, needed=True)
        if model != "gpt2":
            raise TokenizerError(
                f"tokenizer.ggml.model: {model!r} is not supported.", "Supported: gpt2 (byte-level BPE)."
            )
        pre = value("ggml.pre", str, needed=True)
        ends = [value(f"ggml.{name}_token_id", int) for name in _END_KEYS]
        types = value("ggml.token_type", np.ndarray, needed=True)
        if types.dtype.kind not in "iu":
            raise TokenizerError(f"tokenizer.ggml.token_type: has {types.dtype} values, not integers.")
        return cls(
            value("ggml.tokens", list, needed=True),
            types,
            value("ggml.merges", list, needed=True),
            pre,
            bos_id=value("ggml.bos_token_id", int),
            add_bos=value("ggml.add_bos_token", bool),
            end_ids=[index for index in ends if index is not None],
            chat_template=value("chat_template", str),
        )

    def encode(self, text: str, *, special: bool, bos: bool, plain: Callable[[str], str] | None = None) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text. No end token is ever appended: a prompt is there to be continued.
            special: whether control tokens written in the text become those tokens (template output) or stay plain text
                (what a user typed). User-defined tokens are ordinary vocabulary and are found in both.
            bos: whether this is the start of a prompt. The one rule: the model's beginning-of-text token is then put
                first if the file asks for it (`add_bos`) and the ids do not begin with it already, so that a template
                which writes it never doubles it.
            plain: applied to the text between special tokens before it is encoded (see `encode_chat`).

        Raises TokenizerError when the text holds lone surrogates.
        """
        ids: list[int] = []
        marks, split = self._marks[special], self._splits[special]
        try:
            for piece in split.split(text) if split else [text]:
                mark = marks.get(piece) if split else None
                if mark is not None:
                    ids.append(mark)
                elif piece:
                    ids += self._bpe.encode(plain(piece) if plain else piece, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            raise TokenizerError("The text is not valid Unicode: it holds lone surrogates or is no string.") from None
        if bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a chat's prompt, with the beginning-of-text token where the model wants it, once.

        Special tokens come from the template only: a message that spells one, say `<|im_end|>`, stays the text that it
        is. Raises ConfigError naming what is wrong with a message, TokenizerError when no template can be used.
        """
        return chat.chat_ids(self, messages, add_generation_prompt)

    def continuation(
        self, output: Sequence[int], message: str | Message, messages: Sequence[Message] | None = None
    ) -> list[int]:
        """Token ids to append to a chat for its next turn; everything before stays token for token the same.

        Args:
            output: the tokens that the model answered, with or without its end token, which is never doubled.
            message: the next message; text is the user's.
            messages: the chat before the answer, for templates that look at it.

        Raises as `encode_chat` does, and TokenizerError if the template does not keep answers as they are, so that
        nothing can be said to follow them.
        """
        turn = {"role": "user", "content": message} if isinstance(message, str) else message
        return chat.continuation(self, output, turn, messages or [{"role": "user", "content": "Hello"}])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a special token gives its name. TokenizerError for an unknown id."""
        kind = self._types[self._checked("token id", token)]
        if kind == NORMAL:
            return self._tokens[token].translate(_BYTE).encode("latin-1")
        return self._tokens[token].encode() if kind in (CONTROL, USER_DEFINED) else b""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(
            self.token_bytes(token) for token in ids if not (skip_special and token in self.special_ids)
        ).decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        """One token for display: what it decodes to alone, or a special token's name."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def replace_special(self, text: str, by: Callable[[str], str]) -> str:
        """The text with every control token that is spelled in it replaced by `by(name)`."""
        return self._control.sub(lambda found: by(found[0]), text) if self._control else text

    def lost(self, text: str) -> str:
        """The characters of a text that the vocabulary cannot hold (see `missing_bytes`), each once, in order."""
        gone = self.missing_bytes
        return "".join(dict.fromkeys(char for char in text if not gone.isdisjoint(char.encode("utf-8", "replace"))))

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.token_bytes(token).decode("utf-8", "replace")

    def _checked(self, what: str, token: Any) -> Any:
        if token is not None and not 0 <= token < self.vocab_size:
            raise TokenizerError(f"{what}: {token} is outside the vocabulary of {self.vocab_size} tokens.")
        return token


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Normal tokens only: nothing that BPE merges may come out as a special token."""
    normal = [index for index, kind in enumerate(types) if kind == NORMAL]
    vocab = {tokens[index]: index for index in normal}
    if len(vocab) != len(normal):
        twice = next(index for index in normal if vocab[tokens[index]] != index)
        raise TokenizerError(f"tokenizer.ggml.tokens: token {twice} ({tokens[twice]!r}) comes twice.")
    strange = set("".join(vocab)) - _ALPHABET
    if strange or "" in vocab:
        bad = next(index for index in normal if not tokens[index] or set(tokens[index]) & strange)
        raise TokenizerError(f"tokenizer.ggml.tokens: token {bad} ({tokens[bad]!r}) is not in byte-level code.")
    for index, kind in enumerate(types):
        if kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED):
            raise TokenizerError(
                f"tokenizer.ggml.token_type: token {index} has type {kind}, unknown in byte-level BPE."
            )
        if kind in (CONTROL, USER_DEFINED) and not tokens[index]:
            raise TokenizerError(f"tokenizer.ggml.tokens: special token {index} is empty.")
    return vocab


def _pairs(merges: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for index, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise TokenizerError(
                f"tokenizer.ggml.merges: merge {index} ({merge!r}) joins tokens that the vocabulary lacks."
            )
        pairs.append((left, right))
    return pairs


def _alternation(marks: Mapping[str, int]) -> re.Pattern[str] | None:
    """Splits a text at marks, the longest first where several begin at one place."""
    if not marks:
        return None
    return re.compile("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")")
