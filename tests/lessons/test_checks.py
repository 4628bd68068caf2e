"""Checks of exercises: right answers pass, wrong ones get a hint, and no hint holds the answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from power_lab.errors import ConfigError
from power_lab.lessons import check


def emit(drafts, targets):
    kept = next((i for i, (a, b) in enumerate(zip(drafts, targets, strict=False)) if a != b), len(drafts))
    return targets[: kept + 1]


def tokens_per_pass(a, w):
    return w + 1 if a == 1 else (1 - a ** (w + 1)) / (1 - a)


class Replayed:
    """A run whose rounds at each width are given."""

    def __init__(self, rounds):
        self.rounds = rounds

    def what_if(self, *, width, controller):
        assert controller == "fixed"
        return SimpleNamespace(target_passes=self.rounds(width))


RUN = Replayed(lambda width: max(20 - 2 * width, 6))

RIGHT = {"emit": (emit,), "tokens per pass": (tokens_per_pass,), "narrowest": (7, RUN)}
WRONG = {
    "emit": [
        (lambda drafts, targets: targets,),
        (lambda drafts, targets: emit(drafts, targets)[:-1],),
        (lambda drafts, targets: [t for d, t in zip(drafts, targets, strict=False) if d == t],),
        (lambda drafts, targets: None,),
        (lambda drafts, targets: drafts[99],),
    ],
    "tokens per pass": [
        (lambda a, w: a * w,),
        (lambda a, w: 1 + a * w,),
        (lambda a, w: tokens_per_pass(a, w) - 1,),
        (lambda a, w: (1 - a ** (w + 1)) / (1 - a),),
    ],
    "narrowest": [(6, RUN), (8, RUN), (15, RUN), (0, RUN), (16, RUN), (7.0, RUN), (True, RUN)],
}


@pytest.mark.parametrize("exercise", RIGHT)
def test_a_right_answer_is_right(exercise):
    verdict = check(exercise, *RIGHT[exercise])
    assert verdict.right
    assert verdict.answered
    assert "✓" in repr(verdict)


@pytest.mark.parametrize(("exercise", "answer"), [(name, answer) for name, wrong in WRONG.items() for answer in wrong])
def test_a_wrong_answer_gets_a_hint_and_not_the_answer(exercise, answer):
    verdict = check(exercise, *answer)
    assert not verdict.right
    assert verdict.answered
    assert len(verdict.words) > 20
    if exercise == "narrowest":
        assert "7" not in verdict.words
    assert verdict.words.replace("'", "&#x27;") in verdict._repr_html_() or verdict.words in verdict._repr_html_()


def test_no_answer_is_no_wrong_answer():
    def unwritten(*_):
        raise NotImplementedError

    for verdict in (check("emit", unwritten), check("narrowest", ..., RUN)):
        assert not verdict.right
        assert not verdict.answered


def test_an_unknown_exercise_is_an_error():
    with pytest.raises(ConfigError, match="narrowest"):
        check("nothing", 1)
