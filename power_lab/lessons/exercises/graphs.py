"""The exercises of the lesson on graphs and shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from power_lab.engine.planner import plan_buckets
from power_lab.engine.shapes import Coverage
from power_lab.errors import ConfigError


def padding(answer: Callable[[Mapping[int, int], Sequence[int]], int]) -> str:
    """Rows that are computed for nothing when steps run in buckets."""
    cases = {
        "steps that fit exactly": ({1: 10, 4: 5}, (1, 2, 4)),
        "steps of 3 rows": ({3: 7}, (1, 2, 4, 8)),
        "buckets that are not in order of use": ({5: 2, 1: 100, 9: 3}, (8, 16)),
        "a step above the largest bucket, which runs as it is": ({3: 4, 300: 2}, (4, 8)),
    }
    for name, (demand, buckets) in cases.items():
        if answer(dict(demand), tuple(buckets)) != padded_rows(demand, buckets):
            return f"Not yet: look at {name}."
    return ""


def padded_rows(demand: Mapping[int, int], buckets: Sequence[int]) -> int:
    coverage = Coverage(tuple(buckets))
    return sum(count * ((coverage.cover(rows) or rows) - rows) for rows, count in demand.items())


def buckets(answer: Callable[[Mapping[int, int], int], Sequence[int]], demand: Mapping[int, int] | None = None) -> str:
    """The buckets of the least padding, by whatever way. demand: of a real run, tried as well."""
    cases: dict[str, tuple[Mapping[int, int], int]] = {
        "one bucket, which must hold all": ({1: 50, 7: 3}, 1),
        "as many buckets as sizes": ({1: 50, 7: 3, 20: 1}, 3),
        "two buckets for three sizes": ({1: 50, 7: 3, 8: 40}, 2),
        "many rare sizes and a common one": ({1: 4, 2: 4, 3: 4, 4: 200, 5: 4, 30: 1}, 3),
        "sizes for which always taking the most frequent one is wrong": ({2: 50, 20: 30, 21: 30, 40: 1}, 2),
    }
    if demand:
        cases["the run of this lesson"] = demand, 4
    for name, (wanted, most) in cases.items():
        said = answer(dict(wanted), most)
        try:
            found = tuple(sorted(int(rows) for rows in said))
            coverage = Coverage(found)
        except (TypeError, ValueError, ConfigError):
            return "The function should return row counts, each at least 1 and no two the same."
        if len(found) > most:
            return f"Not yet: {name}: these are more than the {most} that are allowed."
        if coverage.most < max(wanted):
            return f"Not yet: {name}: the largest step is in no bucket."
        best = padded_rows(wanted, plan_buckets(wanted, most, coverage).buckets)
        padded = padded_rows(wanted, found)
        if padded > best:
            return f"Not yet: {name}: these pad {padded} rows, and it can be done with fewer."
    return ""


def fewest(answer: int, demand: Mapping[int, int], allowed: float = 0.05) -> str:
    """The least number of buckets with which at most a share `allowed` of the computed rows is padding."""
    if not isinstance(answer, int) or isinstance(answer, bool) or answer < 1:
        return "The answer is a number of buckets: a whole number from 1."

    def share(most: int) -> float:
        real = sum(rows * count for rows, count in demand.items())
        padded = padded_rows(demand, plan_buckets(demand, most, Coverage((max(demand),))).buckets)
        return padded / (real + padded)

    if share(answer) > allowed:
        return f"Not yet: with so few buckets {share(answer):.0%} of the computed rows are padding."
    if answer > 1 and share(answer - 1) <= allowed:
        return "Nearly: it is little enough padding, but fewer buckets will do."
    return ""
