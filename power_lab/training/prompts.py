"""About 30,000 varied prompts, the same from the same seed: templates over topics, and tasks about passages of freely licensed prose."""

from __future__ import annotations

import random
from collections.abc import Callable

from power_lab.training import topics as words
from power_lab.training.passages import Passage, passages

Maker = Callable[[random.Random, list[Passage]], str]
COUNT = 30_000
_TRIES = 20  # prompts drawn for each that is new


def prompts(seed: int = 0, count: int = COUNT) -> list[tuple[str, str]]:
    """(kind, text) of different prompts in random order; at most `count`, fewer where a kind has no more to say."""
    rng, texts = random.Random(seed), passages()
    kinds = [kind for kind, share, _ in KINDS for _ in range(share)]
    makers = {kind: maker for kind, _, maker in KINDS}
    made: dict[str, str] = {}
    for _ in range(count * _TRIES):
        if len(made) == count:
            break
        kind = rng.choice(kinds)
        made.setdefault(makers[kind](rng, texts), kind)
    return [(kind, text) for text, kind in made.items()]


def _question(rng: random.Random, _: list[Passage]) -> str:
    return rng.choice(words.ASKS).format(rng.choice(words.TOPICS))


def _two_topics(rng: random.Random, _: list[Passage]) -> str:
    first, second = rng.sample(words.TOPICS, 2)
    ask = rng.choice(
        (
            "What do {} and {} have in common?",
            "Write a short story that involves {} and {}.",
            "Compare {} and {} in a few sentences.",
            "Write a dialogue in which {} and {} are mentioned.",
            "Which is more useful to society, {} or {}? Give reasons.",
        )
    )
    return ask.format(first, second)


def _dialogue(rng: random.Random, _: list[Passage]) -> str:
    ask = rng.choice(("Write a dialogue between {} about {}.", "Write a funny conversation between {} about {}."))
    return ask.format(rng.choice(words.ROLES), rng.choice(words.TOPICS))


def _passage(rng: random.Random, texts: list[Passage]) -> str:
    task, text = rng.choice(words.TEXT_TASKS), rng.choice(texts).text
    return f"{task}\n\n{text}" if rng.random() < 0.8 else f"{text}\n\n{task}"


def _two_passages(rng: random.Random, texts: list[Passage]) -> str:
    first, second = rng.sample(texts, 2)
    ask = rng.choice(
        ("Which of these two texts is easier to read, and why?", "What do these two texts have in common?")
    )
    return f"{ask}\n\n1. {first.text}\n\n2. {second.text}"


def _code(rng: random.Random, _: list[Passage]) -> str:
    return rng.choice(words.CODE_ASKS).format(rng.choice(words.CODE_LANGUAGES), rng.choice(words.CODE_TASKS))


def _translate(rng: random.Random, _: list[Passage]) -> str:
    sentences = " ".join(rng.sample(words.SENTENCES, rng.randint(1, 3)))
    return f"Translate into {rng.choice(words.LANGUAGES)}: {sentences}"


def _foreign(rng: random.Random, _: list[Passage]) -> str:
    return rng.choice(words.FOREIGN).format(rng.choice(words.TOPICS))


def _maths(rng: random.Random, _: list[Passage]) -> str:
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 12)
    name, other, thing = (*rng.sample(words.NAMES, 2), rng.choice(words.THINGS))
    return rng.choice(
        (
            f"What is {a} + {b}? Show your work.",
            f"What is {a} times {c}? Explain step by step.",
            f"{name} has {a} {thing} and gives {min(c, a)} to {other}. How many are left?",
            f"{name} buys {c} boxes with {b} {thing} each. How many {thing} are there in all?",
            f"Solve for x: {c}x + {a} = {a + c * b}.",
            f"A train travels {a * c} kilometres in {c} hours. What is its average speed?",
            f"List the multiples of {c} up to {c * 12}.",
            f"What is {a}% of {b * 10}?",
            f"Count from {a} to {a + 20}.",
        )
    )


def _extract(rng: random.Random, _: list[Passage]) -> str:
    rows = [
        f"{rng.choice(words.NAMES)}, {rng.randint(18, 90)}, {rng.choice(words.PLACES)}, {rng.randint(1, 99)} {rng.choice(words.THINGS)}"
        for _ in range(rng.randint(3, 7))
    ]
    task = rng.choice(
        (
            "Turn these lines into a JSON list with the keys name, age, city and items.",
            "Make a Markdown table with the columns name, age, city and items out of these lines.",
            "Sort these lines by age, the youngest first.",
            "Write one sentence about each of these people.",
            "Repeat these lines exactly as they are.",
        )
    )
    return task + "\n\n" + "\n".join(rows)


def _plan(rng: random.Random, _: list[Passage]) -> str:
    place, days = rng.choice(words.PLACES), rng.randint(2, 7)
    name = rng.choice(words.NAMES)
    return rng.choice(
        (
            f"Plan a trip of {days} days to {place} for someone who likes {rng.choice(words.TOPICS)}.",
            f"Write an email from {name} that cancels a meeting in {place} on day {days} of next month.",
            f"Write a birthday card for {name}, who loves {rng.choice(words.TOPICS)}.",
            f"Write a short biography of a fictional person named {name} from {place}.",
            f"Describe a morning in {place} in {days} sentences.",
        )
    )


KINDS: tuple[tuple[str, int, Maker], ...] = (
    ("question", 34, _question),
    ("two topics", 6, _two_topics),
    ("dialogue", 4, _dialogue),
    ("passage", 26, _passage),
    ("two passages", 1, _two_passages),
    ("code", 9, _code),
    ("translate", 4, _translate),
    ("foreign", 5, _foreign),
    ("maths", 5, _maths),
    ("extract", 3, _extract),
    ("plan", 3, _plan),
)
"""(kind, share in percent, how one is made)."""
