"""Measuring the points of a plan: engine by engine, pass by pass, so that stopping keeps every whole pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

import msgspec

from power_lab.engine.config import EngineConfig
from power_lab.engine.request import Prompt, SamplingParams
from power_lab.errors import EngineClosed, HostUnavailable, PowerLabError
from power_lab.keywords import sampling
from power_lab.many import as_finished, derived_seed
from power_lab.tuning.point import Graphs, Pass, Point
from power_lab.tuning.settings import Plan, Trial

if TYPE_CHECKING:
    from power_lab.engine.host.remote import RemoteEngine
    from power_lab.engine.report import MemoryPlan
    from power_lab.engine.trace import RunRecord

ENDS = (HostUnavailable, EngineClosed)
"""Errors that end a sweep, since no other point could do better now."""


class Passes(Protocol):
    """Hears of the work: `now` before each pass, `done` after it."""

    def now(self, said: str) -> None: ...
    def done(self) -> None: ...


@dataclass(frozen=True)
class Task:
    """What every point does.

    Attributes:
        prompts: of one pass; chat: as of `generate`.
        repeats: counted passes; warmup: passes before them that do not count, so that
            kernels are compiled, graphs captured and costs known.
        seed: run `i` of each pass uses `derived_seed(seed, i)`, as `generate_many` does.
    """

    prompts: tuple[Prompt, ...]
    chat: bool | None = None
    repeats: int = 3
    warmup: int = 1
    seed: int = 0

    def passes(self, trial: Trial) -> int:
        """Of one point, those that do not count included; a warm cache takes one that fills it."""
        return self.repeats + max(self.warmup, trial.own["cache"] == "warm")


def measure(
    plan: Plan,
    task: Task,
    points: dict[int, Point],
    engine_of: Callable[[EngineConfig], RemoteEngine],
    progress: Passes,
) -> None:
    """Measure what `points` has not yet, into it.

    A point that fails keeps the reason, and the others go on. An interrupt, a host that cannot be had, or an engine that somebody
    closes comes out as raised; `points` then has every whole pass.
    """
    number = 0
    for group in plan.groups:
        numbered = [(number + at, trial) for at, trial in enumerate(group)]
        number += len(group)
        wanted = [(at, trial) for at, trial in numbered if at not in points or not points[at].done]
        if wanted:
            _group(plan, wanted, task, points, engine_of, progress)


def _group(
    plan: Plan,
    wanted: Sequence[tuple[int, Trial]],
    task: Task,
    points: dict[int, Point],
    engine_of: Callable[[EngineConfig], RemoteEngine],
    progress: Passes,
) -> None:
    """The points of one engine. Passes alternate between them, so that a machine that slows down does so for all."""
    progress.now("loading")
    begin = time.monotonic()
    try:
        engine = engine_of(wanted[0][1].config)
    except ENDS:
        raise
    except PowerLabError as error:
        for number, trial in wanted:
            points[number] = Point(number, trial, asked=task.repeats, error=str(error))
            for _ in range(task.passes(trial)):
                progress.done()
        return
    took = time.monotonic() - begin
    for number, trial in wanted:
        points.setdefault(number, Point(number, trial, load_s=took, asked=task.repeats))
    keys = {number: uuid4().hex[:12] for number, _ in wanted}
    most = max(task.passes(trial) for _, trial in wanted)
    for turn in range(most):
        for number, trial in wanted:
            at = turn - (most - task.passes(trial))  # points with fewer passes begin later, so that all end together
            if at < 0:
                continue
            if not points[number].done:
                progress.now(plan.told(trial))
                counts = at >= task.passes(trial) - task.repeats
                points[number] = _another(points[number], engine, task, keys[number], counts)
                _share_memory(points, [one for one, _ in wanted], points[number].memory)
            progress.done()


def _share_memory(points: dict[int, Point], group: Sequence[int], memory: MemoryPlan | None) -> None:
    """Points of one engine have its latest plan: it grows with every graph captured, and who came first is no cheaper for that."""
    for number in group if memory is not None else ():
        if points[number].measured:
            points[number] = points[number].but(memory=memory)


def _another(point: Point, engine: RemoteEngine, task: Task, key: str, counts: bool) -> Point:
    """The point after one more pass, or with why that failed."""
    try:
        found = _pass(engine, point.trial, task, key)
        if not counts:
            return point
        graphs = _graphs(engine)
        captured = None if graphs is None else graphs.nbytes
        return point.but(passes=(*point.passes, found), memory=engine.memory(), captured=captured)
    except ENDS:
        raise
    except PowerLabError as error:
        return point.but(error=str(error))


def _pass(engine: RemoteEngine, trial: Trial, task: Task, key: str) -> Pass:
    """All prompts once. A cold cache is a namespace that nobody has used; a warm one is the point's own."""
    namespace = f"tuning-{key}" if trial.own["cache"] == "warm" else f"tuning-{uuid4().hex[:12]}"
    params = sampling({"max_tokens": 64, **trial.request})
    seed = task.seed if params.seed is None else params.seed

    def submit(index: int) -> Any:
        seeded: SamplingParams = msgspec.structs.replace(params, seed=derived_seed(seed, index))
        return engine.submit(task.prompts[index], seeded, chat=task.chat, cache_key=namespace)

    before = _graphs(engine)
    begin = time.monotonic()
    come: list[RunRecord | None] = [None] * len(task.prompts)
    for _, record in as_finished(submit, trial.own["batch"], come):
        _sound(record)
    wall = time.monotonic() - begin
    records = tuple(record for record in come if record is not None)
    after = _graphs(engine)
    if before is None or after is None:
        return Pass(records, wall)
    return Pass(records, wall, after.steps - before.steps, after.replays - before.replays)


def _sound(record: RunRecord) -> None:
    if record.finish in ("error", "cancelled"):
        said = record.finish_detail if record.finish == "error" else "somebody else stopped it"
        raise PowerLabError(f"A run ended with {record.finish}: {said}", "Measure this point again.")


def _graphs(engine: RemoteEngine) -> Graphs | None:
    report = engine.shapes()
    return Graphs(report.steps, report.replays, report.nbytes) if report.enabled else None
