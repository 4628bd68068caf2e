"""Prefix digests: every part counts, boundaries cannot be shifted, extension is incremental."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine import prefix
from power_lab.errors import ConfigError

PARTS = st.dictionaries(st.text(max_size=5), st.text(max_size=8), max_size=4)


@given(PARTS, PARTS)
def test_roots_are_equal_only_for_equal_parts(a: dict[str, str], b: dict[str, str]) -> None:
    assert (prefix.root(a) == prefix.root(b)) == (a == b)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=128, max_size=300), st.integers(0, 2))
def test_chain_grows_in_pieces_as_in_one(tokens: list[int], first: int) -> None:
    root = prefix.root({"model": "m"})
    known: list[bytes] = []
    prefix.chain(root, tokens, first, known)
    assert prefix.chain(root, tokens, 2, known) == prefix.chain(root, tokens, 2, [])
    assert known[1] == prefix.extend(known[0], tokens[64:128])


@given(st.lists(st.integers(0, 100), min_size=64, max_size=64), st.integers(0, 63))
def test_one_changed_token_changes_the_digest(tokens: list[int], at: int) -> None:
    other = [*tokens]
    other[at] += 1
    assert prefix.extend(b"r" * 32, tokens) != prefix.extend(b"r" * 32, other)
    assert prefix.extend(b"r" * 32, tokens) != prefix.extend(b"s" * 32, tokens)


def test_partial_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="64"):
        prefix.extend(b"", [1] * 63)


@pytest.mark.parametrize("key", [" a", "a\n", "x" * 257, "a\x7f", "a\ud800"])
def test_bad_namespaces_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="cache_key"):
        prefix.check_namespace(key)
