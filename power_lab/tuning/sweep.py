"""`lab.sweep(...)`: settings measured against each other, and what comes back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from power_lab.bars import make_bar
from power_lab.engine.request import Prompt
from power_lab.errors import ConfigError
from power_lab.run import Run
from power_lab.tuning import cube
from power_lab.tuning.exactness import Agreement, agreement
from power_lab.tuning.measure import ENDS, Task, measure
from power_lab.tuning.pareto import front
from power_lab.tuning.point import FIGURES, Point
from power_lab.tuning.settings import Plan, plan

if TYPE_CHECKING:
    import xarray

    from power_lab.lab import Lab
    from power_lab.widgets.sweep import SweepView
    from power_lab.widgets.sweep_front import FrontView
    from power_lab.widgets.sweep_heat import HeatView
    from power_lab.widgets.sweep_parallel import ParallelView

_OPEN = 8  # views that stay alive; what older ones show stays on the page
SPEED, MEMORY = "tokens_per_s", "planned_bytes"


class Sweep:
    """Points in a grid of settings, measured.

    Attributes:
        plan: settings, and the order of measuring; task: prompts and passes.
        stopped: why it ended early, "" where it did not; `resume()` goes on.
        seconds: that measuring took, loading included. id: ties its views in a page together.
    """

    def __init__(self, plan: Plan, task: Task, points: Mapping[int, Point], *, lab: Lab | None = None) -> None:
        self.plan, self.task = plan, task
        self.stopped = ""
        self.seconds = 0.0
        self.id = uuid4().hex[:12]
        self._points = dict(points)
        self._lab = lab
        self._views: deque[Any] = deque()

    # --- what was measured ------------------------------------------------------------------------------------------------------

    @property
    def points(self) -> tuple[Point, ...]:
        """All points in the order of measuring, those without a measurement too: they say why."""
        return tuple(
            self._points.get(number) or Point(number, trial, asked=self.task.repeats)
            for number, trial in enumerate(self.plan.trials)
        )

    @cached_property
    def exactness(self) -> Agreement:
        """Whether points that must have the same outputs have them; True in a condition where they do."""
        return agreement(self.points)

    @cached_property
    def dataset(self) -> xarray.Dataset:
        """The cube: a dimension for each swept setting, figures with units, failures with their reasons."""
        return cube.cube(self.plan, self._points, self.exactness, self.task.repeats, self._facts())

    @cached_property
    def table(self) -> xarray.Dataset:
        """The same as a list: dimension `point`, in the order of measuring."""
        return cube.table(self.plan, self.points, self.exactness)

    def point(self, number: int | None = None, **settings: Any) -> Point:
        """One point, by number or by settings; a setting that is not given may have any value, if that leaves one point.

        Raises ConfigError naming a setting that was not swept, a value that it has not, or that several points fit.
        """
        points = self.points
        if number is not None:
            if not 0 <= number < len(points):
                raise ConfigError("number", f"{number} is outside 0..{len(points) - 1}")
            return points[number]
        for key, value in settings.items():
            if value not in self.axis(key):
                raise ConfigError(
                    key, f"{value!r} was not measured", f"Use one of {', '.join(map(repr, self.axis(key)))}."
                )
        cells = self._cells(settings)
        found = [point for point in points if cells & set(point.trial.cells)]
        if len(found) != 1:
            free = ", ".join(key for key in self.plan.axes if key not in settings)
            raise ConfigError("point", f"{len(found)} points have these settings", f"Give {free} too.")
        return found[0]

    def axis(self, name: str) -> tuple[Any, ...]:
        """The values of a swept setting. Raises ConfigError for one that was not swept."""
        if name not in self.plan.axes:
            known = ", ".join(self.plan.axes) or "none"
            raise ConfigError(name, "this setting was not swept", f"Swept: {known}.")
        return self.plan.axes[name]

    def best(self, figure: str = SPEED) -> Point:
        """The measured point with the highest figure, or the lowest of those in seconds, bytes and waste.

        Raises ConfigError for an unknown figure, or one that no point has.
        """
        ranked = self.ranked(figure)
        if not ranked:
            raise ConfigError(figure, "no point has it", "See `.points` for the reasons.")
        return ranked[0]

    def ranked(self, figure: str = SPEED) -> list[Point]:
        """Points that have the figure, best first. Raises ConfigError for an unknown one."""
        if figure not in FIGURES:
            raise ConfigError(figure, "no such figure", f"Figures: {', '.join(FIGURES)}.")
        found = [point for point in self.points if point.figures[figure] == point.figures[figure]]
        sign = 1 if FIGURES[figure][0] in ("s", "byte") or figure in ("wasted", "preemptions") else -1
        return sorted(found, key=lambda point: (sign * point.figures[figure], point.number))

    def front(self, gain: str = SPEED, cost: str = MEMORY) -> list[Point]:
        """The Pareto front: points that none beats in `gain` at no more `cost`, cheapest first."""
        points = [*self.ranked(gain)]
        self.ranked(cost)
        kept = front([point.figures[gain] for point in points], [point.figures[cost] for point in points])
        return [points[at] for at in kept]

    def _cells(self, settings: Mapping[str, Any]) -> set[int]:
        from itertools import product

        names = tuple(self.plan.axes)
        return {
            cell
            for cell, values in enumerate(product(*self.plan.axes.values()))
            if all(values[names.index(key)] == value for key, value in settings.items())
        }

    def _facts(self) -> dict[str, Any]:
        run = next((Run(point.passes[0].records[0]) for point in self.points if point.measured), None)
        told = {"prompts": len(self.task.prompts), "repeats": self.task.repeats, "warmup": self.task.warmup}
        told |= {"seed": self.task.seed, "stopped": self.stopped, "same_outputs": int(bool(self.exactness))}
        if run is not None:
            engine = run.record.engine
            told |= {
                "model": engine.model,
                "model_sha256": engine.sha256,
                "device": engine.device,
                "threads": engine.threads,
            }
        return told

    # --- measuring --------------------------------------------------------------------------------------------------------------

    def resume(self, progress: bool = True) -> Sweep:
        """Measure what is left, such as after an interrupt. Points that failed stay as they are.

        Raises ConfigError for a sweep without a lab.
        """
        if self._lab is None:
            raise ConfigError("lab", "this sweep has none to measure with", "Use `lab.sweep`.")
        begin = time.monotonic()
        self.stopped = ""
        try:
            with _Progress(self._left(), progress) as bar, self._lab.borrowed(bar.loading) as engine_of:
                measure(self.plan, self.task, self._points, engine_of, bar)
                bar.outcome = "Measured"
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        except ENDS as error:
            self.stopped = str(error)
        self.seconds += time.monotonic() - begin
        for name in ("exactness", "dataset", "table"):
            self.__dict__.pop(name, None)
        return self

    def _left(self) -> int:
        return sum(self.task.passes(point.trial) for point in self.points if not point.done)

    # --- showing ----------------------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """The sweep in one line."""
        points = self.points
        done = sum(point.measured for point in points)
        said = f"{done} of {len(points)} points measured"
        if self.stopped:
            said += f", stopped: {self.stopped}"
        return said

    def show(self) -> SweepView:
        """All points as a table with the check of outputs; a click on a point opens its trace."""
        from power_lab.widgets.sweep import SweepView

        return self._keep(SweepView(self))

    def pareto(self, gain: str = SPEED, cost: str = MEMORY) -> FrontView:
        """Points by cost and gain, with the front."""
        from power_lab.widgets.sweep_front import FrontView

        return self._keep(FrontView(self, gain, cost))

    def heatmap(self, x: str, y: str, figure: str = SPEED, **at: Any) -> HeatView:
        """A figure over two settings; the others are as in `at`, or where the best point has them."""
        from power_lab.widgets.sweep_heat import HeatView

        return self._keep(HeatView(self, x, y, figure, at))

    def parallel(self, *figures: str) -> ParallelView:
        """Parallel coordinates: settings and figures as axes, points as lines."""
        from power_lab.widgets.sweep_parallel import ParallelView

        return self._keep(ParallelView(self, figures))

    def export(self, kind: str, path: str | Path | None = None) -> bytes:
        """The sweep as a file: `netcdf` or `json` (the cube), `csv` (a row for each point)."""
        view = self.show()
        try:
            return view.export(kind, path)
        finally:
            view.close()

    def _keep(self, view: Any) -> Any:
        self._views.append(view)
        while len(self._views) > _OPEN:
            self._views.popleft().close()
        return view

    def __repr__(self) -> str:
        from power_lab.widgets.sweep import as_text

        return as_text(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return self.show()._repr_mimebundle_()


class _Progress:
    """Passes on a bar, with what is measured now."""

    def __init__(self, total: int, wanted: bool) -> None:
        self._bar = make_bar("pass") if wanted else None
        self._total, self._done, self._note = total, 0, ""
        self.outcome = "Stopped"

    def now(self, said: str) -> None:
        self._note = said
        self._show()

    def loading(self, stage: str, done: int, total: int) -> None:
        """As the loading of an engine tells."""
        self.now(f"loading: {stage}")

    def done(self) -> None:
        self._done += 1
        self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.show("sweep", self._note, self._done, self._total)

    def __enter__(self) -> _Progress:
        self._begin = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close(f"{self.outcome} in {time.monotonic() - self._begin:.1f} s")


def sweep(
    lab: Lab,
    prompts: Prompt | Iterable[Prompt],
    *,
    repeats: int = 3,
    warmup: int = 1,
    seed: int = 0,
    chat: bool | None = None,
    progress: bool = True,
    base: Any,
    **settings: Any,
) -> Sweep:
    """As `Lab.sweep`; `base` is the lab's configuration."""
    for key, value, low in (("repeats", repeats, 1), ("warmup", warmup, 0), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigError(key, f"{value!r} is not a whole number of at least {low}")
    task = Task(_prompts(prompts), chat, repeats, warmup, seed)
    planned = plan(settings, base)
    batch = max(trial.own["batch"] for trial in planned.trials)
    if batch > len(task.prompts):
        raise ConfigError("batch", f"{batch} requests at once, but {len(task.prompts)} prompts", "Give more prompts.")
    return Sweep(planned, task, {}, lab=lab).resume(progress)


def _prompts(given: Prompt | Iterable[Prompt]) -> tuple[Prompt, ...]:
    """One prompt may stand alone. Raises ConfigError where there is none."""
    from power_lab.engine.host.remote import framed

    asked: tuple[Any, ...]
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        asked = (given,)
    else:
        asked = tuple(given)
        if asked and all(isinstance(one, (int, Mapping)) for one in asked):
            asked = (list(asked),)
    if not asked:
        raise ConfigError("prompts", "there is none", "Give a prompt or a list of prompts.")
    for one in asked:
        framed(one)
    return asked
