"""What steps and drafts cost, as finished runs recorded it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from power_lab.engine.trace import RunRecord
from power_lab.errors import ReplayRefused

_SAME = ("sha256", "mode", "device", "threads", "digest")


class RecordedCosts:
    """Costs (see `width.Costs`): medians over the rounds of some runs of one engine.

    A step costs the seconds of its forward pass, sampling and commit, by its rows, whoever they belonged to; steps with prompt rows are
    left out, for they draw few of them. A draft costs what it did for a request alone that got one. What was not measured is not guessed.

    Args:
        steps: rows -> seconds. drafts: drafter -> seconds of one call for one request.
    """

    def __init__(self, steps: Mapping[int, float], drafts: Mapping[str, float]) -> None:
        self.steps = dict(sorted(steps.items()))
        self.drafts = dict(drafts)

    @classmethod
    def of(cls, records: Sequence[RunRecord]) -> RecordedCosts:
        """Raises ReplayRefused where the records are of different engines: their times cannot be mixed."""
        steps: dict[int, list[float]] = defaultdict(list)
        drafts: dict[str, list[float]] = defaultdict(list)
        for index, record in enumerate(records):
            _check_same(index, records[0], record)
            prompts = {step.step for step in record.steps if step.prefill_rows}
            for entry in record.rounds:
                if entry.step not in prompts:
                    steps[entry.rows].append(entry.forward_s + entry.sample_s + entry.commit_s)
                if entry.drafted and entry.requests == 1:
                    drafts[str(record.params.get("speculate"))].append(entry.draft_s)
        return cls(
            {rows: median(seconds) for rows, seconds in steps.items()},
            {name: median(seconds) for name, seconds in drafts.items()},
        )

    def step(self, rows: int) -> float | None:
        return self.steps.get(rows)

    def draft(self, drafter: str, requests: int) -> float | None:
        return self.drafts.get(drafter) if requests == 1 else None


def _check_same(index: int, first: RunRecord, record: RunRecord) -> None:
    for key in _SAME:
        here, there = getattr(record.engine, key), getattr(first.engine, key)
        if here != there:
            raise ReplayRefused(
                f"costs_from[{index}]: its engine's {key} is {here!r} and the first one's {there!r}",
                "Take costs from runs of one engine.",
            )
