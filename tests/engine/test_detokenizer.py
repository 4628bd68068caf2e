"""Streaming text: whatever the cuts, the same text as decoding everything at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from power_lab.engine.detokenizer import StreamDecoder
from power_lab.errors import ConfigError


class Pieces:
    """A vocabulary of given byte strings; the last `special` of them are control tokens."""

    def __init__(self, pieces: list[bytes], special: int = 0) -> None:
        self.pieces = pieces
        self.special_ids = frozenset(range(len(pieces) - special, len(pieces)))

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


BYTES = Pieces([bytes([byte]) for byte in range(256)] + [b"<|end|>"], special=1)
END = 256
CHARS = st.sampled_from(["a", "b", "ab", "é", "日", "🎉", "\ufffd", "e\u0301", "\n"])
RAW = st.one_of(
    st.lists(CHARS, max_size=20).map(lambda chars: "".join(chars).encode()),
    st.binary(max_size=20),
    st.lists(st.sampled_from([b"\xe6\x97", b"\xa5", b"\xf0\x9f", b"\x8e\x89", b"\xc3", b"a"]), max_size=9).map(
        b"".join
    ),
)
STOPS = st.lists(st.text(st.sampled_from("abé日🎉\n\ufffd"), min_size=1, max_size=4), max_size=4).map(tuple)


def cut(raw: bytes, marks: list[int]) -> list[bytes]:
    at = sorted({0, len(raw), *(mark % (len(raw) + 1) for mark in marks)})
    return [raw[a:b] for a, b in pairwise(at)]


def at_once(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first (the longest of those), character by character."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(RAW, st.lists(st.integers(0, 100), max_size=8), st.lists(st.integers(0, 100), max_size=8), STOPS)
@example(b"ab", [], [], ("b", "ab"))
@example("日".encode(), [1, 2], [], ())
@example(b"\xf0\x00", [1], [], ("\ufffd",))
@settings(max_examples=1000, deadline=None)
def test_any_cut_streams_the_same_text(
    raw: bytes, tokens: list[int], pushes: list[int], stops: tuple[str, ...]
) -> None:
    vocabulary = Pieces(cut(raw, tokens))
    ids = list(range(len(vocabulary.pieces)))
    want, stop = at_once(raw.decode("utf-8", "replace"), stops)
    decoder = StreamDecoder(vocabulary, stops)
    got, taken = "", 0
    marks = sorted({0, len(ids), *(mark % (len(ids) + 1) for mark in pushes)})
    for a, b in pairwise(marks):
        got += decoder.push(ids[a:b])
        taken += decoder.consumed
        assert want.startswith(got), "only what is certain may be shown"
        if decoder.stopped is not None:
            break
        assert decoder.consumed == b - a
    met = decoder.stopped
    got += decoder.flush()
    assert (got, decoder.stopped) == (want, stop)
    if met is not None:
        enough = [n for n in range(len(ids) + 1) if at_once(certain(b"".join(vocabulary.pieces[:n])), stops)[1]]
        assert taken == enough[0], "taken up to the token that completes the stop string"
    assert decoder.flush() == ""


MORE = [
    first + b"\x80" * n for first in (b"\x80", b"\x90", b"\xa0") for n in range(3)
]  # ends of all kinds of characters


def certain(raw: bytes) -> str:
    """What of a text's beginning no later byte can change."""
    for keep in range(len(raw), max(-1, len(raw) - 4), -1):
        tails = (raw[keep:] + more for more in (b"", b"a", *MORE))
        heads = {(raw[:keep] + tail).decode("utf-8", "replace") for tail in tails}
        sure = raw[:keep].decode("utf-8", "replace")
        if all(head.startswith(sure) for head in heads):
            return sure
    return ""


def stream(decoder: StreamDecoder, raw: bytes) -> list[str]:
    return [decoder.push([byte]) for byte in raw]


