"""The inspectors of a lab, by name: `lab.inspect.acceptance(run)`, `lab.inspect.blocks()`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from power_lab.run import Run
    from power_lab.widgets.acceptance import Acceptance
    from power_lab.widgets.blocks import Blocks
    from power_lab.widgets.view import View

_OPEN = {"Acceptance": 16, "Blocks": 4}  # views that stay alive; older ones close, and what they show stays on the page


class Inspect:
    """Makes inspectors and closes the ones that nobody needs, since ipywidgets keeps every open widget for ever.

    Args:
        lab: its `engine`, or it itself, has `blocks() -> tuple[BlockState, ...]`.
    """

    def __init__(self, lab: Any) -> None:
        self._lab = lab
        self._views: dict[str, deque[View]] = {}

    def acceptance(self, run: Run, rows: int = 150) -> Acceptance:
        """What each speculation round drafted, and what the target kept of it.

        Args:
            run: a finished run.
            rows: most table rows drawn.
        """
        from power_lab.widgets.acceptance import Acceptance

        return self._keep(Acceptance(run, rows=rows))

    def blocks(self, live: bool = False) -> Blocks:
        """The engine's KV blocks: free, in use, shared, cached, and whose they are.

        A view that is not refreshed is a snapshot: show another one to compare before and after.

        Args:
            live: ask every second while the view can be seen; a button does the same.
        """
        from power_lab.widgets.blocks import Blocks

        # The engine of this moment and not the lab: a lab loads its engine again when asked, and a view that is left open must never
        # bring back what the user has shut down.
        source = getattr(self._lab, "engine", self._lab)
        return self._keep(Blocks(source.blocks, live=live))

    def close(self) -> None:
        """Close all views; what they show on the page stays."""
        for views in self._views.values():
            while views:
                views.popleft().close()

    def _keep(self, view: Any) -> Any:
        kind = type(view).__name__
        views = self._views.setdefault(kind, deque())
        views.append(view)
        while len(views) > _OPEN[kind]:
            views.popleft().close()
        return view
