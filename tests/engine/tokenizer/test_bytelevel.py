"""Byte-level BPE against llama.cpp's recorded and live ids, an independent BPE and itself."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.tokenizer import NORMAL, Tokenizer
from tests.engine.tokenizer.corpus import TEXTS
from tests.engine.tokenizer.toys import CODE, byte_level

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
WORDS = [
    "Hello", " world", "it's", "'ll", " ", "   ", "\n\n", "\t", "123", "½", "é", "日本", "한글", "привет", "🎉", "_", "!=",
]  # fmt: skip
TEXT = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(WORDS), max_size=12).map("".join))


@pytest.mark.parametrize("pre", GOLDEN["ids"])
def test_ids_are_llama_cpps(smol_metadata: dict[str, Any], pre: str) -> None:
    tokenizer = Tokenizer.from_gguf({**smol_metadata, "tokenizer.ggml.pre": pre})
    assert len(GOLDEN["ids"][pre]) == len(GOLDEN["texts"]) >= 40
    for text, (plain, parsed) in zip(GOLDEN["texts"], GOLDEN["ids"][pre], strict=True):
        assert tokenizer.encode(text, special=False, bos=False) == plain, text
        assert tokenizer.encode(text, special=True, bos=False) == parsed, text


def test_ids_are_llama_cpps_live(smol: Tokenizer, smollm2_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from tests.engine.tokenizer.llama_cpp import LlamaCpp

    theirs = LlamaCpp(smollm2_path)
    rng = random.Random(7)
    names = ["<|im_start|>", "<|im_end|>", "<|im_", "<file_sep>"]
    mixed = ["".join(rng.choice(WORDS + names) for _ in range(rng.randint(1, 14))) for _ in range(100)]
    for text in [*TEXTS, *mixed]:
        for special in (False, True):
            assert smol.encode(text, special=special, bos=True) == theirs.ids(text, special=special, bos=True), text


@pytest.fixture(scope="session")
def reference(smol_metadata: dict[str, Any]) -> Callable[[str], list[int]]:
    """Byte-level BPE as its paper has it, in the slowest way: merge the best pair until none is left."""
    ids = {token: index for index, token in enumerate(smol_metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(smol_metadata["tokenizer.ggml.merges"])}

    def words(text: str) -> Iterator[str]:
        for part in regex.split(r"(\p{N})", text):
            yield from regex.findall(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", part)

    def encode(text: str) -> list[int]:
        out: list[int] = []
        for word in words(text):
            symbols = [CODE[b] for b in word.encode()]
            symbols = [symbol for symbol in symbols if symbol in ids]
            while True:
                pairs = [(ranks.get(pair, 1 << 30), i) for i, pair in enumerate(pairwise(symbols))]
                rank, at = min(pairs, default=(1 << 30, 0))
                if rank == 1 << 30:
                    break
                symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            out += [ids[symbol] for symbol in symbols]
        return out

    return encode


@given(text=TEXT)
@settings(max_examples=300, deadline=None)
def test_ids_are_the_reference_bpes_and_decode_back(
    smol: Tokenizer, reference: Callable[[str], list[int]], text: str
) -> None:
    ids = smol.encode(text, special=False, bos=True)
    assert ids == reference(text) == smol.encode(text, special=False, bos=True)
    kept = bytes(byte for byte in text.encode() if byte not in smol.missing_bytes)
    assert b"".join(map(smol.token_bytes, ids)) == kept
    assert (smol.decode(ids) == text) == (smol.lost(text) == "")


def test_whole_words_only_where_the_rules_say_so() -> None:
    """llama-bpe takes a piece of the vocabulary whole even if no merge leads to it."""
    for pre, ids in [("llama-bpe", [256]), ("gpt-2", [*b"abc"])]:
        tokenizer = byte_level([*CODE.values(), "abc"], [NORMAL] * 257, pre=pre)
        assert tokenizer.encode("abc", special=False, bos=False) == ids


def test_a_repeated_merge_counts_where_it_comes_first() -> None:
    tokens = [*CODE.values(), "ab", "bc"]
    tokenizer = byte_level(tokens, [NORMAL] * 258, ["a b", "b c", "a b"])
    assert tokenizer.encode("abc", special=False, bos=False) == [256, ord("c")]


def test_facts_of_the_default_model(smol: Tokenizer) -> None:
    assert (smol.vocab_size, smol.bos_id, smol.add_bos, smol.end_ids) == (49152, 1, False, {2})
    assert smol.special_ids == set(range(17)) and smol.chat_template is not None and not smol.space_prefix
    assert smol.lost("a\x04b\x04é") == "\x04"
    assert [smol.piece(i) for i in (2, 28, 905)] == ["<|im_end|>", ",", " world"]
