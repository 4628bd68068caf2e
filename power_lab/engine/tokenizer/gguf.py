"""Tokenizers out of a GGUF file's metadata (source: the GGUF format document's `tokenizer.ggml` keys)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from power_lab.engine.tokenizer.bytelevel import ByteLevel
from power_lab.engine.tokenizer.charsmap import Charsmap
from power_lab.engine.tokenizer.codec import Codec
from power_lab.engine.tokenizer.pretokenizers import PRE_TOKENIZERS
from power_lab.engine.tokenizer.sentencepiece import SentencePiece, check_scores
from power_lab.engine.tokenizer.tokenizer import Tokenizer
from power_lab.engine.tokenizer.unigram import Unigram
from power_lab.engine.tokenizer.vocabulary import BYTE, NORMAL, UNKNOWN, Vocabulary
from power_lab.errors import TokenizerError

_END_KEYS = ("ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id")  # the text's, a turn's, a message's end
_MODELS = {"gpt2": "byte-level BPE", "llama": "SentencePiece BPE", "t5": "SentencePiece unigram"}


def read(metadata: Mapping[str, Any]) -> Tokenizer:
    """Behind `Tokenizer.from_gguf`."""
    keys = _Keys(metadata)
    model = keys.require("ggml.model", str)
    if model not in _MODELS:
        supported = ", ".join(f"{name} ({what})" for name, what in _MODELS.items())
        raise TokenizerError(f"tokenizer.ggml.model: {model[:40]!r} is not supported.", f"Supported: {supported}.")
    vocabulary = Vocabulary(keys.require("ggml.tokens", list), keys.require("ggml.token_type", np.ndarray))
    codec, bos = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}[model](keys, vocabulary)
    ends = [keys.token(name, vocabulary) for name in _END_KEYS]
    return Tokenizer(
        vocabulary,
        codec,
        bos_id=keys.token("ggml.bos_token_id", vocabulary),
        add_bos=keys.get("ggml.add_bos_token", bool, bos),
        end_ids=[token for token in ends if token is not None],
        chat_template=_templates(keys),
    )


class _Keys:
    """Typed access to the metadata below `tokenizer.`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, name: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(f"tokenizer.{name}")
        if value is None:
            return default
        if type(value) is not kind:
            raise TokenizerError(f"tokenizer.{name}: is {type(value).__name__}, not {kind.__name__}.")
        return value

    def require(self, name: str, kind: type) -> Any:
        value = self.get(name, kind, None)
        if value is None:
            raise TokenizerError(f"tokenizer.{name}: is missing.", "The model file has no tokenizer that can be used.")
        return value

    def token(self, name: str, vocabulary: Vocabulary) -> int | None:
        value = self.get(name, int, None)
        return None if value is None else vocabulary.checked(f"tokenizer.{name}", value)


def _templates(keys: _Keys) -> str | dict[str, str] | None:
    """The chat template, or by name all of them where the file lists more than one."""
    template = keys.get("chat_template", str, None)
    names = keys.get("chat_templates", list, [])
    if not names:
        return template
    more = {name: keys.require(f"chat_template.{name}", str) for name in names if name != "default"}
    return more if template is None else {"default": template, **more}


def _byte_level(keys: _Keys, vocabulary: Vocabulary) -> tuple[Codec, bool]:
    """The codec, and whether prompts begin with the beginning-of-text token if the file does not say."""
    pre = keys.require("ggml.pre", str)
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"tokenizer.ggml.pre: {pre[:40]!r} is not supported.", f"Supported: {', '.join(PRE_TOKENIZERS)}."
        )
    if vocabulary.of(BYTE):
        raise TokenizerError(
            f"tokenizer.ggml.token_type: token {vocabulary.of(BYTE)[0]} has type {BYTE} (byte), "
            "which byte-level BPE does not have."
        )
    rules, vocab = PRE_TOKENIZERS[pre], vocabulary.named(NORMAL)
    merges = _pairs(keys.require("ggml.merges", list), vocab)
    return ByteLevel(vocabulary, vocab, merges, rules.build(), whole_words=rules.whole_words), rules.bos


def _pairs(merges: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Merges as pairs; the same twice counts where it comes first, as in llama.cpp."""
    pairs: dict[tuple[str, str], None] = {}
    for index, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise TokenizerError(
                f"tokenizer.ggml.merges: merge {index} ({merge[:80]!r}) joins tokens that the vocabulary lacks."
            )
        pairs[left, right] = None
    return list(pairs)


def _sentencepiece(keys: _Keys, vocabulary: Vocabulary) -> tuple[Codec, bool]:
    codec = SentencePiece(
        vocabulary,
        keys.require("ggml.scores", np.ndarray),
        unknown=_unknown(keys, vocabulary),
        spacing="always" if keys.get("ggml.add_space_prefix", bool, True) else "never",
    )
    return codec, True


def _unigram(keys: _Keys, vocabulary: Vocabulary) -> tuple[Codec, bool]:
    if keys.get("ggml.treat_whitespace_as_suffix", bool, False):
        raise TokenizerError("tokenizer.ggml.treat_whitespace_as_suffix: true is not supported.")
    scores = keys.require("ggml.scores", np.ndarray)
    check_scores(scores, vocabulary)
    table = keys.get("ggml.precompiled_charsmap", np.ndarray, None)
    if table is not None and table.dtype.itemsize != 1:
        raise TokenizerError(f"tokenizer.ggml.precompiled_charsmap: has {table.dtype} values, not bytes.")
    codec = Unigram(
        vocabulary,
        scores.tolist(),
        unknown=_unknown(keys, vocabulary),
        charsmap=Charsmap(table.tobytes(), "tokenizer.ggml.precompiled_charsmap") if table is not None else None,
        spacing="always" if keys.get("ggml.add_space_prefix", bool, True) else "never",
        single_spaces=keys.get("ggml.remove_extra_whitespaces", bool, False),
    )
    return codec, False


def _unknown(keys: _Keys, vocabulary: Vocabulary) -> int | None:
    stated = keys.token("ggml.unknown_token_id", vocabulary)
    return vocabulary.of(UNKNOWN)[0] if stated is None and vocabulary.of(UNKNOWN) else stated
