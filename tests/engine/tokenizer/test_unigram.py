"""Unigram tokenizers of GGUF files against llama.cpp and a slow search, with and without a table of characters."""

from __future__ import annotations

import json
import random
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers, trainers

from power_lab.engine.tokenizer import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Tokenizer
from power_lab.engine.tokenizer.charsmap import Charsmap
from power_lab.errors import TokenizerError
from tests.engine.tokenizer.corpus import TEXTS
from tests.engine.tokenizer.toys import metadata

TABLE = {
    "\u00a0": " ", "\u3000": " ", "\n": " ", "\t": " ", "ﬁ": "fi", "½": "1/2", "e\u0301": "é", "e\u0301\u0323": "ệ", "Å": "Å",
    "\u200b": "", "Ａ": "A", "ab\0"[:2]: "AB", "abc": "x", "🎉": "party",
}  # fmt: skip


def compiled(table: dict[str, str]) -> bytes:
    """A double array as darts-clone writes it: a unit holds its label, and the way by XOR to where its children are."""
    blob, units, used, bases = b"", {0: 0}, {0}, set()
    trie: dict[Any, Any] = {}
    for key, text in table.items():
        node = trie
        for byte in key.encode():
            node = node.setdefault(byte, {})
        node[None] = len(blob)
        blob += text.encode() + b"\0"

    def place(index: int, node: dict[Any, Any]) -> None:
        labels = [0 if label is None else label for label in node]
        free = (base for base in range(1, 1 << 20) if base not in bases)
        base = next(base for base in free if not used & {base ^ label for label in labels})
        bases.add(base)
        used.update(base ^ label for label in labels)
        units[index] |= (base ^ index) << 10 | (0x100 if None in node else 0)
        for label, child in node.items():
            units[base ^ (label or 0)] = child | 1 << 31 if label is None else label
        for label, child in node.items():
            if label is not None:
                place(base ^ label, child)

    place(0, trie)
    size = max(units) // 256 * 256 + 256
    data = struct.pack(f"<{size}I", *(units.get(index, 0) for index in range(size)))
    return struct.pack("<I", len(data)) + data + blob


