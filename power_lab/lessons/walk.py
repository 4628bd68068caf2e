"""A view that is walked through: a picture of all steps, one step in detail, and buttons that lead to the others.

The picture and the step that is shown stay in a saved notebook; the buttons need the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from power_lab.errors import ConfigError
from power_lab.widgets.picture import image
from power_lab.widgets.view import View, script


class Walk(View):
    """Subclasses give `places`, the words and pictures of one, and which of them are worth stopping at.

    Args:
        places: how many there are. at: the one that is shown first; negative ones count from the end.

    Raises ConfigError where there is nothing to walk through, or no such place.
    """

    _esm = script("view", "walk")

    _place: ClassVar[str] = "step"

    def __init__(self, places: int, at: int) -> None:
        if not places:
            raise ConfigError("at", f"there is no {self._place} to look at", "Let the engine do something first.")
        if not -places <= at < places:
            raise ConfigError("at", f"there is no {self._place} {at}", f"Use 0 to {places - 1}.")
        self._places, self._at = places, at % places
        stops = {"first": "« First", "back": f"‹ {self._place.capitalize()} before", "next": f"Next {self._place} ›"}
        super().__init__(stops=stops | ({"event": "Next event »"} if self.events() else {"last": "Last »"}))

    @property
    def at(self) -> int:
        """The place that is shown."""
        return self._at

    def events(self) -> Sequence[int]:
        """Places where something happens, ascending."""
        return ()

    def go(self, to: str) -> None:
        """Show another place: `first`, `back`, `next`, `event` or `last`; others are ignored, as the page's words cannot be trusted."""
        last = self._places - 1
        later = (place for place in self.events() if place > self._at)
        places = {"first": 0, "back": self._at - 1, "next": self._at + 1, "last": last, "event": next(later, last)}
        self._at = min(max(places.get(to, self._at), 0), last)

    def asked(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "go":
            self.go(str(content.get("to")))
            self.send({"kind": "body", "html": self.body()})


def drawing(picture: str, alt: str) -> str:
    """A wide SVG for a page: it shrinks to what can still be read, and scrolls below that. A small one stays small."""
    own = float(picture.partition(" width='")[2].partition("'")[0])
    style = f"width:100%;min-width:{min(600, own):g}px;max-width:{min(920, 1.15 * own):g}px;height:auto"
    return f'<div class="pl-lanes" tabindex="0" role="group" aria-label="Picture">{image(picture, alt, style=style)}</div>'
