"""The exercises of the lesson on speculation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from power_lab.engine.speculation.transaction import match
from power_lab.run import Run


def emit(answer: Callable[[Sequence[int], Sequence[int]], Sequence[int]]) -> str:
    """The tokens of a verified window."""
    cases = {
        "no draft at all": ([], [4]),
        "a first draft that is refused": ([7, 8, 9], [6, 8, 9, 1]),
        "drafts that are all kept": ([3, 1, 4, 1], [3, 1, 4, 1, 5]),
        "a draft that is right behind one that is wrong": ([5, 6, 7], [5, 9, 7, 2]),
        "a long window": (list(range(15)), [*range(14), 99, 7]),
    }
    for name, (drafts, targets) in cases.items():
        said = answer(list(drafts), list(targets))
        if said is None or isinstance(said, (int, str)):
            return "The function should return a list of token ids."
        if list(said) != list(match(drafts, targets, lambda token: None).emitted):
            return f"Not yet: look at {name}."
    return ""


def tokens_per_pass(answer: Callable[[float, int], float]) -> str:
    """Expected tokens of a round, each draft being right with the same probability as long as those before it are."""
    cases = {
        "drafts that are never right": (0.0, 7),
        "drafts that are always right": (1.0, 7),
        "a width of 1": (0.4, 1),
        "a width of 3": (0.65, 3),
        "a wide window": (0.8, 15),
    }
    for name, (right, width) in cases.items():
        said = float(answer(right, width))
        if not math.isclose(said, sum(right**length for length in range(width + 1)), rel_tol=1e-9):
            more = " The token that the target adds itself counts too." if right == 0 else ""
            return f"Not yet: try {name}.{more}"
    return ""


def narrowest(answer: int, run: Run) -> str:
    """The least width at which a run takes no more rounds than at 15."""
    if not isinstance(answer, int) or isinstance(answer, bool) or not 1 <= answer <= 15:
        return "The answer is a width: a whole number from 1 to 15."

    def rounds(width: int) -> int:
        return run.what_if(width=width, controller="fixed").target_passes

    fewest = rounds(15)
    if rounds(answer) > fewest:
        return "Not yet: this width takes more rounds than 15 does."
    if answer > 1 and rounds(answer - 1) <= fewest:
        return "Nearly: it takes no more rounds than 15 does, but a narrower one does so too."
    return ""
