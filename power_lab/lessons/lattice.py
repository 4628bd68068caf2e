"""A small lattice of candidates from the target's own distributions: what a perfect block drafter would say of a text.

A block drafter fills all its positions at once, so none of them knows what its neighbours say: the best that position i can know is the
distribution of its token whatever comes between, the marginal. A second table says how well two neighbours go together:
log p(b after a) - log p(b), the pointwise mutual information. DFlash2's two trained parts approximate these two.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from power_lab.lessons.microscope import Microscope


@dataclass(frozen=True, eq=False)
class Lattice:
    """Candidates of P positions, K of each.

    Attributes:
        ids: P lists of K token ids; texts: what they say.
        unary: P arrays f64 [K], log-probability of each whatever comes before. pair: P - 1 arrays f64 [K, K], what the candidate of the
            row adds to the one of the column that follows it.
    """

    ids: list[list[int]]
    texts: list[list[str]]
    unary: list[np.ndarray]
    pair: list[np.ndarray]

    def say(self, path: list[int]) -> str:
        """The text of a path, one candidate a position."""
        return "".join(column[at] for column, at in zip(self.texts, path, strict=True))


def lattice_of(scope: Microscope, text: str, positions: int = 3, best: int = 4) -> Lattice:
    """Compute one by asking the target about every continuation in the lattice: 1 + K + K^2 + ... passes.

    Args:
        scope: its target is asked. text: raw, it is continued. positions: P, at most 4. best: K, at most 8.
    """
    if not 1 <= positions <= 4 or not 1 <= best <= 8:
        raise ValueError("a lattice of at most 4 positions and 8 candidates can be computed by asking")
    start = scope.engine.tokenize(text)
    ids: list[list[int]] = []
    unary: list[np.ndarray] = []
    pair: list[np.ndarray] = []
    weight = np.ones(1)  # of every path so far, in the order of `product`
    for at in range(positions):
        after = np.exp([scope.next_draw([*start, *path]).scores for path in product(*ids)])
        share = weight / weight.sum()
        marginal = share @ after
        chosen = np.argsort(-marginal, kind="stable")[:best]
        unary.append(np.log(marginal[chosen]))
        if at:
            last = np.arange(len(weight)) % best  # which candidate of the position before a path ends in
            rows = [
                share[last == one] @ after[last == one][:, chosen] / share[last == one].sum() for one in range(best)
            ]
            pair.append(np.log(rows) - unary[-1])
        ids.append(chosen.tolist())
        weight = (share[:, None] * after[:, chosen]).ravel()
    return Lattice(ids, [[scope.piece(token) for token in column] for column in ids], unary, pair)
