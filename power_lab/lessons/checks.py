"""Checks of the exercises: they say whether an answer is right and where to look, and never what the answer is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from power_lab.engine.speculation.transaction import match
from power_lab.errors import ConfigError
from power_lab.run import Run

Check = Callable[..., str]
"""An answer, and what the exercise gave -> a hint, "" where the answer is right."""


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right.

    Attributes:
        right: it is. answered: whether there was one. words: for the reader.
    """

    right: bool
    answered: bool
    words: str

    @property
    def _sign(self) -> str:
        return "✓" if self.right else "✗" if self.answered else "…"

    def __repr__(self) -> str:
        return f"{self._sign} {self.words}"

    def _repr_html_(self) -> str:
        return f'<span style="font-weight:600">{self._sign}</span> {escape(self.words)}'


def check(exercise: str, answer: Any, *given: Any) -> Verdict:
    """Check the answer to an exercise of a lesson.

    Args:
        exercise: its name. answer: yours, `...` as long as there is none. given: what the exercise says to hand over.

    Raises:
        ConfigError for an exercise that there is not.
    """
    if exercise not in CHECKS:
        raise ConfigError("exercise", f"there is no {exercise!r}", f"Use one of {', '.join(CHECKS)}.")
    if answer is ...:
        return Verdict(False, False, "Not answered yet: replace the dots and run this cell again.")
    try:
        hint = CHECKS[exercise](answer, *given)
    except NotImplementedError:
        return Verdict(False, False, "Not answered yet: write the function and run this cell again.")
    except Exception as error:  # noqa: BLE001  # a learner's code may raise anything, and should hear of it as a hint
        return Verdict(False, True, f"Your answer raised {type(error).__name__}: {error}")
    return Verdict(not hint, True, hint or "Right.")


def _emit(answer: Callable[[Sequence[int], Sequence[int]], Sequence[int]]) -> str:
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


def _tokens_per_pass(answer: Callable[[float, int], float]) -> str:
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


def _narrowest(answer: int, run: Run) -> str:
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


CHECKS: dict[str, Check] = {"emit": _emit, "tokens per pass": _tokens_per_pass, "narrowest": _narrowest}
