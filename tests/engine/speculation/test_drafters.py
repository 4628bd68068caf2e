"""Lookup and n-gram drafters: which match they follow, whose tokens they may see, what they hold."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine.speculation.drafters import Draft, DraftAsk, make
from power_lab.engine.speculation.drafters.automaton import SuffixAutomaton
from power_lab.engine.speculation.drafters.confidence import Confidence, likely
from power_lab.engine.speculation.drafters.corpus import Corpus, Shelf
from power_lab.engine.speculation.drafters.suffix import CORPUS_PIECE, OWN_PIECE, LookupDrafter, NgramDrafter

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def drafted(drafter: LookupDrafter, request_id: int, known: Sequence[int], width: int = 6) -> tuple[int, ...]:
    return drafter.propose([DraftAsk(request_id, known, width)])[0].tokens


def said(drafter: LookupDrafter, request_id: int, text: Sequence[int], namespace: str = "") -> None:
    """A request comes, says its second half and goes."""
    drafter.begin(request_id, text[: len(text) // 2], namespace)
    drafter.commit(request_id, text[len(text) // 2 :])
    drafter.end(request_id)


def longest_match(text: Sequence[int], context: Sequence[int]) -> int:
    """Tokens of the longest suffix of `context` that occurs in `text` with something behind it."""
    at = [tuple(text[i:j]) for j in range(len(text)) for i in range(j)]
    return next((n for n in range(len(context), 0, -1) if tuple(context[-n:]) in at), 0)


def test_lookup_quotes_the_prompt_only() -> None:
    drafter = make("lookup")
    prompt = [1, 2, 3, 4, 5, 9, 9]
    drafter.begin(7, prompt, "")
    drafter.commit(7, [8, 2, 3])
    assert drafter.propose([DraftAsk(7, [*prompt, 8, 2, 3], 3)])[0].tokens == (4, 5, 9)
    drafter.commit(7, [8, 6, 8, 6])
    assert drafter.propose([DraftAsk(7, [*prompt, 8, 2, 3, 8, 6, 8, 6], 3)])[0] == Draft()


def test_ngram_also_repeats_the_output_and_runs_on_in_a_loop() -> None:
    drafter = make("ngram")
    drafter.begin(7, [1, 2], "")
    drafter.commit(7, [8, 6, 8, 6])
    assert drafter.propose([DraftAsk(7, [1, 2, 8, 6, 8, 6], 5)])[0].tokens == (8, 6, 8, 6, 8)
    drafter.end(7)
    with pytest.raises(KeyError):
        drafter.propose([DraftAsk(7, [1, 2], 1)])


@given(TOKENS, st.lists(TOKENS, max_size=3), st.sampled_from(["lookup", "ngram"]))
def test_tokens_that_come_piece_by_piece_draft_as_those_that_come_at_once(
    prompt: list[int], pieces: list[list[int]], name: str
) -> None:
    drafter, whole = make(name), make(name)
    known = [*prompt, *(token for piece in pieces for token in piece)]
    drafter.begin(1, prompt, "")
    for piece in pieces:
        drafter.propose([DraftAsk(1, [], 3)])
        drafter.commit(1, piece)
    whole.begin(1, prompt, "")
    whole.commit(1, known[len(prompt) :])
    first, second = (d.propose([DraftAsk(1, known, 9)])[0].tokens for d in (drafter, whole))
    assert first == second
    assert bool(first) == (longest_match(prompt if name == "lookup" else known, known) >= 1)


@given(st.lists(TOKENS, min_size=1, max_size=3), TOKENS)
def test_the_longer_match_is_followed_and_of_equals_the_own(others: list[list[int]], text: list[int]) -> None:
    corpus = Corpus()
    drafter, own = NgramDrafter(corpus), NgramDrafter(None)
    for number, other in enumerate(others):
        said(drafter, number, other)
    for d in (drafter, own):
        d.begin(9, text, "")
    reach = max(longest_match(other, text) for other in others)
    draft = drafted(drafter, 9, text)
    assert drafter.from_corpus(9) == (reach > longest_match(text, text))
    if drafter.from_corpus(9):
        follows = {o[i + reach] for o in others for i in range(len(o) - reach) if o[i : i + reach] == text[-reach:]}
        assert draft[0] in follows
    else:
        assert draft == drafted(own, 9, text)


@given(st.lists(st.tuples(st.sampled_from("ab"), TOKENS), max_size=5), TOKENS)
def test_nothing_crosses_namespaces(texts: list[tuple[str, list[int]]], text: list[int]) -> None:
    """What one namespace says changes no draft, no confidence and no source of another."""
    both, alone = NgramDrafter(Corpus()), NgramDrafter(Corpus())
    for number, (namespace, other) in enumerate(texts):
        said(both, number, other, namespace)
        if namespace == "a":
            said(alone, number, other, namespace)
    for drafter in (both, alone):
        drafter.begin(9, text, "a")
    ask = [DraftAsk(9, text, 8)]
    assert both.propose(ask) == alone.propose(ask)
    assert both.from_corpus(9) == alone.from_corpus(9)


def test_a_corpus_survives_its_requests_and_an_own_match_of_equal_length_comes_first() -> None:
    drafter = NgramDrafter(Corpus())
    said(drafter, 1, [1, 2, 3, 4, 5, 6])
    drafter.begin(2, [9, 2, 3], "")
    assert drafted(drafter, 2, [9, 2, 3]) == (4, 5)
    assert drafter.from_corpus(2)
    drafter.commit(2, [7, 7, 2, 3])
    assert drafted(drafter, 2, [9, 2, 3, 7, 7, 2, 3])[:2] == (7, 7)
    assert not drafter.from_corpus(2)


@given(st.lists(TOKENS, max_size=4), TOKENS)
def test_the_same_calls_draft_the_same(others: list[list[int]], text: list[int]) -> None:
    def drafts() -> list[Draft]:
        drafter = NgramDrafter(Corpus())
        for number, other in enumerate(others):
            said(drafter, number, other)
        drafter.begin(9, text, "")
        first = drafter.propose([DraftAsk(9, text, 8)])
        drafter.commit(9, [1, 2, 1])
        return first + drafter.propose([DraftAsk(9, [*text, 1, 2, 1], 8)])

    assert drafts() == drafts()


def test_what_was_not_said_for_the_longest_time_goes_first() -> None:
    shelf = Shelf(most=8)

    def reach(text: list[int]) -> int:
        found = max((g.automaton.advance(0, 0, text)[1] for g in shelf.generations), default=0)
        assert sum(g.automaton.tokens for g in shelf.generations) <= 16
        return found

    for text in ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [1, 2, 3, 4], [13, 14, 15, 16]):
        shelf.add(array("i", text))
        shelf.index(100)
    assert reach([1, 2, 3, 4]) == 4  # said again
    assert reach([9, 10, 11, 12]) == 4
    assert reach([5, 6, 7, 8]) == 0
    shelf.add(array("i", range(100, 130)))
    shelf.index(100)
    assert reach(list(range(122, 130))) == 8  # of a long text the end
    assert reach([120, 121]) == 0


def test_a_long_text_and_a_long_corpus_are_indexed_in_pieces() -> None:
    corpus = Corpus()
    drafter = NgramDrafter(corpus)
    known = [*range(2 * OWN_PIECE + 10), 5, 6]
    drafter.begin(1, known, "")
    assert drafter.bytes < 5 * len(known)  # a waiting request costs its tokens
    assert [drafted(drafter, 1, known) for _ in range(3)] == [(), (), (7, 8, 9, 10, 11, 12)]
    drafter.commit(1, [7])
    drafter.end(1)
    drafter.begin(2, [70, 71], "")
    assert drafted(drafter, 2, [70, 71]) == (72, 73)
    drafter.commit(2, [CORPUS_PIECE + 70, CORPUS_PIECE + 71])
    assert drafted(drafter, 2, [])[0] == CORPUS_PIECE + 72
    assert sum(g.automaton.tokens for g in corpus._shelves[""].generations) == 2 * CORPUS_PIECE


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 300)), min_size=20, max_size=60))
def test_hostile_namespaces_and_long_outputs_stay_within_bounds(stream: list[tuple[int, int]]) -> None:
    limit = 60_000
    corpus = Corpus(tokens=128, bytes=limit, namespaces=4)
    drafter = NgramDrafter(corpus)
    for number, (namespace, length) in enumerate(stream):
        name = f"namespace {namespace}"
        text = [(number * 7 + i * i) % 50 for i in range(length)]
        drafter.begin(number, text, name)
        drafted(drafter, number, text)
        drafter.commit(number, text)
        drafter.end(number)
        assert len(corpus.namespaces) <= 4
        assert not corpus.namespaces or corpus.namespaces[-1] == name
        held = sum(shelf.bytes + sys.getsizeof(key) for key, shelf in corpus._shelves.items())
        assert corpus.bytes == held <= limit
        assert not any(generation.cursors for shelf in corpus._shelves.values() for generation in shelf.generations)
    assert drafter.bytes == corpus.bytes  # no request is left


def test_the_namespace_used_least_recently_goes_first() -> None:
    corpus = Corpus(namespaces=2)
    for namespace in ("a", "b", "a", "c"):
        corpus.add(namespace, array("i", [1, 2, 3]))
    assert corpus.namespaces == ["a", "c"]
    assert corpus.use("b") is None
    corpus.use("a")
    corpus.add("d", array("i", [1]))
    assert corpus.namespaces == ["a", "d"]


def test_bytes_are_what_an_automaton_holds() -> None:
    """Against the allocator, which rounds up."""
    import tracemalloc

    tracemalloc.start()
    try:
        automaton = SuffixAutomaton()
        automaton.extend([(i * i) % 997 for i in range(20_000)])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.85 * held < automaton.bytes < 1.15 * held


@given(st.lists(st.tuples(st.integers(1, 200), st.booleans()), max_size=12), st.booleans(), st.floats(0.01, 0.99))
def test_a_draft_ends_where_it_is_unlikely_to_be_right_so_far(
    matches: list[tuple[int, bool]], from_corpus: bool, floor: float
) -> None:
    """Its first token apart."""
    draft = [(1, length, agreed) for length, agreed in matches]
    sure = [Confidence().of([each], from_corpus)[0] for each in draft]  # having learnt nothing
    kept = len(likely(draft, from_corpus, floor))
    assert kept <= 1 or math.prod(sure[:kept]) >= floor
    assert kept == len(draft) or math.prod(sure[: kept + 1]) < floor
    assert (kept > 0) == bool(draft)


def test_a_loop_is_drafted_at_full_width() -> None:
    drafter = NgramDrafter(None)
    drafter.begin(1, [1, 2] * 40, "")
    assert drafted(drafter, 1, [], 64) == (1, 2) * 32


def test_a_request_that_said_nothing_leaves_nothing() -> None:
    """Such as one that the queue refused."""
    corpus = Corpus()
    drafter = NgramDrafter(corpus)
    drafter.begin(1, [1, 2, 3, 4], "")
    drafter.end(1)
    assert corpus.namespaces == []
    assert corpus.bytes == drafter.bytes == 0


@given(st.lists(st.tuples(TOKENS, TOKENS), max_size=30), st.booleans())
def test_confidence_is_a_probability_and_follows_what_came(
    rounds: list[tuple[list[int], list[int]]], corpus: bool
) -> None:
    confidence = Confidence()
    for draft, emitted in rounds:
        sure = confidence.of([(token, 1 + at * 5, at % 2 == 0) for at, token in enumerate(draft)], corpus)
        assert len(sure) == len(draft)
        assert all(0 < p < 1 for p in sure)
        confidence.learn(emitted)


def test_confidence_rises_with_right_tokens_falls_with_wrong_ones_and_learns_nothing_behind_those() -> None:
    confidence = Confidence()
    short, long = (5, 2, True), (5, 20, True)
    before = confidence.of([short, long], False)
    confidence.learn([5, 5])
    risen = confidence.of([short, long], False)
    assert risen[0] > before[0]
    assert risen[1] > before[1]
    confidence.learn([4, 5])
    fallen = confidence.of([short, long], False)
    assert fallen[0] < risen[0]
    assert fallen[1] == risen[1]
    assert confidence.of([short, long], True) != fallen


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(0, 9)), max_size=12),
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
)
def test_a_shelf_that_is_made_of_the_texts_of_another_finds_the_same(
    script: list[tuple[list[int], int]], context: list[int], later: list[int]
) -> None:
    """Wherever indexing stands, and whatever comes in afterwards."""
    shelf = Shelf(24)
    for text, budget in script:
        shelf.add(array("i", text))
        shelf.index(budget)
    other = Shelf.of(24, shelf.texts)
    for _ in range(3):
        assert other.texts == shelf.texts
        assert [found(one, context) for one in (shelf, other)] == [found(shelf, context)] * 2
        assert shelf.index(7) == other.index(7)
        for one in (shelf, other):
            one.add(array("i", later))
            one.forget(1)


def found(shelf: Shelf, context: list[int]) -> list[list[tuple[int, int, bool]]]:
    """What each generation has behind a context."""
    matches = [(one.automaton, *one.match(1, array("i", context))) for one in shelf.generations]
    return [automaton.continuation(state, length, 8, 1) for automaton, state, length in matches]
