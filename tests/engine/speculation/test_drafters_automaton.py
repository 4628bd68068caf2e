"""The suffix automaton against the plain definitions: matches by search, continuations counted string by string."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.speculation.drafters.automaton import Cursor, SuffixAutomaton

Places = frozenset[tuple[int, int]]
TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4)
CONTEXT = st.lists(st.integers(0, 3), max_size=14)


class Plain:
    """Texts that grow, searched as they are.

    A token counts once for every string before it that had never been followed by it, and for the longest one that had, along with those
    that always ended where that one did.
    """

    def __init__(self) -> None:
        self.texts: list[tuple[int, ...]] = []
        self.counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        self.latest: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def add(self, text: Sequence[int]) -> None:
        self.texts.append(())
        for token in text:
            self._count(token)
            self.texts[-1] += (token,)

    def places(self, string: tuple[int, ...]) -> Places:
        """Where a string ends."""
        n = len(string)
        return frozenset(
            (t, end)
            for t, text in enumerate(self.texts)
            for end in range(n, len(text) + 1)
            if text[end - n : end] == string
        )

    def _count(self, token: int) -> None:
        whole = self.texts[-1]
        contexts = [whole[at:] for at in range(len(whole) + 1)]  # longest first
        known = next((c for c in contexts if self.places((*c, token))), None)
        for context in contexts:
            if known is None or len(context) > len(known) or self.places(context) == self.places(known):
                self.counts[context][token] = self.counts[context].get(token, 0) + 1
                latest = self.latest[context]
                if token in latest:
                    latest.remove(token)
                latest.append(token)

    def best(self, context: tuple[int, ...]) -> tuple[int, bool]:
        counts = self.counts[context]
        most = max(counts.values())
        token = next(token for token in reversed(self.latest[context]) if counts[token] == most)
        return token, len(counts) == 1

    def longest(self, context: Sequence[int], followed: bool) -> int:
        """Tokens of the longest suffix that occurs, or that occurs with something behind it."""
        for n in range(len(context), 0, -1):
            places = self.places(tuple(context[-n:]))
            if any(end < len(self.texts[t]) for t, end in places) if followed else places:
                return n
        return 0

    def continuation(self, context: Sequence[int], width: int, shortest: int) -> list[tuple[int, int, bool]]:
        context, drafted = list(context), []
        while len(drafted) < width and (n := self.longest(context, True)) >= shortest:
            token, alone = self.best(tuple(context[-n:]))
            drafted.append((token, n, alone))
            context.append(token)
        return drafted


def built(texts: Sequence[Sequence[int]]) -> tuple[SuffixAutomaton, Plain]:
    automaton, plain = SuffixAutomaton(), Plain()
    for text in texts:
        automaton.begin()
        automaton.extend(text)
        plain.add(text)
    return automaton, plain


@given(TEXTS, CONTEXT, st.integers(1, 3))
def test_contexts_match_and_go_on_as_searched(texts: list[list[int]], context: list[int], shortest: int) -> None:
    automaton, plain = built(texts)
    state, length = automaton.advance(0, 0, context)
    assert length == plain.longest(context, False)
    assert automaton.continuation(state, length, 9, shortest) == plain.continuation(context, 9, shortest)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 3))
def test_a_text_goes_on_as_its_own_longest_suffix_did(text: list[int], shortest: int) -> None:
    """Also beyond its end, where the draft follows itself."""
    automaton, plain = built([text])
    state, length = automaton.match()
    assert length == max(
        (n for n in range(len(text)) if len(plain.places(tuple(text[len(text) - n :]))) > 1), default=0
    )
    assert automaton.continuation(state, length, 9, shortest) == plain.continuation(text, 9, shortest)


@given(TEXTS, TEXTS, CONTEXT, CONTEXT)
def test_a_cursor_survives_growth(
    texts: list[list[int]], more: list[list[int]], before: list[int], behind: list[int]
) -> None:
    """Never longer than the truth, and at least what matches of the tokens since; exact in what it drafts from there."""
    automaton, plain = built(texts)
    cursor = Cursor(0)
    cursor.follow(automaton, before)
    for text in more:
        automaton.begin()
        automaton.extend(text)
        plain.add(text)
    context = [*before, *behind]
    state, length = cursor.follow(automaton, context)
    assert plain.longest(behind, False) <= length <= plain.longest(context, False)
    matched = context[len(context) - length :]
    assert automaton.continuation(state, length, 9, 1) == plain.continuation(matched, 9, 1)


@given(st.lists(st.integers(0, 1), max_size=300))
def test_states_and_edges_are_linear(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert len(automaton._length) <= max(2, 2 * len(text))
    assert len(automaton._token) <= max(1, 3 * len(text))
    assert automaton.bytes < 4096 + 1000 * len(text)
