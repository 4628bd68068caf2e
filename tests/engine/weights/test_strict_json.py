"""JSON from hostile files: what Python's parser reads, less what it should not."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from power_lab.engine.weights.strict_json import MAX_DEPTH, MAX_VALUES, parse_object
from power_lab.errors import ModelFileError

TEXT = st.text(st.characters(exclude_categories=("Cs",)))
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=30,
)


@given(st.dictionaries(TEXT, TREES), st.booleans(), st.sampled_from([None, 2]))
@example({'"[[[': '\\"{{{', "\\": ["\\\\", '"']}, True, None)
def test_what_json_writes_is_read(tree: dict, ascii: bool, indent: int | None) -> None:
    assert parse_object(json.dumps(tree, ensure_ascii=ascii, indent=indent).encode(), "here") == tree


@given(st.binary(max_size=60))
def test_noise_is_refused_or_what_python_reads(noise: bytes) -> None:
    for data in (noise, b'{"a":' + noise + b"}"):
        try:
            value = parse_object(data, "here")
        except ModelFileError as error:
            assert str(error).startswith("here: ")
        else:
            assert value == json.loads(data)


def nested(depth: int) -> bytes:
    return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


def test_depth_and_number_of_values_are_bounded() -> None:
    assert parse_object(nested(MAX_DEPTH), "here")
    assert parse_object(b'{"' + b"[" * 1000 + b'": "{{\\"{{"}', "here")  # brackets inside strings nest nothing
    assert len(parse_object(json.dumps({"a": [0] * MAX_VALUES}).encode(), "here")["a"]) == MAX_VALUES


REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not JSON"),
    "too deep": (nested(MAX_DEPTH + 1), "nested deeper than 64"),
    "very deep": (b'{"a":' + b"[" * 1_500_000, "nested deeper|more than"),
    "deep after a string that ends late": (b'{"\\\\": "\\"", "a":' + b"[" * 65, "nested deeper"),
    "many lists": (b'{"a":[' + b"[]," * 3_000_000 + b"[]]}", "more than the 1048576 values"),
    "many strings": (b'{"a":[' + b'"",' * 3_000_000 + b'""]}', "more than the 1048576 values"),
    "a list": (b"[]", "holds a JSON list"),
    "a number": (b"3", "holds a JSON int"),
    "null": (b"null", "holds a JSON NoneType"),
    "a key twice": (b'{"a": {"b": 1, "c": 2, "b": 1}}', "key 'b' comes twice"),
    "a key twice by escapes": (b'{"a": 1, "\\u0061": 1}', "key 'a' comes twice"),
    "NaN": (b'{"a": NaN}', "NaN is not a finite"),
    "Infinity": (b'{"a": [-Infinity]}', "-Infinity is not a finite"),
    "overflow": (b'{"a": -1e400}', "-1e400 is not a finite"),
    "many digits": (b'{"a": ' + b"9" * 100_000 + b"}", "is not JSON"),
    "half a surrogate pair": (b'{"a": ["\\ud83d"]}', "not UTF-8 text"),
    "half a pair as a key": (b'{"\\uDC00": 0}', "not UTF-8 text"),
    "not UTF-8": (b'{"a": "\xff"}', "not UTF-8 text"),
    "surrogates in UTF-8": (b'{"a": "\xed\xa0\x80"}', "not UTF-8 text"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8 text"),
    "byte order mark": (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
    "comment": (b'{"a": 1} // x', "not JSON"),
    "trailing comma": (b'{"a": 1,}', "not JSON"),
    "control character": (b'{"a": "\n"}', "not JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_json_should_not_be_is_refused(case: str) -> None:
    data, said = REFUSED[case]
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=f"^here: .*({said})") as caught:
            parse_object(data, "here")
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 300


def test_whole_surrogate_pairs_are_text() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}', "here") == {"a": "\U0001f600"}
