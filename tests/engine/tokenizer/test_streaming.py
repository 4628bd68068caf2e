"""Streaming gives the text back byte for byte, for every corpus line, however the tokens are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.detokenizer import StreamDecoder
from power_lab.engine.tokenizer import CONTROL, NORMAL, Tokenizer
from power_lab.engine.weights.gguf import GgufFile
from tests.engine.tokenizer import folders
from tests.engine.tokenizer.corpus import BROKEN, TEXTS
from tests.engine.tokenizer.toys import CODE, byte_level, pieces

KINDS = ["smollm2", "gemma", "byte-level", "pieces", "pieces folder", "byte-level folder"]


@pytest.fixture(scope="session")
def tokenizers(
    smol: Tokenizer, gemma_path: Path, uncut_bpe: tuple[list[str], list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tokenizer]:
    vocab, merges = folders.trained_pieces()
    scored = [(piece, -float(index)) for piece, index in vocab.items() if index > 258]
    here: Callable[[str], Path] = tmp_path_factory.mktemp
    with GgufFile.open(gemma_path) as file:
        gemma = Tokenizer.from_gguf(file.metadata)
    return {
        "smollm2": smol,
        "gemma": gemma,
        "byte-level": byte_level(uncut_bpe[0], [NORMAL] * len(uncut_bpe[0]), uncut_bpe[1], "llama-bpe"),
        "pieces": Tokenizer.from_gguf(pieces(scored, [("<s>", CONTROL)])),
        "pieces folder": Tokenizer.from_folder(folders.legacy_llama(here("pieces"), vocab, merges)),
        "byte-level folder": Tokenizer.from_folder(folders.byte_level("GPT2Tokenizer", here("bytes"), *uncut_bpe)),
    }


def kept(tokenizer: Tokenizer, text: str) -> str:
    """What comes back: all but bytes that have no token, and a space for SentencePiece's mark of one."""
    if tokenizer.lost("\u2581"):
        return text.replace("\u2581", " ")
    return bytes(byte for byte in text.encode() if byte not in tokenizer.missing_bytes).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_streams_back_at_every_cut(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    for text in TEXTS:
        wanted = kept(tokenizer, text)
        ids = tokenizer.encode(text, special=False, bos=True)
        assert tokenizer.decode(ids) == wanted
        for cut in range(len(ids) + 1):
            decoder = StreamDecoder(tokenizer, start=True)
            shown = decoder.push(ids[:cut])
            assert wanted.startswith(shown)
            assert shown + decoder.push(ids[cut:]) + decoder.flush() == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_one_byte_spell_broken_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    single = {data[0]: token for token in range(tokenizer.vocab_size) if len(data := tokenizer.token_bytes(token)) == 1}
    assert single.keys() | tokenizer.missing_bytes == set(range(256))
    for data in BROKEN:
        data = bytes(byte for byte in data if byte in single)
        ids = [single[byte] for byte in data]
        assert b"".join(map(tokenizer.token_bytes, ids)) == data
        decoder = StreamDecoder(tokenizer)
        shown = "".join(decoder.push([token]) for token in ids) + decoder.flush()
        assert shown == data.decode("utf-8", "replace")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_tokens_stream_as_they_decode(tokenizers: dict[str, Tokenizer], data: Any) -> None:
    tokenizer = tokenizers[data.draw(st.sampled_from(KINDS))]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    for start in (True, False):
        decoder = StreamDecoder(tokenizer, start=start)
        assert "".join(decoder.push([token]) for token in ids) + decoder.flush() == tokenizer.decode(ids, start=start)
    spelled = b"".join(b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token) for token in ids)
    assert tokenizer.decode(ids, start=False) == spelled.decode("utf-8", "replace")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back_from_any_kind(tokenizers: dict[str, Tokenizer], data: Any) -> None:
    tokenizer = tokenizers[data.draw(st.sampled_from(KINDS))]
    text = data.draw(st.text(max_size=30))
    ids = tokenizer.encode(text, special=False, bos=True)
    assert ids == tokenizer.encode(text, special=False, bos=True)
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.special_ids.isdisjoint(ids[tokenizer.add_bos :])
    assert (tokenizer.decode(ids) == text) == (tokenizer.lost(text) == "")


def test_a_space_before_a_prompt_is_not_taken_from_an_output() -> None:
    tokenizer = Tokenizer.from_gguf(pieces([("▁a", 0.0), ("▁", -1.0)], [("<s>", CONTROL)]))
    assert StreamDecoder(tokenizer).push([257, 257]) == " a a"
    decoder = StreamDecoder(tokenizer, start=True)
    assert [decoder.push([token]) for token in (259, 258, 257)] == ["", "", " a"]
    twin = StreamDecoder(tokenizer, start=True).clone()
    assert twin.push([257]) == "a"
    assert StreamDecoder(byte_level([*CODE.values()], [NORMAL] * 256), start=True).push([32]) == " "
