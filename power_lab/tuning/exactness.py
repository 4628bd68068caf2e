"""Whether points that must have the same outputs have them: the promise of the exact mode, checked over a whole sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from power_lab.engine.trace import RunRecord
from power_lab.tuning.point import Pass, Point


@dataclass(frozen=True)
class Difference:
    """An output that is not the family's.

    Attributes:
        point: its number; repeat: the pass; prompt: the first that differs; token: the first token of its output that differs.
    """

    point: int
    repeat: int
    prompt: int
    token: int

    def __str__(self) -> str:
        return f"point {self.point}, pass {self.repeat}, prompt {self.prompt}, from output token {self.token} on"


@dataclass(frozen=True)
class Family:
    """Points whose settings may not change a token against each other.

    Attributes:
        settings: what they have in common that could; exact: whether the promise holds for them.
        digest: of the outputs, those of most passes where they differ, of plain decoding where that is a draw.
        points: their numbers; passes: how many were compared.
        differences: those of the passes that differ.
    """

    settings: dict[str, str]
    exact: bool
    digest: str
    points: tuple[int, ...]
    passes: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Agreement:
    """All families of a sweep. True where every promise was kept."""

    families: tuple[Family, ...]

    @property
    def broken(self) -> tuple[Difference, ...]:
        """What must not be: differences within families of exact points."""
        return tuple(one for family in self.families if family.exact for one in family.differences)

    def __bool__(self) -> bool:
        return not self.broken

    def of(self, point: int) -> tuple[Difference, ...]:
        """A point's differences, promised or not."""
        return tuple(one for family in self.families for one in family.differences if one.point == point)


def agreement(points: Iterable[Point]) -> Agreement:
    """Compare all measured passes, family by family."""
    families: dict[tuple[tuple[str, str], ...], list[Point]] = {}
    for point in points:
        if point.measured:
            families.setdefault(point.trial.family, []).append(point)
    return Agreement(tuple(_family(dict(key), found) for key, found in families.items()))


def _family(settings: dict[str, str], points: Sequence[Point]) -> Family:
    passes = [(point, at, one, one.digest) for point in points for at, one in enumerate(point.passes)]
    votes = Counter(digest for *_, digest in passes)
    plain = {digest for point, _, _, digest in passes if point.settings.get("speculate", "off") == "off"}
    digest = max(votes, key=lambda one: (votes[one], one in plain))
    reference = next(one for _, _, one, said in passes if said == digest)
    differences = tuple(
        Difference(point.number, at, *_where(reference, one)) for point, at, one, said in passes if said != digest
    )
    exact = all(point.trial.config.mode == "exact" for point in points)
    return Family(settings, exact, digest, tuple(point.number for point in points), len(passes), differences)


def _where(reference: Pass, other: Pass) -> tuple[int, int]:
    pairs = zip(reference.records, other.records, strict=True)
    return next((at, _first(a, b)) for at, (a, b) in enumerate(pairs) if a.tokens != b.tokens)


def _first(a: RunRecord, b: RunRecord) -> int:
    both = zip(a.tokens, b.tokens, strict=False)
    return next((at for at, (x, y) in enumerate(both) if x != y), min(len(a.tokens), len(b.tokens)))
