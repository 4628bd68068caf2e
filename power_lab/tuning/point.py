"""One measured point of a sweep: passes over the prompts, and the figures that come of them."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from power_lab.engine.report import MemoryPlan
from power_lab.engine.trace import RunRecord
from power_lab.errors import ConfigError
from power_lab.run import Run
from power_lab.tuning.settings import Trial

if TYPE_CHECKING:
    from power_lab.widgets.acceptance import Acceptance
    from power_lab.widgets.timeline import Timeline

NAN = float("nan")


@dataclass(frozen=True)
class Graphs:
    """Steps of an engine since it was loaded: all, and those that replayed a graph; bytes of graphs captured."""

    steps: int
    replays: int
    nbytes: int


@dataclass(frozen=True)
class Pass:
    """All prompts once.

    Attributes:
        records: one a prompt, in their order.
        wall_s: from the first submission to the last result.
        steps, replays: of the engine meanwhile; None where it captures no graphs.
    """

    records: tuple[RunRecord, ...]
    wall_s: float
    steps: int | None = None
    replays: int | None = None

    @property
    def tokens(self) -> int:
        return sum(len(record.tokens) for record in self.records)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s > 0 else NAN

    @property
    def digest(self) -> str:
        return outputs_digest(self.records)


@dataclass(frozen=True)
class Point:
    """What was measured of one trial, or why nothing was.

    Attributes:
        number: in the order of measuring, from 0.
        passes: the counted ones, whole.
        memory: the engine's plan after them, None before.
        captured: bytes of captured graphs; load_s: seconds that its engine took to load, NaN where it was not.
        asked: counted passes that were asked for; error: why it failed, "" where it did not.
    """

    number: int
    trial: Trial
    passes: tuple[Pass, ...] = ()
    memory: MemoryPlan | None = None
    captured: int | None = None
    load_s: float = NAN
    asked: int = 1
    error: str = ""

    def but(self, **changes: Any) -> Point:
        return replace(self, **changes)

    @property
    def settings(self) -> dict[str, Any]:
        """What was asked for, of the engine, the requests and the sweep."""
        return self.trial.settings

    @property
    def request(self) -> dict[str, Any]:
        """Keywords for `lab.generate` that ask for the same."""
        return dict(self.trial.request)

    @property
    def engine(self) -> dict[str, Any]:
        """Keywords for `lab.configure` that bring the same engine."""
        return {**self.trial.engine, "draft": self.trial.config.draft}

    @property
    def measured(self) -> bool:
        return bool(self.passes)

    @property
    def done(self) -> bool:
        """Whether nothing is left to measure: all passes were made, or it failed."""
        return bool(self.error) or len(self.passes) >= self.asked

    @property
    def reason(self) -> str:
        """Why there is no measurement, or not all of it; "" where there is."""
        if self.done:
            return self.error
        return f"stopped after {len(self.passes)} of {self.asked} passes" if self.passes else "stopped before it"

    @property
    def typical(self) -> Pass:
        """The pass of median speed; the slower of the middle two where their number is even. Raises ConfigError where there is none."""
        if not self.passes:
            raise ConfigError("point", f"{self.number} was not measured: {self.reason}", "Choose another point.")
        return sorted(self.passes, key=lambda one: one.tokens_per_s)[(len(self.passes) - 1) // 2]

    @property
    def digest(self) -> str:
        """Hex SHA-256 of all outputs, "" where there are none. Passes that differ are the exactness check's business."""
        return self.passes[0].digest if self.passes else ""

    @property
    def runs(self) -> list[Run]:
        """The typical pass as runs, one a prompt. Raises ConfigError where nothing was measured."""
        return [Run(record) for record in self.typical.records]

    def acceptance(self, prompt: int = 0) -> Acceptance:
        """The acceptance trace of one prompt's run."""
        from power_lab.widgets.acceptance import Acceptance

        return Acceptance(self._run(prompt))

    def timeline(self, prompt: int = 0) -> Timeline:
        """The steps of one prompt's run."""
        from power_lab.widgets.timeline import Timeline

        return Timeline(run=self._run(prompt))

    def _run(self, prompt: int) -> Run:
        runs = self.runs
        if not 0 <= prompt < len(runs):
            raise ConfigError("prompt", f"{prompt} is outside 0..{len(runs) - 1}")
        return runs[prompt]

    @cached_property
    def figures(self) -> dict[str, float]:
        """Name -> value; NaN where it was not measured or has no meaning."""
        found = dict.fromkeys(FIGURES, NAN)
        if self.memory is not None:
            found |= {f"{part}_bytes": float(getattr(self.memory, part)) for part in _PARTS}
            found["planned_bytes"] = float(self.memory.total)
        if self.captured is not None:
            found["captured_bytes"] = float(self.captured)
        found["load_s"] = self.load_s
        if self.passes:
            found |= _speeds(self.passes) | _counts(self.typical)
        return found

    def __repr__(self) -> str:
        what = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        said = f"{self.figures['tokens_per_s']:.1f} tokens/s" if self.passes else self.reason
        return f"<Point {self.number}: {what}: {said}>"


