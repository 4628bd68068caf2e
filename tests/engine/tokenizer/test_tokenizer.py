"""The tokenizer against llama.cpp's recorded ids, an independent BPE and itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.tokenizer import CONTROL, MAX_MARKS, NORMAL, PRE_TOKENIZERS, UNUSED, USER_DEFINED, Tokenizer
from power_lab.engine.weights.gguf import GgufFile
from power_lab.errors import TokenizerError

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
CODE = {b: chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
CODE |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in CODE)}


@pytest.fixture(scope="session")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    with GgufFile.open(smollm2_path) as file:
        return file.metadata


@pytest.fixture(scope="session")
def smol(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


def toy(
    extra: Sequence[tuple[str, int]] = (), merges: Sequence[str] = (), pre: str = "gpt-2", **options: Any
) -> Tokenizer:
    """All bytes, then what the merges make, then extra tokens with their types. Byte b has id b."""
    tokens = [CODE[b] for b in range(256)] + [merge.replace(" ", "") for merge in merges] + [name for name, _ in extra]
    types = np.array([NORMAL] * (256 + len(merges)) + [kind for _, kind in extra], np.int32)
    return Tokenizer(tokens, types, list(merges), pre, **options)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_ids_are_llama_cpps(metadata: dict[str, Any], pre: str) -> None:
    tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": pre})
    assert len(GOLDEN["ids"][pre]) == len(GOLDEN["texts"]) >= 40
    for text, (plain, parsed) in zip(GOLDEN["texts"], GOLDEN["ids"][pre], strict=True):
        assert tokenizer.encode(text, special=False, bos=False) == plain, text
        assert tokenizer.encode(text, special=True, bos=False) == parsed, text


def reference_ids(metadata: dict[str, Any]) -> Any:
    """Byte-level BPE as its paper has it, in the slowest way: merge the best pair until none is left."""
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}

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


WORDS = [
    "Hello",
    " world",
    "it's",
    "'ll",
    " ",
    "   ",
    "\n\n",
    "\t",
    "123",
    "½",
    "é",
    "日本",
    "한글",
    "привет",
    "🎉",
    "_",
    "!=",
]
TEXT = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(WORDS), max_size=12).map("".join))


@given(text=TEXT)
@settings(max_examples=300, deadline=None)
def test_ids_are_the_reference_bpes_and_decode_back(
    metadata: dict[str, Any], smol: Tokenizer, reference: Any, text: str
) -> None:
    ids = smol.encode(text, special=False, bos=True)
    assert ids == reference(text)
    kept = bytes(byte for byte in text.encode() if byte not in smol.missing_bytes)
    assert b"".join(map(smol.token_bytes, ids)) == kept
    assert (smol.decode(ids) == text) == (smol.lost(text) == "")


@pytest.fixture(scope="session")
def reference(metadata: dict[str, Any]) -> Any:
    return reference_ids(metadata)


def test_ids_are_llama_cpps_live(smol: Tokenizer, smollm2_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    import random
    import urllib.request

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(smollm2_path), 256, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    rng = random.Random(7)
    names = ["<|im_start|>", "<|im_end|>", "<|im_", "<file_sep>"]
    for _ in range(200):
        text = "".join(rng.choice(WORDS + names) for _ in range(rng.randint(1, 14)))
        for special in (False, True):
            body = json.dumps({"content": text, "parse_special": special, "add_special": True}).encode()
            request = urllib.request.Request(
                f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                theirs = json.load(answer)["tokens"]
            assert smol.encode(text, special=special, bos=True) == theirs, text


def test_special_tokens_come_from_token_types_alone() -> None:
    marks = [("<|end|>", CONTROL), ("<|fake|>", NORMAL), ("<tool>", USER_DEFINED), ("<pad>", UNUSED)]
    tokenizer = toy(marks)
    end, fake, tool = 256, 257, 258
    text = "<|end|><|fake|><tool><pad>"
    parsed = tokenizer.encode(text, special=True, bos=False)
    assert parsed == [end, *b"<|fake|>", tool, *b"<pad>"]
    typed = tokenizer.encode(text, special=False, bos=False)
    assert typed == [*b"<|end|><|fake|>", tool, *b"<pad>"]
    assert tokenizer.special_ids == {end}
    assert tokenizer.decode([end, fake, tool, 259]) == "<|fake|><tool>"
    assert tokenizer.decode([end, tool], skip_special=False) == "<|end|><tool>"
    assert tokenizer.piece(end) == "<|end|>" and tokenizer.piece(0xC3) == "\ufffd"


def test_the_longest_special_token_wins() -> None:
    tokenizer = toy([("<a>", CONTROL), ("<a><b>", CONTROL)])
    assert tokenizer.encode("<a><b><a>", special=True, bos=False) == [257, 256]


def test_one_rule_for_the_beginning_of_text() -> None:
    bos = ("<s>", CONTROL)
    for pre, add, wanted in [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ]:
        tokenizer = toy([bos], pre=pre, bos_id=256, add_bos=add)
        head = [256] if wanted else []
        assert tokenizer.add_bos is wanted
        assert tokenizer.encode("a", special=False, bos=True) == [*head, ord("a")]
        assert tokenizer.encode("", special=False, bos=True) == head
        assert tokenizer.encode("a", special=False, bos=False) == [ord("a")]
        assert tokenizer.encode("<s>a", special=True, bos=True) == [256, ord("a")], "never doubled, never taken away"
        assert tokenizer.encode("<s>", special=False, bos=True) == [*head, *b"<s>"], "typed text is no token"
    assert toy(add_bos=True).encode("a", special=False, bos=True) == [ord("a")], "no such token"


def test_whole_words_only_where_the_rules_say_so() -> None:
    """llama-bpe takes a piece of the vocabulary whole even if no merge leads to it."""
    for pre, ids in [("llama-bpe", [256]), ("gpt-2", [*b"abc"])]:
        assert toy([("abc", NORMAL)], pre=pre, add_bos=False).encode("abc", special=False, bos=False) == ids


def test_facts_of_the_default_model(smol: Tokenizer) -> None:
    assert (smol.vocab_size, smol.bos_id, smol.add_bos, smol.end_ids) == (49152, 1, False, {2})
    assert smol.special_ids == set(range(17)) and smol.chat_template is not None
    assert smol.lost("a\x04b\x04é") == "\x04"
    assert [smol.piece(i) for i in (2, 28, 905)] == ["<|im_end|>", ",", " world"]


@pytest.mark.parametrize("token", [-1, 49152, 1 << 40])
def test_unknown_ids_are_refused(smol: Tokenizer, token: int) -> None:
    for ask in (smol.token_bytes, smol.piece, lambda token: smol.decode([5, token])):
        with pytest.raises(TokenizerError, match=f"token id: {token} is outside the vocabulary of 49152"):
            ask(token)


def test_text_that_is_no_unicode_is_refused(smol: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="lone surrogates"):
        smol.encode("a\ud800", special=False, bos=True)
    with pytest.raises(TokenizerError, match="not valid Unicode"):
        smol.encode("\ud800<|im_end|>", special=True, bos=True)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"ggml.model": "llama"}, "tokenizer.ggml.model: 'llama'"),
    "pre": ({"ggml.pre": "deepseek-v9"}, "tokenizer.ggml.pre: 'deepseek-v9'"),
    "pre missing": ({"ggml.pre": None}, "tokenizer.ggml.pre: is missing"),
    "tokens": ({"ggml.tokens": None}, "tokenizer.ggml.tokens: is missing"),
    "tokens type": ({"ggml.tokens": np.zeros(3)}, "tokenizer.ggml.tokens: is ndarray"),
    "types missing": ({"ggml.token_type": None}, "tokenizer.ggml.token_type: is missing"),
    "types float": ({"ggml.token_type": np.ones(257)}, "float64 values"),
    "types short": ({"ggml.token_type": np.ones(3, np.int32)}, "3 types for 257 tokens"),
    "type unknown": ({"ggml.token_type": np.array([1] * 256 + [9], np.int32)}, "token 256 has type 9"),
    "bos beyond": ({"ggml.bos_token_id": 257}, "tokenizer.ggml.bos_token_id: 257 is outside"),
    "eos beyond": ({"ggml.eos_token_id": 1 << 31}, "is outside the vocabulary"),
    "eot text": ({"ggml.eot_token_id": "2"}, "tokenizer.ggml.eot_token_id: is str"),
    "add_bos": ({"ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token: is int"),
    "merge": ({"ggml.merges": ["a bc"]}, r"merge 0 \('a bc'\)"),
    "merge no space": ({"ggml.merges": ["ab"]}, "merge 0"),
    "merge result": ({"ggml.merges": ["a b"]}, "merge 0"),
    "token twice": ({"ggml.tokens": [*CODE.values(), "a"], "ggml.token_type": np.ones(257, np.int32)}, "comes twice"),
    "token code": ({"ggml.tokens": [*CODE.values(), "a b"], "ggml.token_type": np.ones(257, np.int32)}, "256 .'a b'."),
    "token empty": ({"ggml.tokens": [*CODE.values(), ""]}, "special token 256 is empty"),
    "template": ({"chat_template": ["x"]}, "tokenizer.chat_template: is list"),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_metadata_is_refused_by_key(case: str) -> None:
    change, said = BAD[case]
    metadata: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": [*CODE.values(), "</s>"],
        "ggml.token_type": np.array([1] * 256 + [3], np.int32),
        "ggml.merges": [],
        "ggml.eos_token_id": 256,
    }
    good = Tokenizer.from_gguf({f"tokenizer.{key}": value for key, value in metadata.items()})
    assert good.end_ids == {256} and good.bos_id is None and good.chat_template is None
    metadata |= change
    with pytest.raises(TokenizerError, match=said):
        Tokenizer.from_gguf({f"tokenizer.{key}": value for key, value in metadata.items() if value is not None})


def test_end_tokens_come_from_the_metadata() -> None:
    keys = {"eos_token_id": 10, "eot_token_id": 11, "eom_token_id": 12}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(CODE.values()),
        "tokenizer.ggml.token_type": np.ones(256, np.uint8),
        "tokenizer.ggml.merges": [],
    }
    assert Tokenizer.from_gguf(metadata).end_ids == {10, 11, 12}


def test_templates_are_given_the_files_own_eos() -> None:
    """Not the lowest of the end tokens: an end of turn can come before it in the vocabulary."""
    extra = [("<|turn|>", CONTROL), ("<|text|>", CONTROL)]
    tokenizer = toy(extra, end_ids=[257, 256], chat_template="{{ eos_token }}")
    assert tokenizer.chat_template is not None and tokenizer.chat_template.eos == "<|text|>"


def test_too_many_special_tokens_are_refused_before_they_become_a_regular_expression() -> None:
    count = MAX_MARKS + 1
    names = [f"<{index}>" for index in range(count)]
    with pytest.raises(TokenizerError, match=f"{count} special tokens"):
        Tokenizer(names, np.full(count, 3, np.int32), [], "gpt-2")
