"""What steps and drafts cost, as finished runs recorded it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from power_lab.engine.trace import RunRecord
from power_lab.errors import ReplayRefused

_SAME = ("sha256", "mode", "device", "threads", "digest")
WHOLE = ("fixed", "adaptive")  # controllers that verify all that was drafted, where no gate cuts it


class RecordedCosts:
    """Costs (see `width.Costs`): medians over the rounds of some runs of one engine.

    A step costs the seconds of its forward pass, sampling and commit, by its rows, whoever they belonged to; steps with prompt rows are
    left out, for they draw few of them. One whose drafts were made on the device has that in its seconds, so these are kept by drafter,
    and by whether a network took part. A draft costs what it did for a request alone that got one; trained drafters and draft models take
    longer for more tokens. What was not measured is not guessed.

    Args:
        steps: rows -> seconds. drafts: drafter -> seconds of one call for one request, of any width.
        widths: (drafter, drafted tokens) -> the same.
        rounds: (drafter, rows, without a network) -> seconds of a step that drafts on the device, of a request alone.
    """

    def __init__(
        self,
        steps: Mapping[int, float],
        drafts: Mapping[str, float],
        widths: Mapping[tuple[str, int], float] | None = None,
        rounds: Mapping[tuple[str, int, bool], float] | None = None,
    ) -> None:
        self.steps = dict(sorted(steps.items()))
        self.drafts = dict(drafts)
        self.widths = dict(widths or {})
        self.rounds = dict(rounds or {})

    @classmethod
    def of(cls, records: Sequence[RunRecord]) -> RecordedCosts:
        """Raises ReplayRefused where the records are of different engines: their times cannot be mixed."""
        steps: dict[int, list[float]] = defaultdict(list)
        drafts: dict[str, list[float]] = defaultdict(list)
        called: dict[str, list[float]] = defaultdict(list)
        widths: dict[tuple[str, int], list[float]] = defaultdict(list)
        rounds: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
        for index, record in enumerate(records):
            _check_same(index, records[0], record)
            drafter = str(record.params.get("speculate"))
            whole = record.params.get("controller") in WHOLE and not record.params.get("gate")
            prompts = {step.step for step in record.steps if step.prefill_rows}
            for entry in record.rounds:
                seconds = entry.forward_s + entry.sample_s + entry.commit_s
                if entry.step not in prompts:
                    if entry.resumed and entry.requests == 1:
                        rounds[drafter, entry.rows, entry.light].append(seconds)
                    elif not entry.resumed:
                        steps[entry.rows].append(seconds)
                if entry.drafted and entry.requests == 1 and not entry.resumed:
                    drafts[drafter].append(entry.draft_s)
                    if whole:
                        widths[drafter, len(entry.drafted)].append(entry.draft_s)
            for name, table in record.drafts.items():
                for drawn, seconds in table.calls:
                    widths[name, drawn].append(seconds)
                    if drawn:
                        called[name].append(seconds)
        return cls(
            {rows: median(seconds) for rows, seconds in steps.items()},
            {name: median(seconds) for name, seconds in (called | drafts).items()},
            {key: median(seconds) for key, seconds in widths.items()},
            {key: median(seconds) for key, seconds in rounds.items()},
        )

    def step(self, rows: int) -> float | None:
        return self.steps.get(rows)

    def resumed(self, drafter: str, rows: int, light: bool) -> float | None:
        """Of a step that drafts on the device, drafting included. light: without a network."""
        return self.rounds.get((drafter, rows, light))

    def staircase(self, rows: int, count: int) -> list[float | None]:
        return [self.steps.get(at) for at in range(rows, rows + count)]

    def draft(self, drafter: str, requests: int, width: int | None = None) -> float | None:
        """width: tokens of the draft, None where these do not matter."""
        if requests != 1:
            return None
        return self.drafts.get(drafter) if width is None else self.widths.get((drafter, width))


class RecordedRounds:
    """Costs of rounds that go from one drafter to the target on the device. See `OnwardCosts`."""

    def __init__(self, costs: RecordedCosts, drafter: str) -> None:
        self.heavy, self.light = (_Rounds(costs, drafter, light) for light in (False, True))


class _Rounds:
    """See `width.Costs`. A round without drafts is one row."""

    def __init__(self, costs: RecordedCosts, drafter: str, light: bool) -> None:
        self._costs, self._drafter, self._light = costs, drafter, light

    def step(self, rows: int) -> float | None:
        return self._costs.step(rows) if rows == 1 else self._costs.resumed(self._drafter, rows, self._light)

    def staircase(self, rows: int, count: int) -> list[float | None]:
        return [self.step(at) for at in range(rows, rows + count)]

    def draft(self, drafter: str, requests: int, width: int | None = None) -> float | None:
        """It is in the step."""
        return 0.0


def _check_same(index: int, first: RunRecord, record: RunRecord) -> None:
    for key in _SAME:
        here, there = getattr(record.engine, key), getattr(first.engine, key)
        if here != there:
            raise ReplayRefused(
                f"costs_from[{index}]: its engine's {key} is {here!r} and the first one's {there!r}",
                "Take costs from runs of one engine.",
            )
