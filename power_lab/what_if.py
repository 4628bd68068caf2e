"""What a finished run would have done under other settings of speculation: rounds exactly, seconds as far as they were measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec

from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.recorded import RecordedCosts
from power_lab.engine.speculation.replay import FROM_COUNTS, FROM_TOKENS, NAN, ReplayedRound, replay
from power_lab.engine.trace import RunRecord
from power_lab.errors import ConfigError, ReplayRefused
from power_lab.evidence.dataset import check
from power_lab.keywords import sampling
from power_lab.tables import html_table, text_table
from power_lab.widgets.rounds_chart import rounds_chart
from power_lab.widgets.text import count, percent

if TYPE_CHECKING:
    import xarray

    from power_lab.run import Run

_COUNTS = ("rounds", "drafted", "accepted", "wasted")
_RATES = {"acceptance": "1", "tokens_per_pass": "token", "seconds": "s", "tokens_per_s": "token/s"}


@dataclass(frozen=True)
class WhatIf:
    """A run under other settings of speculation.

    Attributes:
        settings: `speculate`, `width` and other settings of speculation, as they would have been.
        rounds: what each round would have drafted and emitted, and what it costs. Exact for the request alone, but for `caveats`.
        draft_source: `recorded` (median of the runs that costs were taken from), `measured in this replay`, `not measured`, or `no drafts`.
        caveats: what may keep a real run from being this one.
    """

    settings: dict[str, Any]
    rounds: tuple[ReplayedRound, ...]
    draft_source: str
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
        return sum(entry.step_s + entry.draft_s for entry in self.rounds[1:])

    @property
    def unmeasured(self) -> dict[int, int]:
        """Rows of steps that were never measured -> rounds that would have had as many."""
        return dict(sorted(Counter(entry.rows for entry in self.rounds if math.isnan(entry.step_s)).items()))

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
            drafts = {len(entry.drafted) for entry in self.rounds if math.isnan(entry.draft_s)}
            return _no_drafts(str(self.settings["speculate"]), drafts) if drafts else ""
        rows, rounds = ", ".join(map(str, self.unmeasured)), sum(self.unmeasured.values())
        there = any(entry.resumed and math.isnan(entry.step_s) for entry in self.rounds)
        what = f" with drafts of {self.settings['speculate']!r} made on the device" if there else ""
        return (
            f"No step of {rows} rows{what} was measured, which {count(rounds, 'round')} of {len(self.rounds)} would have been. "
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
            "step_s": ("s", [entry.step_s for entry in self.rounds]),
            "draft_s": ("s", [entry.draft_s for entry in self.rounds]),
            "note": ("1", [entry.note for entry in self.rounds]),
            "why": ("1", [entry.why for entry in self.rounds]),
        }
        data = {
            name: ("round", np.array(values, dtype=object if name in ("note", "why") else None), {"units": unit})
            for name, (unit, values) in columns.items()
        }
        attributes = {**self.settings, "draft_source": self.draft_source, "caveats": "; ".join(self.caveats)}
        return xarray.Dataset(data, {"round": np.arange(len(self.rounds))}, attributes)

    def _rows(self) -> list[tuple[str, str]]:
        speed = (
            f"{self.tokens_per_s:.1f} tok/s in {self.seconds:.3f} s after the first round, drafting {self.draft_source}"
        )
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
        return html_table(self._rows()) + rounds_chart(self.rounds)


def what_if(
    record: RunRecord,
    costs: RecordedCosts,
    *,
    speculate: str | None = None,
    width: int | None = None,
    controller: str | None = None,
    gate: float | None = None,
) -> WhatIf:
    """A recorded run with other settings of speculation. Arguments and errors as for `Run.what_if`."""
    check(record)
    given = {"speculate": speculate, "width": width, "controller": controller, "gate": gate}
    asked = {key: value for key, value in given.items() if value is not None}
    wanted = sampling(asked)
    params = msgspec.structs.replace(_params(record), **{key: getattr(wanted, key) for key in asked})
    rounds = replay(record, params, costs)
    return WhatIf(
        settings={key: getattr(params, key) for key in given},
        rounds=rounds,
        draft_source=_draft_source(rounds, params.speculate, costs),
        caveats=_caveats(record, params),
    )


def sweep(
    runs: Sequence[Run],
    *,
    speculate: Sequence[str] = ("lookup", "ngram"),
    widths: Sequence[int] = (1, 3, 7, 15),
    controller: str | None = None,
    gate: float | None = None,
    costs_from: Iterable[Run] | None = None,
) -> xarray.Dataset:
    """Runs under every drafter and width: dimensions `run`, `drafter`, `width`, and `length` for the rounds by accepted drafts.

    Args:
        runs: of one engine.
        speculate: drafters. widths: most drafts a round.
        controller: what chooses the width of each round; gate: how sure drafters must be; the runs' own if None.
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
    for at, (run, drafter, width) in zip(np.ndindex(shape), product(runs, speculate, widths), strict=True):
        result = what_if(run.record, costs, speculate=drafter, width=int(width), controller=controller, gate=gate)
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


def _draft_source(rounds: Sequence[ReplayedRound], drafter: str, costs: RecordedCosts) -> str:
    if not any(entry.asked for entry in rounds):
        return "no drafts"
    if any(math.isnan(entry.draft_s) for entry in rounds):
        return "not measured"
    return (
        "recorded" if drafter not in FROM_TOKENS or costs.draft(drafter, 1) is not None else "measured in this replay"
    )


def _no_drafts(drafter: str, drafts: set[int]) -> str:
    return (
        f"No draft of {', '.join(map(str, sorted(drafts)))} tokens by {drafter!r} was measured for a request alone. "
        "Pass runs that had such drafts as costs_from."
    )


def _params(record: RunRecord) -> SamplingParams:
    try:
        return msgspec.convert(record.params, SamplingParams, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise ReplayRefused(f"params: {error}", "Replay a record as the engine made it.") from error


def _caveats(record: RunRecord, params: SamplingParams) -> tuple[str, ...]:
    caveats = []
    if params.speculate != "off" and params.controller not in FROM_COUNTS:
        caveats.append(
            f"controller {params.controller!r} decides by measured seconds: these rounds are what it would choose with these costs"
        )
    if params.speculate == "ngram" and record.corpus is None:
        caveats.append("'ngram' has the request's own tokens here, and not what earlier requests of the namespace said")
    if record.engine.mode != "exact":
        caveats.append("in fast mode the tokens themselves may depend on speculation")
    if record.preemptions or any(entry.requests > 1 for entry in record.rounds):
        caveats.append("the run shared its steps; these rounds are those of the request alone")
    return tuple(caveats)


def _histogram(counts: dict[int, int]) -> str:
    return ", ".join(f"{value}: {rounds}" for value, rounds in counts.items()) or "none"
