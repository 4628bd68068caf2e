"""What finished requests said, kept for later ones of the same namespace, within bounds."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Self

from power_lab.engine.speculation.drafters.automaton import Cursor, SuffixAutomaton
from power_lab.engine.trace import CorpusTexts

REACH = 256
"""Tokens before a request's first proposal that are looked up in a corpus."""
BEGINS = -1
"""Stands before each text where several lie in one array."""


class Generation:
    """Texts in one automaton, and where running requests match them.

    Attributes:
        texts: what the automaton was built of, each text behind a `BEGINS`.
    """

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.texts = array("i")
        self.cursors: dict[int, Cursor] = {}

    @classmethod
    def of(cls, texts: Sequence[int]) -> Self:
        """With these texts, as in `texts`."""
        made = cls()
        for text in _parted(texts):
            made.begin()
            made.extend(text)
        return made

    @property
    def bytes(self) -> int:
        """Memory held, requests' cursors aside."""
        return self.automaton.bytes + sys.getsizeof(self.texts)

    def begin(self) -> None:
        """Another text starts."""
        self.automaton.begin()
        self.texts.append(BEGINS)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text."""
        self.automaton.extend(tokens)
        self.texts.extend(tokens)

    def match(self, request_id: int, context: array[int]) -> tuple[int, int]:
        """State and length of the request's longest match that has a continuation. The request is followed from at most `REACH` tokens
        before its first call."""
        cursor = self.cursors.get(request_id)
        if cursor is None:
            cursor = self.cursors[request_id] = Cursor(max(0, len(context) - REACH))
        return self.automaton.followed(*cursor.follow(self.automaton, context))


class Shelf:
    """The corpus of one namespace: a young generation that grows, an old one that is dropped when the young one is full.

    What is said again comes in again with the request that said it, so what falls out was not said for the longest time.

    Args:
        most: tokens of one generation, and of one text.
    """

    def __init__(self, most: int) -> None:
        self.generations = [Generation()]
        self._most = most
        self._waiting: deque[array[int]] = deque()
        self._waiting_tokens = self._waiting_bytes = 0
        self._begun = 0  # tokens of the first waiting text that are in

    @classmethod
    def of(cls, most: int, texts: CorpusTexts) -> Self:
        """That finds what the one found of which these are the `texts`."""
        made = cls(most)
        made.generations = [Generation.of(one) for one in texts.generations] or [Generation()]
        for text in _parted(texts.waiting):
            made._wait(text)
        made._begun = texts.begun
        return made

    @property
    def texts(self) -> CorpusTexts:
        """All that it holds."""
        waiting = [token for text in self._waiting for token in (BEGINS, *text)]
        return CorpusTexts(
            generations=tuple(tuple(generation.texts) for generation in self.generations),
            waiting=tuple(waiting),
            begun=self._begun,
        )

    @property
    def bytes(self) -> int:
        """Memory held, requests' cursors aside."""
        return self._waiting_bytes + sum(generation.bytes for generation in self.generations)

    def add(self, text: array[int]) -> None:
        """Keep a text, of a long one the end. It can be found once `index` has come to it."""
        self._wait(text[-self._most :])
        while self._waiting_tokens > 2 * self._most:  # the first ones would be dropped before they were found
            self._next()

    def index(self, budget: int) -> int:
        """Make at most `budget` waiting tokens findable; returns how many were."""
        spent = 0
        while self._waiting and spent < budget:
            text = self._waiting[0]
            young = self.generations[0]
            if not self._begun:
                if young.automaton.tokens + len(text) > self._most:
                    young = self._turn()
                young.begin()
            piece = text[self._begun : self._begun + budget - spent]
            young.extend(piece)
            self._begun += len(piece)
            spent += len(piece)
            if self._begun == len(text):
                self._next()
        return spent

    def forget(self, request_id: int) -> None:
        """The request is over."""
        for generation in self.generations:
            generation.cursors.pop(request_id, None)

    def _wait(self, text: array[int]) -> None:
        self._waiting.append(text)
        self._waiting_tokens += len(text)
        self._waiting_bytes += sys.getsizeof(text)

    def _next(self) -> None:
        text = self._waiting.popleft()
        self._waiting_tokens -= len(text)
        self._waiting_bytes -= sys.getsizeof(text)
        self._begun = 0

    def _turn(self) -> Generation:
        self.generations = [Generation(), self.generations[0]]
        return self.generations[0]


class Corpus:
    """Shelves of several namespaces; the one used least recently goes first.

    Texts of one namespace are never searched for another. Within a namespace, whoever may send requests can tell by their speed whether
    a text was said there not long ago, as with shared prefixes: callers who must not know that of each other need namespaces of their own.

    Args:
        tokens: most of one generation of a namespace; there are two.
        bytes: memory of all namespaces together.
        namespaces: how many there may be.
    """

    def __init__(self, tokens: int = 1 << 15, bytes: int = 64 << 20, namespaces: int = 256) -> None:
        self._tokens = tokens
        self._most_bytes = bytes
        self._namespaces = namespaces
        self._shelves: OrderedDict[str, Shelf] = OrderedDict()
        self._bytes: dict[str, int] = {}
        self._held = 0

    @classmethod
    def of(cls, namespace: str, texts: CorpusTexts) -> Self:
        """Of one namespace, that holds what another did of which these are the `texts`."""
        made = cls()
        made._shelves[namespace] = Shelf.of(made._tokens, texts)
        made._fit(namespace)
        return made

    def texts(self, namespace: str) -> CorpusTexts:
        """What it holds of a namespace."""
        shelf = self._shelves.get(namespace)
        return shelf.texts if shelf is not None else CorpusTexts()

    @property
    def bytes(self) -> int:
        """Memory held, as last counted: whenever a text comes in or is indexed."""
        return self._held

    @property
    def namespaces(self) -> list[str]:
        """Those with texts, the one used least recently first."""
        return list(self._shelves)

    def use(self, namespace: str) -> Shelf | None:
        """The namespace's shelf, now the one used last; None where nothing was said."""
        shelf = self._shelves.get(namespace)
        if shelf is not None:
            self._shelves.move_to_end(namespace)
        return shelf

    def add(self, namespace: str, text: array[int]) -> None:
        """Keep what a finished request knew."""
        if not text:
            return
        self._shelves.setdefault(namespace, Shelf(self._tokens)).add(text)
        self._shelves.move_to_end(namespace)
        self._fit(namespace)

    def index(self, namespace: str, budget: int) -> int:
        """Make at most `budget` tokens of the namespace findable; returns how many were."""
        shelf = self.use(namespace)
        spent = shelf.index(budget) if shelf is not None else 0
        if spent:
            self._fit(namespace)
        return spent

    def forget(self, request_id: int, namespace: str) -> None:
        """The request is over; what it said may stay."""
        shelf = self._shelves.get(namespace)
        if shelf is not None:
            shelf.forget(request_id)

    def _fit(self, grown: str) -> None:
        """Count what the namespace holds now, and drop others, or at last itself, until all fit."""
        held = self._shelves[grown].bytes + sys.getsizeof(grown)
        self._held += held - self._bytes.get(grown, 0)
        self._bytes[grown] = held
        while self._held > self._most_bytes or len(self._shelves) > self._namespaces:
            namespace, _ = self._shelves.popitem(last=False)
            self._held -= self._bytes.pop(namespace)


def _parted(texts: Sequence[int]) -> Iterable[array[int]]:
    """The texts in an array of several."""
    edges = [*(at for at, token in enumerate(texts) if token == BEGINS), len(texts)]
    return (array("i", texts[start + 1 : end]) for start, end in pairwise(edges))
