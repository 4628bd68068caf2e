"""What the hybrid drafter copies out of a sequence, and when it does so alone: with numpy, so that a replay does as it does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from power_lab.kernels.numba.recall import recalled

LEAST = 2
"""Tokens of a match that is believed rather than the network. Over bench/prompts.py 2 to 4 are within 3 % of each other."""
NETWORK = 7
"""Most drafts of the network in a round; what comes behind these is seldom right."""
FAST, FADE, SEEN = 4.0, 0.7, 16
"""Tokens a pass by copying alone, as a fading mean of at most `SEEN` of each round, from which on the network is left out."""
GROWTH = 512  # tokens by which a request's room grows


class Copied:
    """One request's tokens, and what copying alone would have brought a pass lately: behind the last place where its last two were said."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens, self._count = np.asarray(prompt, np.int32), len(prompt)
        self.mean, self.found = 0.0, False  # of the latest round, whether there was something to copy

    @property
    def tokens(self) -> np.ndarray:
        return self._tokens[: self._count]

    @property
    def fast(self) -> bool:
        """Whether the network is left out."""
        return self.mean >= FAST

    def commit(self, emitted: Sequence[int]) -> None:
        end = self._count + len(emitted)
        if end > len(self._tokens):
            self._tokens = np.concatenate((self.tokens, np.empty(max(GROWTH, end), np.int32)))
        known = self.tokens
        self._tokens[self._count : end] = emitted
        self._count, accepted, self.found = end, 0, False
        if len(known) > LEAST:
            found = np.flatnonzero((known[1:-1] == known[-1]) & (known[:-2] == known[-2]))
            self.found = bool(len(found))
            if self.found:
                came = found[-1] + 2
                same = self._tokens[came : came + len(emitted) - 1] == self._tokens[len(known) : end - 1]
                accepted = len(same) if same.all() else int(same.argmin())
        self.mean = FADE * self.mean + (1 - FADE) * min(accepted + 1, SEEN)


def drafted(tokens: Sequence[int], width: int, guess: Sequence[int]) -> tuple[int, ...]:
    """What `Search` drafts behind these tokens, always so many. guess: the network's drafts, none where it is left out.

    Behind the network's drafts, too, comes what followed the match, though that is too short to be believed.
    """
    copied, length = recalled(np.asarray(tokens), width)
    made = tuple(guess[: min(width, NETWORK)]) if length < LEAST else ()
    return (*made, *copied[len(made) :].tolist())
