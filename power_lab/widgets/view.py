"""The base of all inspectors: a static view that a notebook keeps, brought to life while a kernel is there.

JupyterLab prefers a widget over HTML whenever an output carries both, and shows "model not found" once the kernel is gone
(ipywidgets#2494, #3823). So the output of an inspector is HTML alone. The widget's model opens beside it; its script finds that
HTML in the page by `data-power-lab-view` and adds what needs a kernel or a pointer. Without kernel, script or trust the HTML
stays as it is. Inside ipywidgets layouts the same object is an ordinary widget.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import anywidget
import traitlets

from power_lab.errors import PowerLabError
from power_lab.run import NO_MATH
from power_lab.widgets.palette import variables

if TYPE_CHECKING:
    import xarray

_STATIC = files("power_lab.widgets") / "static"
_STYLE = variables() + (_STATIC / "view.css").read_text(encoding="utf-8")


class View(anywidget.AnyWidget):
    """An inspector. Subclasses give `body`, `summary` and `dataset`.

    Attributes:
        view_id: ties the saved HTML to this widget.
        refreshable: whether asking again can show something new.
        live: whether the page asks every second while the view can be seen.
    """

    # Text and not a path: with a path anywidget keeps every closed widget alive (manzt/anywidget#929).
    _esm = (_STATIC / "view.js").read_text(encoding="utf-8")

    view_id = traitlets.Unicode().tag(sync=True)
    refreshable = traitlets.Bool(False).tag(sync=True)
    live = traitlets.Bool(False).tag(sync=True)

    _own_layout: Any = None

    def __init__(self, **traits: Any) -> None:
        super().__init__(view_id=uuid4().hex[:12], **traits)
        self._own_layout = self.layout
        self.on_msg(self._answer)

    def close(self) -> None:
        """Release the widget. What it shows stays on the page, and it can still be shown again as a static view."""
        super().close()
        if self._own_layout is not None:
            self._own_layout.close()  # ipywidgets makes a layout for each widget and leaves it in its registry
        if "_repr_mimebundle_" in self.__dict__:
            del self._repr_mimebundle_  # ipywidgets hides the method of a closed widget with an attribute

    @property
    def closed(self) -> bool:
        """Whether `close()` was called; the HTML on the page stays."""
        return self.comm is None

    @property
    def dataset(self) -> xarray.Dataset:
        """What the view shows, as data."""
        raise NotImplementedError

    def body(self) -> str:
        """The view's content as HTML."""
        raise NotImplementedError

    def renew(self) -> str:
        """The content when the page asks again. Raises PowerLabError if its source is gone."""
        return self.body()

    def summary(self) -> str:
        """The view in one line of plain text."""
        raise NotImplementedError

    def to_html(self) -> str:
        """The static view: one self-contained fragment without scripts or external loads."""
        return self._wrap("")

    def _wrap(self, attribute: str) -> str:
        return f'<div class="power-lab {NO_MATH}"{attribute}><style>{_STYLE}</style><div class="pl-body">{self.body()}</div></div>'

    def _answer(self, _widget: Any, content: Any, _buffers: Any) -> None:
        if not isinstance(content, dict) or content.get("kind") != "refresh":
            return
        try:
            self.send({"kind": "body", "html": self.renew(), "style": _STYLE})
        except PowerLabError as error:
            self.send({"kind": "gone", "message": str(error)})

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:  # type: ignore[override]  # HTML alone, on purpose: see above
        mark = "" if self.closed else f' data-power-lab-view="{self.view_id}"'
        return {"text/plain": self.summary(), "text/html": self._wrap(mark)}
