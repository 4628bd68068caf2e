"""Covering arrays: few cases in which every pair of values of any two axes occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def all_pairs(
    axes: Mapping[str, Sequence[Any]], seed: int = 0, begun: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Greedy pairwise cover; the same seed gives the same cases. `begun`: cases that there are, which the further ones complete."""
    rng = random.Random(seed)
    names = list(axes)
    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    for case in begun:
        at = {name: list(axes[name]).index(case[name]) for name in names}
        open_pairs -= {(x, at[x], y, at[y]) for x, y in itertools.combinations(names, 2)}
    cases = [dict(case) for case in begun]
    while open_pairs:
        best: dict[str, int] = {}
        gain = -1
        for _ in range(60):
            a, i, b, j = rng.choice(sorted(open_pairs))
            case = {name: rng.randrange(len(axes[name])) for name in names} | {a: i, b: j}
            covered = sum((x, case[x], y, case[y]) in open_pairs for x, y in itertools.combinations(names, 2))
            if covered > gain:
                best, gain = case, covered
        open_pairs -= {(x, best[x], y, best[y]) for x, y in itertools.combinations(names, 2)}
        cases.append({name: axes[name][index] for name, index in best.items()})
    return cases
