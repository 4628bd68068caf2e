"""The exercises of the lesson on attention over pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from power_lab.kernels.ops import SPLIT

State = tuple[float, float, np.ndarray]
"""Of some keys: the largest score, the sum of e^(score - largest), the values weighted with these (f64 [dim])."""


def merge(answer: Callable[[State, State], Any]) -> str:
    """Two partial results of the softmax into one."""
    random = np.random.default_rng(3)
    values = random.normal(size=(40, 4))
    cases = {
        "two halves with the same largest score": np.tile(random.normal(size=20), 2),
        "a second half with larger scores": np.concatenate([random.normal(size=20), random.normal(size=20) + 6]),
        "a second half with smaller scores": np.concatenate([random.normal(size=20), random.normal(size=20) - 6]),
        "scores around 1,000, whose exponential is no number": random.normal(size=40) + 1000,
    }
    for name, scores in cases.items():
        first, second = (_state(scores[half], values[half]) for half in (slice(20), slice(20, 40)))
        with np.errstate(all="ignore"):
            said = answer(first, second)
        if not isinstance(said, tuple | list) or len(said) != 3:
            return "The function should return three things: the largest score, the sum, the weighted values."
        for part, is_, should in zip(("largest score", "sum", "weighted values"), said, _state(scores, values), strict=True):
            if np.shape(is_) != np.shape(should) or not np.allclose(is_, should, rtol=1e-9):
                return f"Not yet: the {part} is off for {name}."
    return ""


def splits(answer: Callable[[int, int], Sequence[Sequence[int]]]) -> str:
    """Where the keys of a row are cut: (first, behind the last), at absolute multiples of the split."""
    cases = {
        "the first row": (0, 0),
        "the last row of the first split": (SPLIT - 1, 0),
        "the first row that needs a second split": (SPLIT, 0),
        "a row far behind": (1000, 0),
        "a window that is longer than the text": (100, 512),
        "a window that begins inside of a split": (1000, 512),
        "a window that lies within one split": (500, 64),
    }
    for name, (position, window) in cases.items():
        said = answer(position, window)
        try:
            found = [(int(first), int(last)) for first, last in said]
        except (TypeError, ValueError):
            return "The function should return a list of pairs: the first key, and the one behind the last."
        if found != canonical_splits(position, window):
            start = max(position + 1 - window, 0) if window else 0
            covered = bool(found) and found[0][0] == start and found[-1][1] == position + 1
            more = "The keys are the right ones, the cuts are not." if covered else "These are not the keys that the row sees."
            return f"Not yet: look at {name} (position {position}, window {window}). {more}"
    return ""


def canonical_splits(position: int, window: int = 0, split: int = SPLIT) -> list[tuple[int, int]]:
    """The engine's cuts for the row at a position; window 0 sees all keys."""
    start = max(position + 1 - window, 0) if window else 0
    cuts = range(start // split * split, position + 1, split)
    return [(max(first, start), min(first + split, position + 1)) for first in cuts]


def kv_bytes(answer: Callable[..., int]) -> str:
    """Bytes of keys and values that one decode step reads for one row."""
    cases = {
        "as many KV heads as query heads": {"layers": 4, "q_heads": 8, "kv_heads": 8, "head_dim": 64, "position": 99, "window": 0},
        "SmolLM2 at position 99": {"layers": 30, "q_heads": 9, "kv_heads": 3, "head_dim": 64, "position": 99, "window": 0},
        "one KV head for all": {"layers": 18, "q_heads": 4, "kv_heads": 1, "head_dim": 256, "position": 511, "window": 0},
        "a window of 512 at position 4095": {"layers": 2, "q_heads": 4, "kv_heads": 1, "head_dim": 256, "position": 4095, "window": 512},
        "a window that is longer than the text": {"layers": 2, "q_heads": 4, "kv_heads": 1, "head_dim": 256, "position": 9, "window": 512},
    }
    for name, given in cases.items():
        said = answer(**given)
        keys = min(given["position"] + 1, given["window"] or given["position"] + 1)
        right = given["layers"] * given["kv_heads"] * given["head_dim"] * keys * 2 * 4
        if said != right:
            more = " Values are read as well as keys." if said * 2 == right else ""
            return f"Not yet: look at {name}.{more}"
    return ""


def _state(scores: np.ndarray, values: np.ndarray) -> State:
    top = scores.max()
    weights = np.exp(scores - top)
    return float(top), float(weights.sum()), weights @ values
