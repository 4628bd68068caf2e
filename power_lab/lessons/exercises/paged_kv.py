"""The exercises of the lesson on paged keys and values and on continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from power_lab.kernels.ops import BLOCK
from power_lab.lessons.stepwise import Frame

PREFILLING = "prefill"


def slot(answer: Callable[[int, Sequence[int]], int]) -> str:
    """Where the keys and values of a position lie, counted in places from the beginning of the pool."""
    cases = {
        "position 0 of the table [1]": (0, [1]),
        "position 63 of the table [7]": (63, [7]),
        "position 64, the first one of the second block": (64, [7, 2]),
        "a table whose blocks are in no order": (200, [9, 3, 11, 5]),
    }
    for name, (position, blocks) in cases.items():
        said = answer(position, list(blocks))
        if not _whole(said):
            return "The function should return one whole number."
        if said != blocks[position // BLOCK] * BLOCK + position % BLOCK:
            return f"Not yet: look at {name}. Blocks hold {BLOCK} places."
    return ""


def share(answer: Callable[[Sequence[int], int], Sequence[int]], frames: Sequence[Frame] = ()) -> str:
    """Rows of each running request in one step: all that it lacks, as far as the budget goes, and a row for each one behind it.

    frames: of a real run, whose steps of requests that were running are compared too.
    """
    cases = {
        "one request that lacks less than the budget": ([20], 48),
        "one long prompt": ([300], 48),
        "two requests that decode": ([1, 1], 48),
        "a prompt behind a request that decodes": ([1, 300], 48),
        "a prompt before a request that decodes, which must get its row": ([300, 1], 48),
        "two prompts before a request that decodes": ([40, 40, 1], 48),
    }
    for name, (lacking, budget) in cases.items():
        said = answer(list(lacking), budget)
        if said is None or isinstance(said, (int, str)):
            return "The function should return a list of row counts, one for each request."
        if list(said) != shared(lacking, budget):
            more = f" They are more than the budget of {budget}." if sum(said) > budget else ""
            return f"Not yet: look at {name}.{more}"
    for frame in frames:
        rows = [part.rows for part in frame.parts if part.rows and part.phase != PREFILLING]
        if rows and list(answer([1] * len(rows), 512)) != rows:
            return f"It differs from what the engine did in step {frame.number}."
    return ""


def shared(lacking: Sequence[int], budget: int) -> list[int]:
    """The engine's rule."""
    rows = []
    for at, wanted in enumerate(lacking):
        given = min(wanted, budget - (len(lacking) - at - 1))
        rows.append(given)
        budget -= given
    return rows


def cached(answer: Callable[[Sequence[int], Sequence[int]], int]) -> str:
    """How many tokens of a prompt come from the cache, where one earlier prompt was computed."""
    text = list(range(1000))
    cases = {
        "two prompts that differ at once": (text[:200], [5, *text[:199]]),
        "prompts that agree in fewer tokens than a block holds": (text[:200], [*text[:63], *text[500:600]]),
        "prompts that agree in one block and a half": (text[:200], [*text[:96], *text[500:600]]),
        "a prompt that goes on where the earlier one ended": (text[:100], text[:300]),
        "the same prompt of 200 tokens again": (text[:200], text[:200]),
        "the same prompt of 128 tokens again: the last token is always computed": (text[:128], text[:128]),
    }
    for name, (before, prompt) in cases.items():
        said = answer(list(before), list(prompt))
        if not _whole(said):
            return "The function should return one whole number: of tokens."
        same = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), min(len(before), len(prompt)))
        if said != min(same, len(prompt) - 1) // BLOCK * BLOCK:
            return f"Not yet: look at {name}."
    return ""


def _whole(value: object) -> bool:
    """Numpy's whole numbers too, but not True."""
    return not isinstance(value, bool) and hasattr(value, "__index__")
