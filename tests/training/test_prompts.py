"""Prompts that drafters are trained on: many, varied, reproducible, and none of those that judge them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from bench import prompts as judged
from power_lab.training import topics
from power_lab.training.passages import LONGEST, SHORTEST, SOURCES, passages
from power_lab.training.prompts import COUNT, KINDS, prompts


@pytest.fixture(scope="module")
def made() -> list[tuple[str, str]]:
    return prompts()


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def runs(text: str, length: int) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[i : i + length]) for i in range(len(found) - length + 1)}


def test_there_are_many_and_all_differ(made: list[tuple[str, str]]) -> None:
    assert len(made) == COUNT == len({text for _, text in made})
    counts = Counter(kind for kind, _ in made)
    assert set(counts) == {kind for kind, _, _ in KINDS}
    assert sum(share for _, share, _ in KINDS) == 100
    assert min(counts.values()) >= COUNT // 200


def test_a_seed_decides_them(made: list[tuple[str, str]]) -> None:
    assert prompts(0, 500) == made[:500]
    assert prompts(1, 500) != made[:500]


def test_no_judged_prompt_topic_or_text_is_among_them(made: list[tuple[str, str]]) -> None:
    judge = [text for _, text in judged.prompts()]
    ours = [text for _, text in made]
    assert not set(judge) & set(ours)
    texts = [*judge, (judged.ROOT / "LICENSE").read_text(), *judged.CODE]
    shared = set().union(*(runs(text, 8) for text in texts)) & set().union(*(runs(text, 8) for text in ours))
    assert not shared
    topic = re.compile(r"\b(" + "|".join(map(re.escape, judged.TOPICS)) + r")\b")
    assert not [name for name in topics.TOPICS if topic.search(name)]
    assert not [ask for ask in judged.ASKS if ask in topics.ASKS]
    assert not [text for text in judged.LANGUAGES if text in ours]


def test_topics_are_different_and_templates_have_their_places() -> None:
    assert len(set(topics.TOPICS)) > 280
    for template in (*topics.ASKS, *topics.FOREIGN):
        assert template.count("{}") == 1
    for template in topics.CODE_ASKS:
        assert template.count("{}") == 2


def test_passages_are_prose_of_known_licence() -> None:
    found = passages()
    assert len(found) > 1000
    assert len({passage.text for passage in found}) == len(found)
    for passage in found:
        assert passage.source in SOURCES
        assert SHORTEST <= len(passage.text) <= LONGEST
