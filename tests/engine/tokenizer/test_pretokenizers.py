"""Every pre-tokenizer against llama.cpp by name, and against the `regex` package by its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers

from power_lab.engine.tokenizer import PRE_TOKENIZERS, Tokenizer
from power_lab.engine.tokenizer.bytelevel import ByteLevel
from power_lab.engine.tokenizer.pretokenizers import PreTokenizer
from power_lab.engine.tokenizer.vocabulary import Vocabulary
from tests.engine.tokenizer import toys
from tests.engine.tokenizer.corpus import TEXTS

NAMES, RULES = zip(*{rules.cuts: (name, rules) for name, rules in PRE_TOKENIZERS.items()}.values(), strict=True)
APPROXIMATED = [name for name, rules in PRE_TOKENIZERS.items() if any(r"\p{Lu}" in cut for cut in rules.cuts)]
"""What llama.cpp replaces by rules over ASCII letters; see the module's docstring."""
BEYOND_ASCII_CASE = regex.compile(r"\p{M}|[\p{Lu}\p{Lt}--A-Z]|[\p{Ll}--a-z]", regex.V1)


def metadata(bpe: tuple[list[str], list[str]], pre: str) -> dict[str, Any]:
    """The trained vocabulary, a word that no merge leads to, and a beginning-of-text token."""
    tokens, merges = [*bpe[0], "Ġxyzzy", "<begin>"], bpe[1]
    types = [1] * (len(tokens) - 1) + [3]
    return toys.metadata("gpt2", tokens, types, pre=pre, merges=merges, bos_token_id=len(tokens) - 1)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_name_means_what_it_means_to_llama_cpp(
    uncut_bpe: tuple[list[str], list[str]], pre: str, tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp")
    from tests.engine.tokenizer.llama_cpp import LlamaCpp, write_model

    described = metadata(uncut_bpe, pre)
    tokenizer = Tokenizer.from_gguf(described)
    theirs = LlamaCpp(write_model(tmp_path / "model.gguf", described))
    differ = [
        text
        for text in [*TEXTS, " xyzzy", "a xyzzy"]
        if tokenizer.encode(text, special=False, bos=True) != theirs.ids(text, special=False, bos=True)
    ]
    if pre in APPROXIMATED:
        assert len(differ) <= len(TEXTS) // 4
        differ = [text for text in differ if not BEYOND_ASCII_CASE.search(text)]
    assert not differ


def words(text: str, rules: PreTokenizer) -> list[str]:
    pieces = [text]
    for cut in rules.cuts:
        pieces = [part for piece in pieces for part in split(cut, piece)]
    return pieces


def split(cut: str, text: str) -> list[str]:
    """Matches and what lies between them."""
    parts, at = [], 0
    for match in regex.compile(cut, regex.V0).finditer(text):
        parts += [text[at : match.start()], match[0]]
        at = match.end()
    return [part for part in [*parts, text[at:]] if part]


@pytest.fixture(scope="session")
def plain_bpe(uncut_bpe: tuple[list[str], list[str]]) -> Engine:
    tokens, merges = uncut_bpe
    pairs = [tuple(merge.split(" ")) for merge in merges]
    engine = Engine(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))  # type: ignore[arg-type]
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    return engine


LETTERS = st.sampled_from("aZéÉßǅʰ日ิ\u0301\u0308 \n\r\t\u00a0\u3000'’-/_.,!?$+=<`1½²٣Ⅳ🎉\u200d\x00sSdDlLvVeErRmMtT")
ASSIGNED = st.characters(exclude_categories=["Cn", "Cs"])  # the engines follow different versions of Unicode
TEXT = st.one_of(st.text(LETTERS, max_size=30), st.text(ASSIGNED, max_size=20), st.sampled_from(TEXTS))


@pytest.fixture(scope="session")
def codecs(uncut_bpe: tuple[list[str], list[str]]) -> list[ByteLevel]:
    """One for each of RULES, all merging as `plain_bpe` does."""
    tokens, merges = uncut_bpe
    vocabulary = Vocabulary(tokens, np.ones(len(tokens), np.int32))
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    return [ByteLevel(vocabulary, vocab, pairs, rules.build()) for rules in RULES]


@pytest.mark.parametrize("index", range(len(RULES)), ids=lambda index: NAMES[index])
@given(text=TEXT)
@settings(max_examples=100, deadline=None)
def test_words_are_those_of_another_regex_engine(
    codecs: list[ByteLevel], plain_bpe: Engine, index: int, text: str
) -> None:
    wanted = [token for word in words(text, RULES[index]) for token in plain_bpe.encode(word).ids]
    assert codecs[index].encode(text, spaced=False) == wanted