@pytest.fixture(scope="session")
def trained() -> list[tuple[str, float]]:
    engine = Engine(models.Unigram())
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)  # type: ignore[assignment]
    trainer = trainers.UnigramTrainer(vocab_size=1500, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    engine.train_from_iterator(TEXTS, trainer)
    vocab = json.loads(engine.to_str())["model"]["vocab"][1:]
    # C strings end at NUL; what looks like <|this|> llama.cpp takes for a control token
    return [(piece, score) for piece, score in vocab if not set("\0|") & set(piece)]


EXTRA = [("<|x|>", CONTROL), ("<tool>", USER_DEFINED), ("</s>", CONTROL)]


def t5(scored: list[tuple[str, float]], **keys: Any) -> dict[str, Any]:
    """<unk>, scored pieces, EXTRA."""
    tokens = ["<unk>", *(piece for piece, _ in scored), *(name for name, _ in EXTRA)]
    types = [UNKNOWN, *[NORMAL] * len(scored), *(kind for _, kind in EXTRA)]
    scores = np.array([0.0, *(score for _, score in scored), *[0.0] * len(EXTRA)], np.float32)
    end = len(tokens) - 1
    return metadata("t5", tokens, types, scores=scores, unknown_token_id=0, eos_token_id=end, pad_token_id=0, **keys)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("table", [True, False])
def test_ids_are_llama_cpps(trained: list[tuple[str, float]], single: bool, table: bool, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from tests.engine.tokenizer.llama_cpp import LlamaCpp, write_model

    charsmap = np.frombuffer(compiled(TABLE), np.uint8) if table else None
    described = t5(
        trained,
        precompiled_charsmap=charsmap,
        remove_extra_whitespaces=single,
        add_space_prefix=True,
        add_bos_token=False,
        add_eos_token=False,
    )
    tokenizer = Tokenizer.from_gguf(described)
    theirs = LlamaCpp(write_model(tmp_path / "model.gguf", described))
    for text in [*TEXTS, "<|x|> a<tool>b  c</s>d", "abcab ﬁe\u0301\u0323e\u0301\u200bÅ🎉"]:
        for special in (False, True):
            if not special and "</s>" in text:
                continue  # llama.cpp finds it in plain text, as a piece
            assert tokenizer.encode(text, special=special, bos=True) == theirs.ids(text, special=special, bos=True), (
                text
            )


PIECES = st.dictionaries(st.text("ab▁é", min_size=1, max_size=4), st.integers(-9, -1).map(float), max_size=12)


@given(PIECES, st.text("abé ", max_size=12))
@settings(max_examples=500, deadline=None)
def test_the_way_taken_is_the_most_likely(scores: dict[str, float], text: str) -> None:
    tokenizer = Tokenizer.from_gguf(t5(list(scores.items()), add_space_prefix=False))
    ids = tokenizer.encode(text, special=False, bos=True)
    spelled = text.replace(" ", "▁")
    penalty = min(scores.values(), default=0.0) - 10
    best = [0.0, *[-1e9] * len(spelled)]
    for end in range(1, len(spelled) + 1):
        best[end] = best[end - 1] + penalty
        for begin in range(end):
            best[end] = max(best[end], best[begin] + scores.get(spelled[begin:end], -1e9))
    names = list(scores)
    known = sum(scores[names[token - 1]] for token in ids if token)
    unknown = len(spelled) - sum(len(names[token - 1]) for token in ids if token)
    assert known + penalty * unknown == best[-1]
    assert all(pair != (0, 0) for pair in pairwise(ids)), "what is unknown is one token"


KEYS = st.dictionaries(st.text("aé🎉b\n", min_size=1, max_size=4), st.text("xyé ", max_size=4), min_size=1, max_size=8)


@given(KEYS, st.text("aé🎉b\nc", max_size=20))
@settings(max_examples=300, deadline=None)
def test_the_longest_beginning_is_replaced(table: dict[str, str], text: str) -> None:
    wanted, at = "", 0
    while at < len(text):
        found = [key for key in table if text.startswith(key, at)]
        key = max(found, key=len) if found else text[at]
        wanted += table.get(key, key)
        at += len(key)
    assert Charsmap(compiled(table), "here").normalise(text) == wanted


def test_damaged_tables_end_in_a_typed_error_or_in_text() -> None:
    rng = random.Random(3)
    whole = compiled(TABLE)
    refused = 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            charsmap = Charsmap(bytes(data[: rng.randint(0, len(data))] if rng.random() < 0.2 else data), "here")
            for text in TABLE:
                charsmap.normalise(text * 3)
        except TokenizerError as error:
            refused += 1
            assert str(error).startswith("here: ")
    assert refused > 100


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"precompiled_charsmap": np.zeros(3, np.uint8)}, "precompiled_charsmap: 3 bytes"),
        ({"precompiled_charsmap": np.full(8, 255, np.uint8)}, "precompiled_charsmap: 8 bytes"),
        ({"precompiled_charsmap": np.zeros(9, np.int32)}, "precompiled_charsmap: has int32 values"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"scores": np.full(5, np.nan, np.float32)}, "score nan"),
        ({"token_type": np.array([1] * 5, np.int32), "unknown_token_id": None}, "needs an unknown token"),
    ],
)
def test_unusable_metadata(change: dict[str, Any], said: str) -> None:
    described = t5([("a", -1.0)])
    changed = described | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(TokenizerError, match=said):
        Tokenizer.from_gguf({key: value for key, value in changed.items() if value is not None})


def test_spaces_and_what_is_lost(trained: list[tuple[str, float]]) -> None:
    tokenizer = Tokenizer.from_gguf(t5(trained, remove_extra_whitespaces=True))
    ids = tokenizer.encode("  All  human ", special=False, bos=True)
    assert tokenizer.decode(ids) == "All human" and tokenizer.space_prefix
    assert tokenizer.lost("a 龘\u2581") == "\u2581" or tokenizer.lost("a \ue123") == "\ue123"
    long = [("a" * 300, -1.0)]
    with pytest.raises(TokenizerError, match="longer than 256"):
        Tokenizer.from_gguf(t5(long))
