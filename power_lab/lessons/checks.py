"""Checks of the exercises: they say whether an answer is right and where to look, and never what the answer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from power_lab.errors import ConfigError
from power_lab.lessons.exercises import attention, graphs, paged_kv, speculation

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


CHECKS: dict[str, Check] = {
    "emit": speculation.emit,
    "tokens per pass": speculation.tokens_per_pass,
    "narrowest": speculation.narrowest,
    "slot": paged_kv.slot,
    "share": paged_kv.share,
    "cached": paged_kv.cached,
    "merge": attention.merge,
    "splits": attention.splits,
    "kv bytes": attention.kv_bytes,
    "padding": graphs.padding,
    "buckets": graphs.buckets,
    "fewest": graphs.fewest,
}
