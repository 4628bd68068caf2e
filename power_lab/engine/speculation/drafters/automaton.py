"""The suffix automaton of a growing text: its longest match with any context, and what followed such a match before.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985): one state for all strings that end at the same places,
at most two states and three edges a token, built token by token in amortised O(1). Continuations are counted as PPM* does, with update
exclusion (Cleary, Teahan and Witten, "Unbounded length contexts for PPM", 1995): a token counts once in every context that had never
seen it, and in the longest one that had. Shorter contexts are not told of it, so what longer ones foresee does not drown what they have
to say; and counting costs nothing beside building.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

TOKEN_BITS = 32
ENTRY = 64
"""Bytes of the two integers of one edge in the table; those of the table itself are measured."""


class SuffixAutomaton:
    """All substrings of a few texts. States are numbers; 0 is the empty string, and `length` of a state that of its longest string.

    Attributes:
        tokens: how many were added.
        last: the state of all that was added since `begin`.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.last = 0
        self._edges: dict[int, int] = {}  # state << TOKEN_BITS | token -> edge
        # Of each state: its longest string, the state of that string's longest suffix that ends elsewhere too, its edges as a list, the
        # edge that is taken, how often it was followed.
        self._length, self._link, self._first, self._best, self._total = (array("i", [v]) for v in (0, -1, -1, -1, 0))
        # Of each edge: its token, where it leads, how often it counted, the next one of its state.
        self._token, self._target, self._count, self._next = (array("i") for _ in range(4))

    @property
    def bytes(self) -> int:
        """Memory held."""
        states = (self._length, self._link, self._first, self._best, self._total)
        arrays = (*states, self._token, self._target, self._count, self._next)
        return sys.getsizeof(self._edges) + ENTRY * len(self._edges) + sum(map(sys.getsizeof, arrays))

    def begin(self) -> None:
        """Another text starts; no match crosses from the one before."""
        self.last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text."""
        edges, length, link, last = self._edges, self._length, self._link, self.last
        for token in tokens:
            self.tokens += 1
            state = last
            edge = edges.get(state << TOKEN_BITS | token)
            if edge is not None:  # the whole text since `begin` is known from another one, and so is what follows now
                self._counted(state, edge)
                last = self._only(state, edge, token)
                continue
            last = self._state(length[state] + 1)
            while state >= 0:
                edge = edges.get(state << TOKEN_BITS | token)
                if edge is not None:
                    break
                self._counted(state, self._edge(state, token, last, 0))
                state = link[state]
            if edge is None:
                link[last] = 0
            else:
                self._counted(state, edge)
                link[last] = self._only(state, edge, token)
        self.last = last

    def match(self) -> tuple[int, int]:
        """The longest suffix of the text since `begin` that also ends at another place: its state and length."""
        state = self._link[self.last]
        return (state, self._length[state]) if state > 0 else (0, 0)

    def advance(self, state: int, length: int, tokens: Iterable[int]) -> tuple[int, int]:
        """The longest match of a context that ended in a string of `length` in `state` and goes on with `tokens`."""
        edges, lengths, link = self._edges, self._length, self._link
        while state and length <= lengths[link[state]]:  # the state was split since
            state = link[state]
        for token in tokens:
            edge = edges.get(state << TOKEN_BITS | token)
            while edge is None and state:
                state = link[state]
                length = lengths[state]
                edge = edges.get(state << TOKEN_BITS | token)
            if edge is not None:
                state = self._target[edge]
                length += 1
        return state, length

    def followed(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix of a match that has a continuation: its state and length."""
        while state and self._best[state] < 0:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def continuation(self, state: int, length: int, width: int, shortest: int) -> list[tuple[int, int, bool]]:
        """What follows a match, up to `width` tokens: (token, length of the match that says so, whether only that one ever counted).

        Each is the most frequent continuation of the longest suffix, of match and draft so far, that has one; of equals the one counted
        last. So a match that runs into the end of the text goes on with its own draft, and a loop is drafted at full width. It ends
        where no suffix of `shortest` tokens has a continuation.
        """
        best, total, count = self._best, self._total, self._count
        drafted: list[tuple[int, int, bool]] = []
        while len(drafted) < width:
            if best[state] < 0:
                state, length = self.followed(state, length)
            if length < shortest:
                break
            edge = best[state]
            drafted.append((self._token[edge], length, count[edge] == total[state]))
            state = self._target[edge]
            length += 1
        return drafted

    def _state(self, length: int) -> int:
        for field, value in (
            (self._length, length),
            (self._link, -1),
            (self._first, -1),
            (self._best, -1),
            (self._total, 0),
        ):
            field.append(value)
        return len(self._length) - 1

    def _edge(self, state: int, token: int, target: int, count: int) -> int:
        edge = self._edges[state << TOKEN_BITS | token] = len(self._token)
        self._token.append(token)
        self._target.append(target)
        self._count.append(count)
        self._next.append(self._first[state])
        self._first[state] = edge
        return edge

    def _counted(self, state: int, edge: int) -> None:
        self._count[edge] += 1
        self._total[state] += 1
        if self._best[state] < 0 or self._count[edge] >= self._count[self._best[state]]:
            self._best[state] = edge

    def _only(self, state: int, edge: int, token: int) -> int:
        """The state of the longest string of `state` with `token` behind it, split from longer ones that do not end where it ends now."""
        whole = self._target[edge]
        length = self._length[state] + 1
        if self._length[whole] == length:
            return whole
        part = self._state(length)
        self._link[part] = self._link[whole]
        self._link[whole] = part
        self._total[part] = self._total[whole]
        copied = self._first[whole]
        while copied >= 0:
            copy = self._edge(part, self._token[copied], self._target[copied], self._count[copied])
            if copied == self._best[whole]:
                self._best[part] = copy
            copied = self._next[copied]
        known: int | None = edge
        while known is not None and self._target[known] == whole:
            self._target[known] = part
            state = self._link[state]
            known = self._edges.get(state << TOKEN_BITS | token) if state >= 0 else None
        return part


class Cursor:
    """Where a growing context matches an automaton that may grow too.

    Exact over the tokens since the automaton last grew, and never longer than the truth.

    Args:
        position: of the context, from which on it is followed.
        state, length: the match there.
    """

    def __init__(self, position: int, state: int = 0, length: int = 0) -> None:
        self.position = position
        self._state = state
        self._length = length

    def follow(self, automaton: SuffixAutomaton, context: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest match of all of `context`."""
        self._state, self._length = automaton.advance(self._state, self._length, context[self.position :])
        self.position = len(context)
        return self._state, self._length
