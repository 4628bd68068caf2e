"""The Pareto front: what nothing else beats in one respect without losing in the other."""

from __future__ import annotations

import math
from collections.abc import Sequence


def front(gains: Sequence[float], costs: Sequence[float]) -> list[int]:
    """Indices of what is not dominated, cheapest first, in their own order where equal.

    One is dominated where another has at least its gain at no more cost, and is better in one of both. Equals are all kept; what has a
    NaN is left out. Raises ValueError for lists of different lengths.
    """
    found = [
        (cost, -gain, at)
        for at, (gain, cost) in enumerate(zip(gains, costs, strict=True))
        if not (math.isnan(gain) or math.isnan(cost))
    ]
    kept: list[int] = []
    best = -math.inf
    at_cost = math.inf
    for cost, loss, at in sorted(found):
        gain = -loss
        if not kept or gain > best or (gain == best and cost == at_cost):
            kept.append(at)
            best, at_cost = gain, cost
    return kept
