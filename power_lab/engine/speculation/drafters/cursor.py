"""How far a second model has read a request. No torch: a replay goes by the same rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from power_lab.engine.speculation.drafters import Draft, DraftAsk


@dataclass(slots=True, eq=False)
class Cursor:
    """Into a request's tokens.

    Attributes:
        length: committed tokens that are in, from the first on.
        tail: drafts that are in behind these; they count as far as they were accepted.
    """

    length: int = 0
    tail: tuple[int, ...] = ()

    def settle(self, tokens: Sequence[int]) -> int:
        """Move to where what is in agrees with the committed tokens, and return it.

        The last token is always still to come, as drafts are drawn after it.
        """
        for draft, token in zip(self.tail, tokens[self.length : self.length + len(self.tail)], strict=False):
            if draft != token:
                break
            self.length += 1
        self.length, self.tail = min(self.length, len(tokens) - 1), ()
        return self.length

    def drew(self, ask: DraftAsk, draft: Draft) -> None:
        """All tokens were read and drafts drawn, of which the last one is not in."""
        self.length, self.tail = len(ask.tokens), draft.tokens[: ask.width - 1]

    def read(self, ask: DraftAsk, rows: int) -> Draft:
        """So many tokens were read, and some are missing: the answer."""
        self.length += rows
        return Draft(note=f"the draft model has read {self.length:,} of {len(ask.tokens):,} tokens", later=True)