def test_incomplete_characters_are_held_back() -> None:
    assert stream(StreamDecoder(BYTES), "é日🎉".encode()) == ["", "é", "", "", "日", "", "", "", "🎉"]
    decoder = StreamDecoder(BYTES)
    assert stream(decoder, b"a\xe6\x97") == ["a", "", ""] and decoder.flush() == "\ufffd"
    assert stream(StreamDecoder(BYTES), b"\xffa\xe6a\xf0\x9fb") == ["\ufffd", "a", "", "\ufffda", "", "", "\ufffdb"]


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    decoder = StreamDecoder(BYTES, ("<end>", "ndx"))
    assert "".join(stream(decoder, b"a<en")) == "a"
    assert decoder.push(b"x") == "<enx"
    assert "".join(stream(decoder, b"<end")) == ""
    assert decoder.flush() == "<end" and decoder.stopped is None


def test_a_stop_string_ends_the_output() -> None:
    decoder = StreamDecoder(Pieces([b"one t", b"wo three", b" four"]), ("two", "three"))
    assert decoder.push([0, 1, 2]) == "one "
    assert (decoder.stopped, decoder.consumed) == ("two", 2)
    assert decoder.push([2]) == "" and decoder.consumed == 0
    assert decoder.flush() == ""


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [(("abc", "b"), "a", "b"), (("abcd", "bc"), "a", "bc"), (("c", "abc", "bc"), "", "abc"), (("cd", "d"), "ab", "cd")],
)
@pytest.mark.parametrize("pieces", [[b"abc", b"d"], [b"a", b"b", b"c", b"d"], [b"abcd"]])
def test_the_first_complete_stop_string_wins_and_the_longest_of_those(
    stops: tuple[str, ...], text: str, stop: str, pieces: list[bytes]
) -> None:
    decoder = StreamDecoder(Pieces(pieces), stops)
    assert (decoder.push(range(len(pieces))), decoder.stopped) == (text, stop)


def test_special_tokens_leave_no_text_by_default() -> None:
    assert StreamDecoder(BYTES).push([97, END, 98]) == "ab"
    assert StreamDecoder(BYTES, skip_special=False).push([97, END, 98]) == "a<|end|>b"
    assert StreamDecoder(BYTES, ("ab",)).push([97, END, 98]) == "", "a stop string may span them"
    decoder = StreamDecoder(BYTES)
    assert decoder.push([0xC3, END, 0xA9]) == "é" and decoder.consumed == 3


def test_a_clone_previews_without_a_trace() -> None:
    decoder = StreamDecoder(BYTES, ("xyz",))
    decoder.push(b"ax")
    decoder.push([0xC3])
    twin = decoder.clone()
    assert twin.push([0xA9, *b"xyz!"]) == "xé" and (twin.stopped, twin.consumed) == ("xyz", 4)
    assert decoder.stopped is None and decoder.consumed == 1
    assert decoder.push([0xA9]) == "xé"


@given(RAW, st.lists(st.integers(0, 100), max_size=8), STOPS)
@settings(max_examples=500, deadline=None)
def test_a_decoder_behind_a_token_is_another_or_the_same_as_it_was(
    raw: bytes, tokens: list[int], stops: tuple[str, ...]
) -> None:
    vocabulary = Pieces([*cut(raw, tokens), b"<|end|>"], special=1)
    pushed = StreamDecoder(vocabulary, stops)
    decoder = pushed.clone()
    for token in range(len(vocabulary.pieces)):
        before = decoder.clone()
        then, text = decoder.after(token)
        assert decoder.clone().push([token]) == before.push([token]) == text, "it stays as it is"
        assert pushed.push([token]) == text and then.stopped == pushed.stopped
        decoder = then
    assert decoder.flush() == pushed.flush()


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="stop"):
        StreamDecoder(BYTES, ("a", ""))


def test_long_stop_strings_cost_no_more_than_their_length() -> None:
    stops = tuple("ab" * 127 + chr(ord("c") + i) for i in range(16))
    decoder = StreamDecoder(BYTES, stops)
    text = "ab" * 5000
    assert "".join(stream(decoder, text.encode())) + decoder.flush() == text
