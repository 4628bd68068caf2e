"""Checks of exercises: right answers pass, wrong ones get a hint, and no hint holds the answer."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
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

DEMAND = {1: 8, 2: 4, 3: 3, 7: 6, 38: 1, 45: 3}


def slot(position, table):
    return table[position // 64] * 64 + position % 64


def share(lacking, budget):
    rows = []
    for at, wanted in enumerate(lacking):
        rows.append(min(wanted, budget - sum(rows) - (len(lacking) - at - 1)))
    return rows


def cached(before, prompt):
    same = 0
    while same < min(len(before), len(prompt)) and before[same] == prompt[same]:
        same += 1
    return min(same, len(prompt) - 1) // 64 * 64


def merge(first, second):
    (a, total_a, values_a), (b, total_b, values_b) = first, second
    top = max(a, b)
    one, other = np.exp(a - top), np.exp(b - top)
    return top, total_a * one + total_b * other, values_a * one + values_b * other


def splits(position, window):
    start = max(0, position + 1 - window) if window else 0
    edges = [start, *range(start // 256 * 256 + 256, position + 1, 256), position + 1]
    return list(pairwise(edges))


def kv_bytes(layers, q_heads, kv_heads, head_dim, position, window):
    keys = min(position + 1, window) if window else position + 1
    return layers * kv_heads * head_dim * keys * 2 * 4


def padding(demand, buckets):
    rest = {rows: min((b for b in buckets if b >= rows), default=rows) - rows for rows in demand}
    return sum(rest[rows] * steps for rows, steps in demand.items())


def buckets(demand, most):
    sizes = sorted(demand)
    tried = (c for n in range(1, most + 1) for c in combinations(sizes, min(n, len(sizes))) if c[-1] == sizes[-1])
    return min(tried, key=lambda chosen: padding(demand, chosen))


FEWEST = next(
    most for most in range(1, 9) if padding(DEMAND, buckets(DEMAND, most)) <= 0.05 / 0.95 * sum(r * n for r, n in DEMAND.items())
)

RIGHT = {
    "emit": (emit,),
    "tokens per pass": (tokens_per_pass,),
    "narrowest": (7, RUN),
    "slot": (slot,),
    "share": (share,),
    "cached": (cached,),
    "merge": (merge,),
    "splits": (splits,),
    "kv bytes": (kv_bytes,),
    "padding": (padding,),
    "buckets": (buckets, DEMAND),
    "fewest": (FEWEST, DEMAND),
}
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
    "slot": [
        (lambda position, table: table[position // 64],),
        (lambda position, table: position,),
        (lambda position, table: table[0] * 64 + position,),
        (lambda position, table: None,),
        (lambda position, table: table[position],),
    ],
    "share": [
        (lambda lacking, budget: lacking,),
        (lambda lacking, budget: [min(one, budget) for one in lacking],),
        (lambda lacking, budget: [budget // len(lacking)] * len(lacking),),
        (lambda lacking, budget: sum(lacking),),
    ],
    "cached": [
        (lambda before, prompt: len(before) // 64 * 64,),
        (lambda before, prompt: (sum(a == b for a, b in zip(before, prompt, strict=False))) // 64 * 64,),
        (lambda before, prompt: cached(before, prompt) // 64,),
        (lambda before, prompt: 1.5,),
    ],
    "merge": [
        (lambda first, second: (max(first[0], second[0]), first[1] + second[1], first[2] + second[2]),),
        (lambda first, second: first,),
        (lambda first, second: merge(first, second)[:2],),
        (lambda first, second: merge(first, second)[1],),
    ],
    "splits": [
        (lambda position, window: [(0, position + 1)],),
        (lambda position, window: [(i, min(i + 256, position + 1)) for i in range(0, position + 1, 256)],),
        (lambda position, window: [(max(0, position + 1 - (window or 9999)), position + 1)],),
        (lambda position, window: [(a, b - 1) for a, b in splits(position, window)],),
        (lambda position, window: position,),
    ],
    "kv bytes": [
        (lambda layers, q_heads, kv_heads, head_dim, position, window: layers * kv_heads * head_dim * (position + 1) * 8,),
        (lambda layers, q_heads, kv_heads, head_dim, position, window: kv_bytes(layers, 0, q_heads, head_dim, position, window),),
        (lambda layers, q_heads, kv_heads, head_dim, position, window: kv_bytes(layers, 0, kv_heads, head_dim, position, window) // 2,),
        (lambda **_: 0,),
    ],
    "padding": [
        (lambda demand, buckets: 0,),
        (lambda demand, buckets: padding(dict.fromkeys(demand, 1), buckets),),
        (lambda demand, buckets: sum(min(b for b in buckets if b >= rows) - rows for rows in demand),),
    ],
    "buckets": [
        (lambda demand, most: [max(demand)],),
        (lambda demand, most: sorted(demand)[:most],),
        (lambda demand, most: sorted(demand),),
        (lambda demand, most: sorted({*sorted(demand, key=demand.get)[-most + 1 :], max(demand)})[-most:],),
        (lambda demand, most: None,),
        (lambda demand, most: [0, max(demand)],),
    ],
    "fewest": [(FEWEST - 1, DEMAND), (FEWEST + 1, DEMAND), (0, DEMAND), (2.0, DEMAND), (True, DEMAND)],
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
    assert "\n" not in verdict.words, "a hint, not a traceback"
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
