"""The base of all inspectors: a static view that a notebook keeps, brought to life while a kernel is there.

JupyterLab prefers a widget over HTML whenever an output carries both, and shows "model not found" once the kernel is gone
(ipywidgets#2494, #3823). So the output of an inspector is HTML alone. The widget's model opens beside it; its script finds that
HTML in the page by `data-power-lab-view` and adds what needs a kernel or a pointer. Without kernel, script or trust the HTML
stays as it is. Inside ipywidgets layouts the same object is an ordinary widget.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import anywidget
import traitlets

from power_lab.errors import ConfigError, PowerLabError
from power_lab.jupyter.cancel import CancelToken, tokens
from power_lab.widgets.export import FORMATS, to_csv, to_json, to_netcdf
from power_lab.widgets.style import framed, live_style

if TYPE_CHECKING:
    import xarray

_STATIC = files("power_lab.widgets") / "static"
_UNSAID = re.compile(r"^\s*(?://[^\n]*\n|/\*.*?\*/\s*\n)|^\s+|(?<=[;{},)\]]) // [^\n]*$", re.MULTILINE | re.DOTALL)
"""Of a script: comments and indentation."""

Work = Callable[[CancelToken], None]
"""What a question takes. It asks the token wherever it can end, and gives what it found in `View.settled`."""

WORKER = "power-lab-view"
"""What the names of threads begin with on which views work."""


_opens = ContextVar("opens", default=True)


@contextmanager
def content_only() -> Iterator[None]:
    """Views that are made in here have no other side on the page: for who only wants their content.

    A model that the page hears of and that is closed before it has begun would be an error there.
    """
    token = _opens.set(False)
    try:
        yield
    finally:
        _opens.reset(token)


def script(*parts: str) -> str:
    """A view's script: what all begin with, then its own parts. Each widget carries it, so a view names only those that it needs.

    Comments and indentation stay behind, a quarter of it.
    """
    text = "".join((_STATIC / f"{part}.js").read_text(encoding="utf-8") for part in ("page", *parts))
    return _UNSAID.sub("", text)


class View(anywidget.AnyWidget):
    """An inspector. Subclasses give `body`, `summary` and `dataset`, and `picture` where they draw one.

    Attributes:
        view_id: ties the saved HTML to this widget.
        refreshable: whether asking again can show something new.
        live: whether the page asks every second while the view can be seen.
        files: kind of file that it can be exported as -> label and meaning, for the page's buttons.
        stops: where its buttons lead to -> their labels; the page asks for one with `go`.
        rows: the dataset's dimension that a table for spreadsheets has its rows along.
    """

    formats: ClassVar[tuple[str, ...]] = ("csv", "netcdf", "json", "svg")
    rows: ClassVar[str] = ""
    answers_while_busy: ClassVar[bool] = True
    """For the kernel's routing: a page's first words come before its subshell is there, and would wait behind the running cell."""

    # Text and not a path: with a path anywidget keeps every closed widget alive (manzt/anywidget#929).
    _esm = script("view")
    _css = live_style()

    view_id = traitlets.Unicode().tag(sync=True)
    refreshable = traitlets.Bool(False).tag(sync=True)
    live = traitlets.Bool(False).tag(sync=True)
    files = traitlets.Dict().tag(sync=True)
    stops = traitlets.Dict().tag(sync=True)

    _own_layout: Any = None

    def __init__(self, **traits: Any) -> None:
        offered = [FORMATS[name] for name in self.formats]
        meanings = {one.label: one.meaning + (f" {self.rows}" if one.suffix == ".csv" else "") for one in offered}
        files = {name: [FORMATS[name].label, meanings[FORMATS[name].label]] for name in self.formats}
        super().__init__(view_id=uuid4().hex[:12], files=files, **traits)
        self._own_layout = self.layout if self.comm is not None else None
        self._tokens, self._working, self._settling = tokens(), set[CancelToken](), threading.RLock()
        self.on_msg(self._answer)

    def open(self) -> None:
        """Tell the page of the widget, unless nobody wants more than its content."""
        if _opens.get():
            super().open()

    def close(self) -> None:
        """Release the widget. What it shows stays on the page, and it can still be shown again as a static view."""
        for token in tuple(self.__dict__.get("_working", ())):
            token.cancel()
        super().close()
        if self._own_layout is not None:
            self._own_layout.close()  # ipywidgets makes a layout for each widget and leaves it in its registry
        if "_repr_mimebundle_" in self.__dict__:
            del self._repr_mimebundle_  # ipywidgets hides the method of a closed widget with an attribute

    @property
    def closed(self) -> bool:
        """Whether the widget has no side on the page, as after `close()`; the HTML there stays."""
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

    def picture(self) -> str:
        """What the view draws, as SVG; "" where it draws nothing."""
        return ""

    def export(self, kind: str, path: str | Path | None = None) -> bytes:
        """The view as a file, written to `path` if that is given.

        Args:
            kind: `csv` (a table along `rows`), `netcdf`, `json` (the whole dataset), `svg`, or what else `formats` names.

        Raises ConfigError for a kind that this view has not.
        """
        if kind not in self.formats:
            raise ConfigError("kind", f"{kind!r} is none that this view has", f"Use one of {', '.join(self.formats)}.")
        content = self._file(kind)
        if not content:
            raise ConfigError("kind", f"there is nothing to draw as {kind!r} here", 'Use "json" for the data.')
        if path is not None:
            Path(path).write_bytes(content)
        return content

    def _file(self, kind: str) -> bytes:
        """Bytes of a file. Subclasses with kinds of their own extend it."""
        if kind == "csv":
            return to_csv(self.dataset, self.rows)
        if kind == "svg":
            return self.picture().encode()
        return to_netcdf(self.dataset) if kind == "netcdf" else to_json(self.dataset)

    def summary(self) -> str:
        """The view in one line of plain text."""
        raise NotImplementedError

    def to_html(self) -> str:
        """The static view: one self-contained fragment without scripts or external loads."""
        return self._wrap("")

    def _wrap(self, attribute: str) -> str:
        return framed(self.body(), attribute)

    def _answer(self, _widget: Any, content: Any, _buffers: Any) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        try:
            if kind == "refresh":
                self.send({"kind": "body", "html": self.renew()})
            elif kind == "export":
                self._send_file(str(content.get("format")))
            elif isinstance(kind, str) and (work := self.asked(kind, content)) is not None:
                self._work_on(kind, work)
        except PowerLabError as error:
            self.send({"kind": "failed" if kind == "export" else "gone", "message": str(error)})

    def _work_on(self, kind: str, work: Work) -> None:
        """Work beside whatever else the page asks. A newer question of the kind, Stop, and closing the view end it."""
        held = ExitStack()
        token = held.enter_context(self._tokens.work(f"{self.view_id} {kind}"))
        self._working.add(token)
        held.callback(self._working.discard, token)

        def run() -> None:
            with held:
                try:
                    work(token)
                except PowerLabError as error:
                    if token.cancelled:  # whatever came of it
                        self._ended(kind, token)
                    else:
                        self.send({"kind": "gone", "message": str(error)})

        # In the context of the message, by which the kernel knows what its answers answer.
        threading.Thread(target=copy_context().run, args=(run,), name=f"{WORKER}-{kind}", daemon=True).start()

    def _ended(self, kind: str, token: CancelToken) -> None:
        """Work was cancelled: the page is told, unless it has asked again."""
        if not token.superseded:
            self.send({"kind": "stopped", "asked": kind})

    @contextmanager
    def settled(self, token: CancelToken) -> Iterator[None]:
        """For what work changes and sends at its end: the work of one question at a time, and none that has been cancelled.

        Raises RequestCancelled.
        """
        with self._settling:
            token.check()
            yield

    def _send_file(self, kind: str) -> None:
        content = self.export(kind)
        name = f"power-lab-{type(self).__name__.lower()}{FORMATS[kind].suffix}"
        self.send({"kind": "file", "name": name, "mime": FORMATS[kind].mime}, [content])

    def asked(self, kind: str, content: dict[str, Any]) -> Work | None:
        """A question of the page that is a subclass's own. Nothing in it may be trusted.

        What takes its time is returned, and done beside the other questions until a newer one of the kind comes.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:  # type: ignore[override]  # HTML alone, on purpose: see above
        mark = "" if self.closed else f' data-power-lab-view="{self.view_id}"'
        return {"text/plain": self.summary(), "text/html": self._wrap(mark)}
