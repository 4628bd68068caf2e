"""What a finished run would have done under other settings of speculation: rounds exactly, seconds as far as they were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.recorded import RecordedCosts
from power_lab.engine.speculation.replay import ReplayedRound, replay
from power_lab.engine.trace import RunRecord
from power_lab.errors import ConfigError, ReplayRefused
from power_lab.evidence.dataset import check
from power_lab.keywords import sampling
from power_lab.tables import html_table, text_table
from power_lab.widgets.text import count, percent

if TYPE_CHECKING:
    import xarray

    from power_lab.run import Run

NAN = float("nan")
_COUNTS = ("rounds", "drafted", "accepted", "wasted")
_RATES = {"acceptance": "1", "tokens_per_pass": "token", "seconds": "s", "tokens_per_s": "token/s"}


@dataclass(frozen=True)
class WhatIf:
    """A run under other settings of speculation.

    Attributes:
        settings: `speculate`, `width` and other settings of speculation, as they would have been.
        rounds: what each round would have drafted and emitted. Exact for the request alone (see `caveats`).
        step_s: for each round the seconds of its step as measured elsewhere; NaN where no step of so many rows was. The first round
            is the prompt's, and costs what it did.
        draft_s: for each round the seconds of drafting; 0 where no drafter was asked.
        draft_source: `recorded` (median of the runs that costs were taken from), `measured in this replay`, or `no drafts`.
        unmeasured: rows of steps that were never measured -> rounds that would have needed them.
        caveats: what keeps a real run from being this one.
    """

    settings: dict[str, Any]
    rounds: tuple[ReplayedRound, ...]
    step_s: tuple[float, ...]
    draft_s: tuple[float, ...]
    draft_source: str
    unmeasured: dict[int, int]
    caveats: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Output tokens, which are the run's."""
        return sum(len(entry.emitted) for entry in self.rounds)

    @property
    def target_passes(self) -> int:
        """Passes of the target that emit something: one a round."""
        return len(self.rounds)

    @property
    def drafted(self) -> int:
        return sum(len(entry.drafted) for entry in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(entry.accepted for entry in self.rounds)

    @property
    def wasted(self) -> int:
        """Drafts verified in vain."""
        return self.drafted - self.accepted

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.target_passes

    @property
    def accepted_lengths(self) -> dict[int, int]:
        """Accepted drafts of a round -> rounds, of those that verified any."""
        return dict(sorted(Counter(entry.accepted for entry in self.rounds if entry.drafted).items()))

    @property
    def widths(self) -> dict[int, int]:
        """Drafts verified in a round -> rounds."""
        return dict(sorted(Counter(len(entry.drafted) for entry in self.rounds).items()))

    @property
    def seconds(self) -> float:
        """Predicted seconds of the rounds after the first; NaN where one of them has no measured cost (see `reason`)."""
        return sum(self.step_s[1:]) + sum(self.draft_s[1:])

    @property
    def tokens_per_s(self) -> float:
        """Predicted decoding speed: the tokens after the first round over `seconds`; NaN where those are not known.

        What the engine does between steps is not in it: compare predictions with each other, `run.what_if()` among them, and not
        with `run.tokens_per_s`.
        """
        later = self.tokens - len(self.rounds[0].emitted)
        return later / self.seconds if later and self.seconds > 0 else NAN

    @property
    def reason(self) -> str:
        """Why there is no speed, or ""."""
        if len(self.rounds) == 1:
            return "The output ends in the first round."
        if not self.unmeasured:
            return ""
        rows, rounds = ", ".join(map(str, self.unmeasured)), sum(self.unmeasured.values())
        return (
            f"No step of {rows} rows was measured, which {count(rounds, 'round')} of {len(self.rounds)} would have been. "
            "Pass runs that had such steps as costs_from."
        )

    @cached_property
    def dataset(self) -> xarray.Dataset:
        """The rounds: dimension `round`."""
        import numpy as np
        import xarray

        columns: dict[str, tuple[str, list[Any]]] = {
            "start": ("1", [entry.start for entry in self.rounds]),
            "drafted": ("token", [len(entry.drafted) for entry in self.rounds]),
            "accepted": ("token", [entry.accepted for entry in self.rounds]),
            "emitted": ("token", [len(entry.emitted) for entry in self.rounds]),
            "rows": ("row", [entry.rows for entry in self.rounds]),
            "step_s": ("s", list(self.step_s)),
            "draft_s": ("s", list(self.draft_s)),
            "why": ("1", [entry.why for entry in self.rounds]),
        }
        data = {
            name: ("round", np.array(values, dtype=object if name == "why" else None), {"units": unit})
            for name, (unit, values) in columns.items()
        }
        attributes = {**self.settings, "draft_source": self.draft_source, "caveats": "; ".join(self.caveats)}
        return xarray.Dataset(data, {"round": np.arange(len(self.rounds))}, attributes)

    def _rows(self) -> list[tuple[str, str]]:
        speed = f"{self.tokens_per_s:.1f} tok/s in {self.seconds:.3f} s after the first round, drafting {self.draft_source}"
        rows = [
            ("settings", ", ".join(f"{key} {value}" for key, value in self.settings.items())),
            ("rounds", f"{self.target_passes:,} for {count(self.tokens, 'token')}: {self.tokens_per_pass:.2f} a pass"),
            ("drafts", f"{self.drafted:,}, {self.accepted:,} accepted ({percent(self.accepted, self.drafted)})"),
            ("accepted a round", _histogram(self.accepted_lengths)),
            ("drafts a round", _histogram(self.widths)),
            ("predicted", self.reason or speed),
        ]
        return [*rows, *(("but", caveat) for caveat in self.caveats)]

    def __repr__(self) -> str:
        return text_table(self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._rows())


def what_if(
    record: RunRecord,
    costs: RecordedCosts,
    *,
    speculate: str | None = None,
    width: int | None = None,
    controller: str | None = None,
) -> WhatIf:
    """A recorded run with other settings of speculation. Arguments and errors as for `Run.what_if`."""
    check(record)
    given = {"speculate": speculate, "width": width, "controller": controller}
    asked = {key: value for key, value in given.items() if value is not None}
    wanted = sampling(asked)
    params = msgspec.structs.replace(_params(record), **{key: getattr(wanted, key) for key in asked})
    rounds = replay(record, params)
    first = record.rounds[0]
    steps = [first.forward_s + first.sample_s + first.commit_s]
    steps += [NAN if (known := costs.step(entry.rows)) is None else known for entry in rounds[1:]]
    recorded = costs.draft(params.speculate, 1)
    unmeasured = Counter(entry.rows for entry in rounds[1:] if costs.step(entry.rows) is None)
    asked_any = any(entry.asked for entry in rounds)
    return WhatIf(
        settings={"speculate": params.speculate, "width": params.width},
        rounds=rounds,
        step_s=tuple(steps),
        draft_s=tuple((entry.draft_s if recorded is None else recorded) if entry.asked else 0.0 for entry in rounds),
        draft_source="no drafts" if not asked_any else "measured in this replay" if recorded is None else "recorded",
        unmeasured=dict(sorted(unmeasured.items())),
        caveats=_caveats(record),
    )


def sweep(
    runs: Sequence[Run],
    *,
    speculate: Sequence[str] = ("lookup", "ngram"),
    widths: Sequence[int] = (1, 3, 7, 15),
    controller: str | None = None,
    costs_from: Iterable[Run] | None = None,
) -> xarray.Dataset:
    """Runs under every drafter and width: dimensions `run`, `drafter`, `width`, and `length` for the rounds by accepted drafts.

    Args:
        runs: of one engine.
        speculate: drafters. widths: most drafts a round.
        controller: what chooses the width of each round; the runs' own if None.
        costs_from: runs whose steps give the costs; these ones if None.

    Raises:
        ConfigError, ReplayRefused as `Run.what_if` does.
    """
    import numpy as np
    import xarray

    if not runs or not speculate or not widths:
        raise ConfigError("runs, speculate, widths", "one of them is empty", "Give at least one of each.")
    costs = RecordedCosts.of([run.record for run in (runs if costs_from is None else costs_from)])
    sampling({"width": max(widths)})
    shape = len(runs), len(speculate), len(widths)
    numbers = {name: np.zeros(shape, np.int64) for name in _COUNTS} | {name: np.full(shape, NAN) for name in _RATES}
    lengths = np.zeros((*shape, max(widths) + 1), np.int64)
    for at in np.ndindex(shape):
        record, drafter, width = runs[at[0]].record, speculate[at[1]], int(widths[at[2]])
        result = what_if(record, costs, speculate=drafter, width=width, controller=controller)
        numbers["rounds"][at] = len(result.rounds)
        for name in (*_COUNTS[1:], *_RATES):
            value = getattr(result, name)
            numbers[name][at] = NAN if value is None else value
        for length, rounds in result.accepted_lengths.items():
            lengths[(*at, length)] = rounds
    dims = ("run", "drafter", "width")
    units = dict.fromkeys(_COUNTS[1:], "token") | {"rounds": "1"} | _RATES
    data: dict[str, Any] = {name: (dims, values, {"units": units[name]}) for name, values in numbers.items()}
    data["accepted_length"] = ((*dims, "length"), lengths, {"units": "1", "long_name": "rounds by accepted drafts"})
    return xarray.Dataset(data, {"drafter": list(speculate), "width": list(widths), "length": range(max(widths) + 1)})


def _params(record: RunRecord) -> SamplingParams:
    try:
        return msgspec.convert(record.params, SamplingParams, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise ReplayRefused(f"params: {error}", "Replay a record as the engine made it.") from error


def _caveats(record: RunRecord) -> tuple[str, ...]:
    caveats = []
    if record.engine.mode != "exact":
        caveats.append("in fast mode the tokens themselves may depend on speculation")
    if record.preemptions or any(entry.requests > 1 for entry in record.rounds):
        caveats.append("the run shared its steps; these rounds are those of the request alone")
    return tuple(caveats)


def _histogram(counts: dict[int, int]) -> str:
    return ", ".join(f"{value}: {rounds}" for value, rounds in counts.items()) or "none"
