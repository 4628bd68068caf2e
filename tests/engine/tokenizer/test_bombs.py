"""Tokenizer bombs: vocabularies and texts made to take for ever. They end in a typed error, or soon; pytest's limit is the guard."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from power_lab.engine.tokenizer import CONTROL, MAX_MARKS, NORMAL, PRE_TOKENIZERS, USER_DEFINED, Tokenizer
from power_lab.engine.tokenizer.tokenizer_json import MAX_BYTES, MAX_QUOTES
from power_lab.errors import ModelFileError, TokenizerError
from tests.engine.tokenizer import folders
from tests.engine.tokenizer.test_unigram import t5
from tests.engine.tokenizer.toys import CODE, byte_level, pieces

LONG = 1 << 20
TEXTS = [
    "a" * LONG,
    " " * LONG,
    "ab" * (LONG // 2),
    "<" * LONG,
    "\n " * (LONG // 2) + "x",
    "\u0301" * LONG,
    "🎉" * (LONG // 4),
]
NAMES = [
    sorted(names)[0]
    for names in {
        r.cuts: [n for n in PRE_TOKENIZERS if PRE_TOKENIZERS[n] == r] for r in PRE_TOKENIZERS.values()
    }.values()
]


@pytest.mark.parametrize("pre", NAMES)
def test_long_texts_of_one_character_for_every_pre_tokenizer(pre: str) -> None:
    tokenizer = byte_level([*CODE.values(), "aa", "aaaa", "ĠĠ"], [NORMAL] * 259, ["a a", "aa aa", "Ġ Ġ"], pre)
    for text in TEXTS:
        text = text[: LONG // 8]
        ids = tokenizer.encode(text, special=False, bos=False)
        assert (
            len(ids) <= len(text.encode()) and tokenizer.decode(ids[:1000]) == text[: len(tokenizer.decode(ids[:1000]))]
        )


def test_long_texts_of_one_character_in_sentencepiece() -> None:
    scored = [("a" * size, float(size)) for size in (2, 4, 8, 16, 3, 5)] + [("▁" * size, 0.0) for size in range(1, 20)]
    tokenizer = Tokenizer.from_gguf(pieces(scored))
    for text in TEXTS:
        text = text[: LONG // 4]
        assert tokenizer.decode(tokenizer.encode(text, special=False, bos=True)) == text


def test_pieces_that_are_all_beginnings_of_each_other() -> None:
    """Each merge makes a piece one longer, and looks up one longer still."""
    tokenizer = Tokenizer.from_gguf(
        pieces([("a" * size, float(size)) for size in range(2, 3000)], add_space_prefix=False)
    )
    assert len(tokenizer.encode("a" * 60_000, special=False, bos=True)) == 60_000 // 2999 + 1


def test_unigram_pieces_that_all_begin_alike() -> None:
    tokenizer = Tokenizer.from_gguf(t5([("a" * size, -1.0) for size in range(1, 257)], add_space_prefix=False))
    assert len(tokenizer.encode("a" * (LONG // 4), special=False, bos=True)) == LONG // 4 // 256


def test_as_many_special_tokens_as_are_allowed() -> None:
    count = MAX_MARKS - 1
    names = [f"<{'<' * (index % 7)}{index}" for index in range(count)]
    tokenizer = byte_level(
        [*CODE.values(), *names], [NORMAL] * 256 + [CONTROL, USER_DEFINED] * (count // 2) + [CONTROL] * (count % 2)
    )
    text = "<" * (LONG // 2) + names[776] + "<<<" * 100
    assert 256 + 776 in tokenizer.encode(text, special=True, bos=False)
    assert tokenizer.replace_special(text, lambda name: "").count("7") < text.count("7")
    with pytest.raises(TokenizerError, match="special tokens"):
        byte_level([*CODE.values(), *names, "<a", "<b"], [NORMAL] * 256 + [CONTROL] * (count + 2))


@pytest.mark.parametrize("score", [0.0, 3e38, -3e38, 1e-45])
def test_scores_at_the_ends_of_their_range(score: float) -> None:
    for metadata in (
        pieces([("a", score), ("aa", -score), ("aaa", score)], add_space_prefix=False),
        t5([("a", score), ("aa", -score), ("▁", score)], add_space_prefix=False),
    ):
        tokenizer = Tokenizer.from_gguf(metadata)
        assert tokenizer.decode(tokenizer.encode("aaaaa", special=False, bos=True)) == "aaaaa"


def test_large_files_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with open(path, "wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ModelFileError, match="longer than"):
        Tokenizer.from_folder(tmp_path)
    path.write_bytes(b'{"model":{"vocab":{' + b'"":0,' * (MAX_QUOTES // 2 + 1))
    with pytest.raises(TokenizerError, match="texts"):
        Tokenizer.from_folder(tmp_path)
    path.write_bytes(b'{"version":' + b"[" * 1_000_000)
    with pytest.raises(TokenizerError, match="JSON"):
        Tokenizer.from_folder(tmp_path)
    path.write_bytes(b'{"version":[' + b"0," * 3_000_000 + b"0]}")
    with pytest.raises(TokenizerError, match="model"):
        Tokenizer.from_folder(tmp_path)


def test_merges_that_wait_for_each_other_are_only_ranks(tmp_path: Path) -> None:
    """No merge can lead back: what it makes is longer than its parts. Repeated ones are harmless too."""
    tokens = [*CODE.values(), "ab", "ba", "aba", "bab", "abab"]
    merges = ["ab a", "a ba", "b ab", "ba b", "a b", "b a", "ab ab"] * 1000
    tokenizer = byte_level(tokens, [NORMAL] * len(tokens), merges)
    assert tokenizer.decode(tokenizer.encode("ababababa", special=False, bos=False)) == "ababababa"
    folder = folders.edit(
        tmp_path,
        model={"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": merges},
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": False},
        decoder={"type": "ByteLevel"},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("ababababa", special=False, bos=False)) == "ababababa"
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["merges"] == merges


def test_a_vocabulary_of_nothing() -> None:
    for tokens, types in ((["x"], [CONTROL]), (["<unk>"], [2])):
        tokenizer = byte_level(tokens, np.array(types))
        assert tokenizer.encode("abc", special=False, bos=False) == [] and tokenizer.lost("abc") == "abc"
