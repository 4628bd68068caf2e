"""GGUF metadata that makes no tokenizer is refused by the key that is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from power_lab.engine.tokenizer import MAX_MARKS, Tokenizer
from power_lab.engine.tokenizer.vocabulary import MAX_TOKEN_CHARS
from power_lab.errors import TokenizerError
from tests.engine.tokenizer import toys
from tests.engine.tokenizer.toys import CODE

BYTE_LEVEL: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"ggml.model": "bert"}, "tokenizer.ggml.model: 'bert'"),
    "model missing": ({"ggml.model": None}, "tokenizer.ggml.model: is missing"),
    "pre": ({"ggml.pre": "deepseek-v9"}, "tokenizer.ggml.pre: 'deepseek-v9'"),
    "pre missing": ({"ggml.pre": None}, "tokenizer.ggml.pre: is missing"),
    "tokens": ({"ggml.tokens": None}, "tokenizer.ggml.tokens: is missing"),
    "tokens type": ({"ggml.tokens": np.zeros(3)}, "tokenizer.ggml.tokens: is ndarray"),
    "types missing": ({"ggml.token_type": None}, "tokenizer.ggml.token_type: is missing"),
    "types float": ({"ggml.token_type": np.ones(257)}, "float64 values"),
    "types short": ({"ggml.token_type": np.ones(3, np.int32)}, "3 types for 257 tokens"),
    "type unknown": ({"ggml.token_type": np.array([1] * 256 + [9], np.int32)}, "token 256 has type 9"),
    "type zero": ({"ggml.token_type": np.array([1] * 256 + [0], np.int32)}, "token 256 has type 0"),
    "type byte": ({"ggml.token_type": np.array([1] * 256 + [6], np.int32)}, r"token 256 has type 6 \(byte\)"),
    "bos beyond": ({"ggml.bos_token_id": 257}, "tokenizer.ggml.bos_token_id: 257 is outside"),
    "eos beyond": ({"ggml.eos_token_id": 1 << 31}, "is outside the vocabulary"),
    "eot text": ({"ggml.eot_token_id": "2"}, "tokenizer.ggml.eot_token_id: is str"),
    "add_bos": ({"ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token: is int"),
    "merge": ({"ggml.merges": ["a bc"]}, r"merge 0 \('a bc'\)"),
    "merge no space": ({"ggml.merges": ["ab"]}, "merge 0"),
    "merge result": ({"ggml.merges": ["a b"]}, "merge 0"),
    "token twice": ({"ggml.tokens": [*CODE.values(), "a"], "ggml.token_type": np.ones(257, np.int32)}, "comes twice"),
    "token code": ({"ggml.tokens": [*CODE.values(), "a b"], "ggml.token_type": np.ones(257, np.int32)}, "256 .'a b'."),
    "token empty": ({"ggml.tokens": [*CODE.values(), ""]}, "token 256 is empty"),
    "normal empty": ({"ggml.tokens": [*CODE.values(), ""], "ggml.token_type": np.ones(257, np.int32)}, "256 is empty"),
    "token long": ({"ggml.tokens": [*CODE.values(), "x" * (MAX_TOKEN_CHARS + 1)]}, "token 256 has 4097 characters"),
    "template": ({"chat_template": ["x"]}, "tokenizer.chat_template: is list"),
    "template named": ({"chat_templates": ["rag"]}, "tokenizer.chat_template.rag: is missing"),
}


@pytest.mark.parametrize("case", BYTE_LEVEL)
def test_unusable_byte_level_metadata(case: str) -> None:
    change, said = BYTE_LEVEL[case]
    metadata = {
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


def scores(*last: float) -> np.ndarray:
    return np.array([0.0] * 257 + list(last), np.float32)


SENTENCEPIECE: dict[str, tuple[dict[str, Any], str]] = {
    "scores missing": ({"scores": None}, "tokenizer.ggml.scores: is missing"),
    "scores short": ({"scores": scores(1.0)}, "scores: 258 scores for 259 tokens"),
    "scores whole": ({"scores": np.ones(259, np.int32)}, "scores: has int32 values"),
    "score nan": ({"scores": scores(0.0, float("nan"))}, "scores: token 258 has score nan"),
    "score inf": ({"scores": scores(float("inf"), 0.0)}, "scores: token 257 has score inf"),
    "unknown beyond": ({"unknown_token_id": 259}, "tokenizer.ggml.unknown_token_id: 259 is outside"),
    "space prefix": ({"add_space_prefix": 1}, "tokenizer.ggml.add_space_prefix: is int"),
    "byte name": ({"token_type": np.array([6] * 257 + [1, 1], np.int32)}, "byte token 0 is named '<unk>'"),
    "byte missing": (
        {"token_type": np.array([5, 6, 5] + [6] * 254 + [1, 1], np.int32), "unknown_token_id": None},
        "no token for byte 0x01",
    ),
}


@pytest.mark.parametrize("case", SENTENCEPIECE)
def test_unusable_sentencepiece_metadata(case: str) -> None:
    change, said = SENTENCEPIECE[case]
    with pytest.raises(TokenizerError, match=said):
        Tokenizer.from_gguf(toys.pieces([("a", -1.0), ("b", -2.0)], **change))


def test_end_tokens_come_from_the_metadata() -> None:
    keys = {"eos_token_id": 10, "eot_token_id": 11, "eom_token_id": 12}
    metadata = toys.metadata("gpt2", [*CODE.values()], [1] * 256, pre="gpt-2", merges=[], **keys)
    assert Tokenizer.from_gguf(metadata).end_ids == {10, 11, 12}


def test_too_many_special_tokens_are_refused() -> None:
    count = MAX_MARKS + 1
    names = [f"<{index}>" for index in range(count)]
    with pytest.raises(TokenizerError, match=f"{count} are special tokens"):
        toys.byte_level(names, [3] * count)


def test_named_templates_are_kept_by_name() -> None:
    metadata = toys.metadata("gpt2", [*CODE.values()], [1] * 256, pre="gpt-2", merges=[], chat_template="a")
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "b"}
    template = Tokenizer.from_gguf(metadata | named).chat_template
    assert template is not None and template.sources == {"default": "a", "tool_use": "b"}
