"""Finding special tokens in text: the first that begins, the longest of those, in time linear in the text.

The search is the `tokenizers` library's Aho-Corasick automaton. A regular expression of thousands of names would take
a hostile text times as long as there are names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Engine


@dataclass(frozen=True, slots=True)
class Mark:
    """A special token as it is found in text.

    Attributes:
        text, token: its name, which is not empty, and its id.
        lstrip, rstrip: whether it takes the white space on that side with it.
        single_word: whether it counts only where no letter, digit or underscore touches it.
    """

    text: str
    token: int
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class Marks:
    """A set of special tokens that text is split at."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        """Names must be different from each other."""
        marks = list(marks)
        self._ids = [mark.token for mark in marks]
        self._begin = (
            re.compile(f"[{''.join(map(re.escape, sorted({mark.text[0] for mark in marks})))}]") if marks else None
        )
        self._engine = Engine(models.WordLevel({"": 0}, unk_token=""))
        self._engine.add_tokens(
            [
                AddedToken(
                    mark.text,
                    single_word=mark.single_word,
                    lstrip=mark.lstrip,
                    rstrip=mark.rstrip,
                    normalized=False,
                    special=False,
                )
                for mark in marks
            ]
        )

    def split(self, text: str) -> list[tuple[str, int | None]]:
        """The text in pieces: (text, None), or (a special token with the white space it takes, its id)."""
        if not text or self._begin is None or not self._begin.search(text):  # the search below costs 0.4 us a character
            return [(text, None)]
        found = self._engine.encode(text, add_special_tokens=False)
        return [
            (text[start:end], self._ids[token - 1] if token else None)
            for token, (start, end) in zip(found.ids, found.offsets, strict=True)
        ]

    def replace(self, text: str, by: Callable[[str], str]) -> str:
        """The text with every special token in it replaced by `by(what was found)`."""
        return "".join(piece if token is None else by(piece) for piece, token in self.split(text))
