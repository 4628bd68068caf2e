"""What speculation came to, counted from trace events: of one request, of several, of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from power_lab.engine.report import Decision
from power_lab.engine.trace import Round, RunRecord, Step


@dataclass(slots=True, eq=False)
class Metrics:
    """Counts and seconds, which `add` grows.

    Attributes:
        passes: forward passes of the target that the requests took part in, those over their prompts included; rounds: those of them that
            emitted tokens.
        drafted: draft tokens verified; accepted: of these; emitted: output tokens.
        accepted_lengths: accepted drafts -> rounds, of rounds that verified any; widths: verified drafts -> rounds, of all rounds.
        draft_s, verify_s, sample_s, commit_s, replay_s: seconds of proposing, of the target's pass, of sampling, of committing, and of
            running passes again. Of a step that requests shared, each has an equal part.
        replays: passes that were run again to bring state to its committed length (see `rollback`). Moving a cursor does that for keys and
            values, so models that keep nothing else need none.
        reachable, weighed: of so many emitted tokens of rounds in which a drafter with a part of the vocabulary was asked (FR projection),
            so many are in that part.
    """

    passes: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    widths: Counter[int] = field(default_factory=Counter)
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0
    replay_s: float = 0.0
    replays: int = 0
    reachable: int = 0
    weighed: int = 0

    @classmethod
    def of(cls, records: Iterable[RunRecord]) -> Self:
        made = cls()
        for record in records:
            made.passes += len(record.steps)
            for entry in record.rounds:
                made._count(entry)
        return made

    def add(self, step: Step, round_: Round | None) -> None:
        """Count what a step came to for one of its requests; `step` is what was counted as a pass."""
        self.passes += 1
        if round_ is not None:
            self._count(round_)

    def _count(self, entry: Round) -> None:
        drafted = len(entry.drafted)
        self.rounds += 1
        self.drafted += drafted
        self.accepted += entry.accepted
        self.emitted += len(entry.emitted)
        self.widths[drafted] += 1
        if drafted:
            self.accepted_lengths[entry.accepted] += 1
        self.draft_s += entry.draft_s
        self.verify_s += entry.forward_s / entry.requests
        self.sample_s += entry.sample_s / entry.requests
        self.commit_s += entry.commit_s / entry.requests
        self.replay_s += entry.replay_s
        self.replays += entry.replays
        if entry.reachable >= 0:
            self.reachable += entry.reachable
            self.weighed += len(entry.emitted)

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Emitted tokens per pass that emitted any; None without one."""
        return self.emitted / self.rounds if self.rounds else None

    @property
    def coverage(self) -> float | None:
        """Share of emitted tokens that the drafter's part of the vocabulary has; None where it has all of it."""
        return self.reachable / self.weighed if self.weighed else None

    def row(self) -> dict[str, int | float | None]:
        """All but the histograms in one flat row."""
        seconds = {name: getattr(self, name) for name in ("draft_s", "verify_s", "sample_s", "commit_s", "replay_s")}
        return {
            "passes": self.passes,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "acceptance": self.acceptance,
            "tokens_per_pass": self.tokens_per_pass,
            "fr_coverage": self.coverage,
            "replays": self.replays,
            **seconds,
        }

    def decision(self, drafter: str) -> Decision:
        """What a drafter came to on this engine, for `explain()`."""
        rate = f"{self.tokens_per_pass:.2f} tokens a pass" if self.tokens_per_pass is not None else "no pass"
        told = [
            f"{self.accepted:,} of {self.drafted:,} drafts accepted in {self.rounds:,} rounds",
            f"rounds by drafts: {_histogram(self.widths)}",
            f"by accepted: {_histogram(self.accepted_lengths)}",
            f"seconds: draft {self.draft_s:.3g}, verify {self.verify_s:.3g}, sample {self.sample_s:.3g},"
            f" commit {self.commit_s:.3g}, replay {self.replay_s:.3g}",
            f"{self.replays} replays",
        ]
        if self.coverage is not None:
            told.append(f"{self.coverage:.1%} of tokens are in the draft vocabulary")
        return Decision(key=f"speculated: {drafter}", value=rate, owner="runtime", reason="; ".join(told))


def _histogram(counts: Counter[int]) -> str:
    return ", ".join(f"{value}: {count}" for value, count in sorted(counts.items())) or "none"
