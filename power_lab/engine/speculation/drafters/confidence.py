"""How sure a drafter is of a token: how often such a one was right so far."""

from __future__ import annotations

from collections.abc import Sequence

CLASSES = 7
PRIOR = 4.0
"""Tokens that a prior counts for."""
PRIORS: tuple[tuple[float, ...], ...] = (
    (0.20, 0.43, 0.50, 0.50, 0.50, 0.50, 0.50),
    (0.30, 0.73, 0.85, 0.90, 0.96, 0.98, 0.98),
    (0.18, 0.18, 0.20, 0.30, 0.35, 0.40, 0.40),
    (0.20, 0.47, 0.48, 0.78, 0.87, 0.95, 0.98),
)
"""How often a continuation was right, by the bit length of its match: of own text where other tokens had followed such a match too, and
where nothing else had; then the same of a corpus. SmolLM2-135M over bench/prompts.py, greedy, 128 tokens; rounded, few cases guessed."""


Continuation = Sequence[tuple[int, int, bool]]
"""(token, length of its match, whether nothing else had followed such a match) of each token of a draft."""


def likely(continuation: Continuation, from_corpus: bool, floor: float) -> Continuation:
    """The tokens before a draft is less likely than `floor` to be right so far, by what was measured once, so that a draft is a function of
    its match alone. The first token is always worth a try, or nothing could be learnt of such matches.
    """
    right = 1.0
    for count, (_, length, agreed) in enumerate(continuation):
        right *= PRIORS[2 * from_corpus + agreed][_class(length)]
        if count and right < floor:
            return continuation[:count]
    return continuation


def _class(length: int) -> int:
    return min(length.bit_length(), CLASSES) - 1


class Confidence:
    """Learns from one request alone, so nothing of another one shows in it, and a replay of the request learns the same.

    An estimate: a token is taken to be as likely right as those of this request from the same source with a match of like length and
    like agreement, under a prior worth `PRIOR` tokens. In (0, 1).
    """

    def __init__(self) -> None:
        self._right = [PRIOR * share for shares in PRIORS for share in shares]
        self._seen = [PRIOR] * len(self._right)
        self._draft: list[tuple[int, int]] = []

    def of(self, continuation: Continuation, from_corpus: bool) -> tuple[float, ...]:
        """The probability that each token is right if those before are; remembers them for `learn`.

        Args:
            continuation: the draft.
            from_corpus: whether that was in other requests' tokens.
        """
        self._draft = [
            (token, CLASSES * (2 * from_corpus + agreed) + _class(length)) for token, length, agreed in continuation
        ]
        return tuple([self._right[kind] / self._seen[kind] for _, kind in self._draft])

    def learn(self, emitted: Sequence[int]) -> None:
        """What came instead, or as guessed. Behind the first wrong token nothing can be learnt."""
        for (token, kind), said in zip(self._draft, emitted, strict=False):
            self._seen[kind] += 1
            if token != said:
                break
            self._right[kind] += 1
        self._draft = []
