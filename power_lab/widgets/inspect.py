"""The inspectors of a lab, by name: `lab.inspect.acceptance(run)`, `lab.inspect.blocks()`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from power_lab.errors import ConfigError

if TYPE_CHECKING:
    from power_lab.engine.request import Prompt
    from power_lab.run import Run
    from power_lab.widgets.acceptance import Acceptance
    from power_lab.widgets.blocks import Blocks
    from power_lab.widgets.lens import Lens
    from power_lab.widgets.prefixes import Prefixes
    from power_lab.widgets.shapes import Shapes
    from power_lab.widgets.timeline import Timeline
    from power_lab.widgets.view import View

# Views that stay alive; older ones close, and what they show stays on the page.
_OPEN = {"Acceptance": 16, "Blocks": 4, "Timeline": 8, "Lens": 8, "Shapes": 4, "Prefixes": 4}


class Inspect:
    """The inspectors of a lab. Each is shown as a cell's last value, has its data as `.dataset`, and exports it.

    - `acceptance()`, `acceptance(run)`: rounds as rows of tokens, what was kept of each draft, and what other widths would have done.
    - `lens()`, `lens(run)`: one position of a round: both distributions, the noise of the draw, why the draft was kept or not.
    - `timeline()`, `timeline(run)`: steps along time, by what they computed, with idle gaps; exports a Chrome trace.
    - `shapes()`: graph shapes captured, replayed and eager, padding, and better row buckets.
    - `prefixes("a prompt")`: the prefix tree, what it saved and evicts next, where a prompt would hit.
    - `blocks()`: each block of the cache: whose it is, who shares it.

    Beside them there are `lab.watch()`, a live dashboard, and `lab.sweep(...)`, settings measured against each other. Views that
    nobody needs any more are closed, since ipywidgets keeps every open widget for ever.

    Args:
        lab: its `engine`, or it itself, has `blocks() -> tuple[BlockState, ...]`; its `last`, where it has one, is the latest run.
    """

    def __init__(self, lab: Any) -> None:
        self._lab = lab
        self._views: dict[str, deque[View]] = {}

    def __repr__(self) -> str:
        """What there is, for who types `lab.inspect` to see."""
        shown = [
            name
            for name, kind in vars(Inspect).items()
            if callable(kind) and not name.startswith("_") and name != "close"
        ]
        told = [(getattr(Inspect, name).__doc__ or "").partition("\n")[0] for name in shown]
        lines = (f"  lab.inspect.{name + '(…)':14} {what}" for name, what in zip(shown, told, strict=True))
        return "\n".join(["Inspectors; lab.watch() is the dashboard of all:", *lines])

    def acceptance(self, run: Run | None = None, rows: int = 150) -> Acceptance:
        """What each speculation round drafted, and what the target kept of it.

        Args:
            run: a finished run; the lab's latest one if None.
            rows: most table rows drawn.
        """
        from power_lab.widgets.acceptance import Acceptance

        return self._keep(Acceptance(self._run(run), rows=rows, engine=self._present))

    def timeline(self, run: Run | None = None, *, last: int = 4096, live: bool = False) -> Timeline:
        """Engine steps along time: prefill, decode and verify rows, requests, preemptions, device work, and when nothing ran.

        Args:
            run: show the steps that this finished run took part in, by its own record; None for the engine's latest ones.
            last: most steps shown.
            live: of the engine's: ask every second while the view can be seen.
        """
        from power_lab.widgets.timeline import Timeline

        if run is not None:
            return self._keep(Timeline(run=run, last=last))
        return self._keep(Timeline(self._source().steps, last=last, live=live))

    def lens(self, run: Run | None = None, *, round: int | None = None, row: int | None = None, top: int = 10) -> Lens:
        """Target and draft at one position of a run: both distributions, the noise of the draw, why the draft was kept or not.

        Args:
            run: a finished run of the engine in use, which computes the position again; the lab's latest one if None.
            round: of the run; the first one with a refused draft if None.
            row: of the round, from 0; where a draft was refused if None.
            top: candidates shown, 1 to 64.
        """
        from power_lab.widgets.lens import Lens

        looked = self._run(run)  # first: without one there is no reason to load an engine
        return self._keep(Lens(self._source().lens, looked, round=round, row=row, top=top))

    def blocks(self, live: bool = False) -> Blocks:
        """The engine's KV blocks: free, in use, shared, cached, and whose they are.

        A view that is not refreshed is a snapshot: show another one to compare before and after.

        Args:
            live: ask every second while the view can be seen; a button does the same.
        """
        from power_lab.widgets.blocks import Blocks

        source = self._source()
        return self._keep(Blocks(source.blocks, live=live, prefixes=getattr(source, "prefixes", None)))

    def shapes(self, *runs: Run, live: bool = False) -> Shapes:
        """Graph shapes: replayed, captured, eager and why, what padding wastes, and the row buckets that would serve the traffic better.

        Args:
            runs: look at what these recorded runs would have asked of the engine's buckets, and not at the engine's own steps.
            live: ask every second while the view can be seen.
        """
        from power_lab.engine.shapes import Coverage
        from power_lab.widgets.shapes import Shapes, report_of

        source = self._source()
        if not runs:
            return self._keep(Shapes(source.shapes, live=live))
        present = source.shapes().planned
        records = [run.record for run in runs]
        recorded = report_of(records, None if present is None else Coverage(present.declared))
        return self._keep(Shapes(lambda: recorded, refreshable=False))

    def prefixes(
        self, prompt: Prompt | None = None, *, chat: bool | None = None, cache_key: str = "", live: bool = False
    ) -> Prefixes:
        """The prefix tree with what it has saved and what is evicted next, and a box that says where a prompt would hit.

        Args:
            prompt: looked up at once, so that a saved notebook shows the answer; chat, cache_key: as of `generate`.
            live: ask every second while the view can be seen.
        """
        from power_lab.widgets.prefixes import Prefixes

        source = self._source()
        view = self._keep(Prefixes(source.prefixes, source.lookup, live=live))
        if prompt is not None:
            view.lookup(prompt, chat=chat, cache_key=cache_key)
        return view

    def close(self) -> None:
        """Close all views; what they show on the page stays."""
        for views in self._views.values():
            while views:
                views.popleft().close()

    def _run(self, run: Run | None) -> Run:
        found = run if run is not None else getattr(self._lab, "last", None)
        if found is None:
            raise ConfigError("run", "there is none yet", 'Generate something: run = lab.generate("Hello").')
        return found

    def _source(self) -> Any:
        """The engine of this moment and not the lab: a lab loads its engine again when asked, and a view that is left open must never
        bring back what the user has shut down."""
        return getattr(self._lab, "engine", self._lab)

    def _present(self) -> Any:
        """The engine where one is loaded, else None: nobody loads one by pointing at something."""
        found = getattr(self._lab, "loaded", self._lab)
        return found if hasattr(found, "lens") else None

    def _keep(self, view: Any) -> Any:
        kind = type(view).__name__
        views = self._views.setdefault(kind, deque())
        views.append(view)
        while len(views) > _OPEN[kind]:
            views.popleft().close()
        return view
