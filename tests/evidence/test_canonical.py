from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.errors import EvidenceError
from power_lab.evidence.canonical import SAFE_INTEGER, canonical, digest, parse, token_digest

text = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.integers(-SAFE_INTEGER, SAFE_INTEGER) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [  # RFC 8785, appendix B
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("c340000000000000", "-9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
    ],
)
def test_numbers_print_as_ecmascript_prints_them(bits, expected):
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical(value).decode() == expected


def test_keys_are_sorted_by_utf16_code_units():
    # RFC 8785 section 3.2.3: an astral key sorts before U+FB33 by code units, after it by code points.
    keys = ["€", "\r", "\ufb33", "1", "😀", "\x80", "ö"]
    assert list(json.loads(canonical(dict.fromkeys(keys, 0)))) == ["\r", "1", "\x80", "ö", "€", "😀", "\ufb33"]


def test_strings_take_the_shortest_escapes():
    assert canonical('€$\x0f\nA\'B"\\\\"/').decode() == '"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"'


@given(values)
def test_values_come_back_and_have_one_form(value):
    data = canonical(value)
    assert parse(data) == value
    assert canonical(parse(data)) == data
    assert b"\n" not in data


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"a": [1, float("nan")]}, "value.a[1]"),
        ({"a": float("inf")}, "value.a"),
        ({"a": {"b": SAFE_INTEGER + 1}}, "value.a.b"),
        ({"a": {1: 2}}, "value.a"),
        ({"a": b"x"}, "value.a"),
        ("\ud800", "value"),
        ({"\ud800": 1}, "value"),
    ],
)
def test_what_json_cannot_carry_is_refused_by_name(value, field):
    with pytest.raises(EvidenceError) as caught:
        canonical(value)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "text", ['{"a":1,"a":1}', "NaN", "[Infinity]", "1e999", "9" * 5000, "{", "", "[" * 100_000, b"\xff"]
)
def test_loose_json_is_refused(text):
    with pytest.raises(EvidenceError):
        parse(text)


def test_deep_values_are_refused():
    value: list = []
    for _ in range(50):
        value = [value]
    with pytest.raises(EvidenceError, match="nested"):
        canonical(value)


def test_digests_are_apart_by_tag():
    assert digest("a/1", b"x") != digest("b/1", b"x")
    assert token_digest("prompt/1", [1, 2]) != token_digest("output/1", [1, 2])
    assert token_digest("output/1", [1, 256]) == digest("output/1", bytes([1, 0, 0, 0, 0, 1, 0, 0]))