_PARTS = ("weights", "pool", "states", "graphs", "workspace", "resident")

FIGURES: dict[str, tuple[str, str]] = {
    "tokens_per_s": ("token/s", "output tokens of all prompts over the time of a pass, median of the passes"),
    "decode_tokens_per_s": (
        "token/s",
        "tokens after each first round over the time from first to last token, mean of requests",
    ),
    "time_to_first_token_s": ("s", "submission to first token, median over prompts and passes"),
    "acceptance": ("1", "accepted over drafted tokens"),
    "tokens_per_pass": ("token", "output tokens per pass of the target model and request"),
    "tokens": ("token", "output tokens of a pass"),
    "drafted": ("token", "draft tokens verified in a pass"),
    "wasted": ("token", "draft tokens verified in vain in a pass"),
    "prompt_tokens": ("token", "prompt tokens of a pass"),
    "cached_tokens": ("token", "prompt tokens that the prefix cache served in a pass"),
    "preemptions": ("1", "preemptions in a pass"),
    "graph_hits": ("1", "share of a pass's steps that replayed a captured graph, NaN where none are captured"),
    "planned_bytes": ("byte", "memory plan of the engine: weights, KV pool, states, graphs and workspace"),
    "weights_bytes": ("byte", "weights, those of a drafter included"),
    "pool_bytes": ("byte", "KV pool"),
    "states_bytes": ("byte", "recurrent states"),
    "graphs_bytes": ("byte", "planned for graphs"),
    "workspace_bytes": ("byte", "activations and scratch"),
    "captured_bytes": ("byte", "graphs captured when the point was done"),
    "resident_bytes": (
        "byte",
        "resident memory of the engine host when the point was done, other engines of this user included",
    ),
    "load_s": ("s", "loading the point's engine, next to nothing where it was there"),
}
"""Name -> unit and meaning, in the order of the cube."""


def outputs_digest(records: Sequence[RunRecord]) -> str:
    """Hex SHA-256 over the token ids of all outputs in the order of their prompts."""
    text = ";".join(",".join(map(str, record.tokens)) for record in records)
    return hashlib.sha256(text.encode()).hexdigest()


def _speeds(passes: Sequence[Pass]) -> dict[str, float]:
    records = [record for one in passes for record in one.records]
    decoding = [speed for record in records if (speed := Run(record).tokens_per_s) is not None]
    waits = [record.queue_s + record.prefill_s for record in records]
    return {
        "tokens_per_s": statistics.median(one.tokens_per_s for one in passes),
        "decode_tokens_per_s": statistics.fmean(decoding) if decoding else NAN,
        "time_to_first_token_s": statistics.median(waits),
    }


def _counts(typical: Pass) -> dict[str, float]:
    records = typical.records
    rounds = [entry for record in records for entry in record.rounds if entry.emitted]
    drafted = sum(len(entry.drafted) for entry in rounds)
    accepted = sum(entry.accepted for entry in rounds)
    hits = NAN if not typical.steps or typical.replays is None else typical.replays / typical.steps
    return {
        "acceptance": accepted / drafted if drafted else NAN,
        "tokens_per_pass": typical.tokens / len(rounds) if rounds else NAN,
        "tokens": float(typical.tokens),
        "drafted": float(drafted),
        "wasted": float(drafted - accepted),
        "prompt_tokens": float(sum(len(record.prompt_tokens) for record in records)),
        "cached_tokens": float(sum(record.cached for record in records)),
        "preemptions": float(sum(record.preemptions for record in records)),
        "graph_hits": hits,
    }
