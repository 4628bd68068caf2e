"""Special tokens by type alone, and one rule for the beginning of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED, Tokenizer
from power_lab.engine.tokenizer.marks import Mark, Marks
from power_lab.errors import TokenizerError
from tests.engine.tokenizer.toys import CODE, byte_level


def toy(extra: Sequence[tuple[str, int]] = (), **options: Any) -> Tokenizer:
    """All bytes, then extra tokens with their types. Byte b has id b."""
    types = [NORMAL] * 256 + [kind for _, kind in extra]
    return byte_level([*CODE.values(), *(name for name, _ in extra)], types, **options)


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
    assert tokenizer.replace_special(text, str.upper) == "<|END|><|fake|><tool><pad>"


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


def test_templates_are_given_the_files_own_eos() -> None:
    """Not the lowest of the end tokens: an end of turn can come before it in the vocabulary."""
    extra = [("<|turn|>", CONTROL), ("<|text|>", CONTROL)]
    tokenizer = toy(extra, end_ids=[257, 256], chat_template="{{ eos_token }}")
    assert tokenizer.chat_template is not None and tokenizer.chat_template.eos == "<|text|>"


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


NAMES = st.lists(st.text("ab<>\n é🎉", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


@given(NAMES, st.text("ab<>\n é🎉", max_size=30))
@settings(max_examples=500, deadline=None)
def test_marks_are_found_leftmost_and_longest(names: list[str], text: str) -> None:
    wanted: list[tuple[str, int | None]] = []
    at = begin = 0
    while at < len(text):
        found = [name for name in names if text.startswith(name, at)]
        if found:
            name = max(found, key=len)
            wanted += [(text[begin:at], None), (name, names.index(name) + 7)]
            at = begin = at + len(name)
        else:
            at += 1
    wanted.append((text[begin:], None))
    marks = Marks(Mark(name, index + 7) for index, name in enumerate(names))
    assert [piece for piece in marks.split(text) if piece[0]] == [piece for piece in wanted if piece[0]]


def test_marks_take_the_white_space_that_their_flags_say() -> None:
    marks = Marks([Mark("<l>", 1, lstrip=True), Mark("<r>", 2, rstrip=True), Mark("w", 3, single_word=True)])
    assert marks.split("a <l> b <r> c") == [("a", None), (" <l>", 1), (" b ", None), ("<r> ", 2), ("c", None)]
    assert marks.split("wa w aw") == [("wa ", None), ("w", 3), (" aw", None)]
