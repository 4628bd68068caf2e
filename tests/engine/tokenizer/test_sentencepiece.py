"""SentencePiece BPE against llama.cpp, a slow reference and transformers' way of storing the same vocabulary."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from power_lab.engine.tokenizer import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED, Tokenizer
from power_lab.engine.weights.gguf import GgufFile
from tests.engine.tokenizer.corpus import BROKEN, TEXTS
from tests.engine.tokenizer.toys import pieces


@pytest.fixture(scope="session")
def gemma_metadata(gemma_path: Path) -> dict[str, Any]:
    with GgufFile.open(gemma_path) as file:
        return file.metadata


@pytest.fixture(scope="session")
def gemma(gemma_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(gemma_metadata)


@pytest.fixture(scope="session")
def trained() -> list[tuple[str, float]]:
    """Pieces like Llama 2's, trained on the corpus; every fourth has the score of the one before it."""
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)  # type: ignore[assignment]
    engine.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=3000, show_progress=False, max_token_length=10))
    vocab = json.loads(engine.to_str())["model"]["vocab"]
    return [
        (piece, -float(rank - rank % 4 // 3)) for piece, rank in vocab.items() if "\0" not in piece
    ]  # C strings end there


EXTRA = [("<|b|>", CONTROL), ("<|x|>", CONTROL), ("<tool>", USER_DEFINED), ("  \n", USER_DEFINED)]


def test_gemmas_ids_are_llama_cpps(gemma: Tokenizer, gemma_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from tests.engine.tokenizer.llama_cpp import LlamaCpp

    theirs = LlamaCpp(gemma_path)
    for text in TEXTS:
        text = text.replace("</s>", "")  # Gemma's is user-defined; llama.cpp takes it for a control token by its name
        for special in (False, True):
            ids = gemma.encode(text, special=special, bos=True)
            assert ids == theirs.ids(text, special=special, bos=True), text


def test_gemmas_ids_are_those_of_the_merges_that_transformers_makes(
    gemma_metadata: dict[str, Any], gemma: Tokenizer
) -> None:
    """In a fast tokenizer scores are spelled out as ranked pairs."""
    from transformers.tokenization_utils_base import generate_merges

    tokens, types = gemma_metadata["tokenizer.ggml.tokens"], gemma_metadata["tokenizer.ggml.token_type"]
    scores = gemma_metadata["tokenizer.ggml.scores"].tolist()
    of = {kind: {tokens[i]: i for i in (types == kind).nonzero()[0].tolist()} for kind in (NORMAL, USER_DEFINED, BYTE)}
    merges = generate_merges(of[NORMAL], {token: scores[i] for token, i in of[NORMAL].items()})
    vocab = of[NORMAL] | of[BYTE] | of[USER_DEFINED] | {"<unk>": 3}
    engine = Engine(models.BPE(vocab, merges, fuse_unk=True, unk_token="<unk>", byte_fallback=True))
    engine.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    engine.add_tokens([AddedToken(token, normalized=False) for token in of[USER_DEFINED]])
    for text in TEXTS:
        assert gemma.encode(text, special=False, bos=False) == engine.encode(text).ids, text


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_are_llama_cpps_with_equal_scores_and_a_space_prefix(
    trained: list[tuple[str, float]], prefix: bool, tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp")
    from tests.engine.tokenizer.llama_cpp import LlamaCpp, write_model

    begin = 257 + len(trained)
    metadata = pieces(trained, EXTRA, add_space_prefix=prefix, add_bos_token=True, bos_token_id=begin)
    tokenizer = Tokenizer.from_gguf(metadata)
    theirs = LlamaCpp(write_model(tmp_path / "model.gguf", metadata))
    for text in [*TEXTS, "<|x|> a<|x|>a <tool>b  \nc<|b|>", "<|b|>a"]:
        for special in (False, True):
            ids = tokenizer.encode(text, special=special, bos=True)
            wanted = theirs.ids(text, special=special, bos=True)
            assert ids == (wanted[1:] if wanted[:2] == [begin, begin] else wanted), text


def slow(text: str, scores: dict[str, float], ids: dict[str, int]) -> list[int]:
    """The definition: of all neighbours that make a piece, merge the best scored, of equals the leftmost."""
    symbols = list(text.replace(" ", "▁"))
    while True:
        found = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not found:
            return [token for symbol in symbols for token in ([ids[symbol]] if symbol in ids else as_bytes(symbol))]
        at = min(found)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def as_bytes(symbol: str) -> list[int]:
    return [byte + 1 for byte in symbol.encode()]


PIECES = st.dictionaries(st.text("ab▁é🎉", min_size=1, max_size=5), st.integers(-3, 3).map(float), max_size=25)
SHORT = st.text("ab é🎉", max_size=25)


@given(PIECES, SHORT)
@example({"▁▁": 0.0, "▁▁▁": 0.0, "▁▁▁▁▁": 0.0}, " " * 9)
@example({"aab": 1.0, "aba": 1.0, "ab": 1.0, "aa": 1.0}, "aabaab")
@settings(max_examples=1000, deadline=None)
def test_any_vocabulary_merges_as_defined(scores: dict[str, float], text: str) -> None:
    tokenizer = Tokenizer.from_gguf(pieces(list(scores.items()), add_space_prefix=False))
    ids = {piece: 257 + index for index, piece in enumerate(scores)}
    assert tokenizer.encode(text, special=False, bos=True) == slow(text, scores, ids)


@given(PIECES, st.text(max_size=20), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back(scores: dict[str, float], text: str, prefix: bool) -> None:
    tokenizer = Tokenizer.from_gguf(pieces(list((scores | {"▁": 0.0}).items()), add_space_prefix=prefix))
    ids = tokenizer.encode(text, special=False, bos=True)
    assert tokenizer.decode(ids) == text.replace("▁", " ") and tokenizer.lost(text) == ("▁" if "▁" in text else "")
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert ids == tokenizer.encode(text, special=False, bos=True)


def test_the_space_before_a_prompt_is_put_and_taken_away_once() -> None:
    begin = 257 + 2
    metadata = pieces([("▁a", 0.0), ("▁", -1.0)], EXTRA[:1], bos_token_id=begin, add_bos_token=True)
    tokenizer = Tokenizer.from_gguf(metadata)
    a, space = 257, 258
    assert tokenizer.space_prefix
    assert tokenizer.encode("a", special=False, bos=True) == [begin, a]
    assert tokenizer.encode(" a", special=False, bos=True) == [begin, space, a]
    assert tokenizer.encode("a", special=False, bos=False) == [ord("a") + 1], "text that goes on has no space before it"
    assert tokenizer.encode("", special=False, bos=True) == [begin]
    assert tokenizer.encode("<|b|>a<|b|> a", special=True, bos=True) == [begin, a, begin, space, a]
    assert [tokenizer.decode(ids) for ids in ([begin, a, a], [a], [space, a], [space])] == ["a a", "a", " a", ""]
    assert tokenizer.decode([a, a], start=False) == " a a"
    assert tokenizer.decode([begin, a], skip_special=False) == "<|b|>a"


def test_unused_and_control_tokens_never_come_out_of_text() -> None:
    """llama.cpp merges text into them where their parts are pieces."""
    extra = [("ab", UNUSED), ("bc", CONTROL), ("cd", NORMAL)]
    tokenizer = Tokenizer.from_gguf(pieces([], extra, add_space_prefix=False))
    assert tokenizer.encode("abcd", special=False, bos=True) == [*as_bytes("ab"), 259]
    assert tokenizer.decode([257, 0, 259]) == "cd", "unused and unknown tokens stand for nothing"


def test_characters_without_pieces_or_bytes_become_the_unknown_token() -> None:
    metadata = pieces([("a", 0.0)], add_space_prefix=False)
    metadata["tokenizer.ggml.token_type"][1 + 0xC3] = UNUSED
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("aéя", special=False, bos=True) == [257, 0, *as_bytes("я")]
    assert (tokenizer.missing_bytes, tokenizer.lost("aéяÀ")) == ({0xC3}, "éÀ")


def test_byte_tokens_spell_what_is_no_text(gemma: Tokenizer) -> None:
    for data in BROKEN:
        ids = [238 + byte for byte in data]
        assert b"".join(map(gemma.token_bytes, ids)) == data
        assert gemma.decode(ids) == data.decode("utf-8", "replace")


def test_facts_of_gemma(gemma: Tokenizer) -> None:
    assert (gemma.vocab_size, gemma.bos_id, gemma.add_bos, gemma.end_ids) == (262144, 2, True, {1})
    assert len(gemma.special_ids) == 6249 and not gemma.space_prefix and gemma.chat_template is None
    assert gemma.lost("é🎉\0") == "" and gemma.piece(108) == "\n\n"
