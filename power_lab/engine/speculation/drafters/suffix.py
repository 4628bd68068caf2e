"""Zero-weight drafters: the longest recent suffix is looked up in earlier tokens, and what followed it there is the guess.

`lookup` searches the prompt only (Saxena, "Prompt Lookup Decoding", 2023); `ngram` searches prompt and output.
"""

from __future__ import annotations

from collections.abc import Sequence

from power_lab.engine.speculation.drafters import Draft, DraftAsk

LONGEST, SHORTEST = 5, 2


class SuffixIndex:
    """Where each n-gram of a growing token list was last followed by something. O(1) a token and n."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._follow: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            at = len(self.tokens)
            for n in range(SHORTEST, min(LONGEST, at) + 1):
                self._follow[tuple(self.tokens[at - n :])] = at
            self.tokens.append(token)

    def continuation(self, context: Sequence[int], width: int) -> tuple[int, ...]:
        """What followed the longest known suffix of `context`, up to `width` tokens.

        A match that runs into the end of the indexed tokens goes on with its own draft, so a loop is drafted at full width.
        """
        tail = tuple(context[-LONGEST:])
        for n in range(len(tail), SHORTEST - 1, -1):
            at = self._follow.get(tail[-n:])
            if at is not None:
                draft = self.tokens[at : at + width]
                period = len(draft)
                while len(draft) < width:
                    draft.append(draft[-period])
                return tuple(draft)
        return ()


class LookupDrafter:
    """Guesses that the output quotes the prompt."""

    name = "lookup"

    def __init__(self) -> None:
        self._indexes: dict[int, SuffixIndex] = {}

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None:
        index = SuffixIndex()
        index.extend(prompt)
        self._indexes[request_id] = index

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [Draft(self._indexes[ask.request_id].continuation(ask.tokens[-LONGEST:], ask.width)) for ask in asks]

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        """The prompt does not grow."""

    def end(self, request_id: int) -> None:
        self._indexes.pop(request_id, None)


class NgramDrafter(LookupDrafter):
    """Guesses that the output repeats prompt or output."""

    name = "ngram"

    def commit(self, request_id: int, emitted: Sequence[int]) -> None:
        self._indexes[request_id].extend(emitted)
