"""Output as it comes: in a notebook one display that ends as the finished run, elsewhere plain text."""

from __future__ import annotations

import sys
import time
from html import escape
from typing import TYPE_CHECKING, Any, Protocol

from power_lab.engine.trace import Delta
from power_lab.run import NO_MATH

if TYPE_CHECKING:
    from power_lab.run import Run

REFRESH_S = 0.1
_SHOWN_IN = "_shown_in"


class Stream(Protocol):
    """Where output goes."""

    def delta(self, delta: Delta) -> None: ...
    def done(self, run: Run) -> None: ...


class Silent:
    """Shows nothing."""

    def delta(self, delta: Delta) -> None:
        return

    def done(self, run: Run) -> None:
        return


class Printed:
    """Text to stdout, piece by piece, then one line of facts."""

    def delta(self, delta: Delta) -> None:
        from power_lab.run import for_terminal

        sys.stdout.write(for_terminal(delta.text))
        sys.stdout.flush()

    def done(self, run: Run) -> None:
        sys.stdout.write(f"\n[{' · '.join(run.facts())}]\n")
        sys.stdout.flush()


class Displayed:
    """One notebook output: the text so far over a line of counts, at most ten times a second; at the end the run itself.

    The run is marked as shown in this cell, so that it is not shown twice when it is also the cell's last expression.
    """

    def __init__(self, shell: Any) -> None:
        from IPython.display import DisplayHandle

        self._shell = shell
        self._handle: DisplayHandle | None = None
        self._make = DisplayHandle
        self._text: list[str] = []
        self._first: Delta | None = None
        self._drawn = 0.0

    def delta(self, delta: Delta) -> None:
        self._text.append(delta.text)
        self._first = self._first or delta
        if time.monotonic() - self._drawn >= REFRESH_S:
            self._draw(_bundle("".join(self._text), status_line(self._first, delta)))
            self._drawn = time.monotonic()

    def done(self, run: Run) -> None:
        bundle, metadata = self._shell.display_formatter.format(run)
        self._draw(bundle, metadata)
        setattr(run, _SHOWN_IN, self._shell.execution_count)
        _hide_repeats(self._shell)

    def _draw(self, bundle: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        if self._handle is None:
            self._handle = self._make()
            self._handle.display(bundle, raw=True, metadata=metadata or {})
        else:
            self._handle.update(bundle, raw=True, metadata=metadata or {})


def stream_for(wanted: bool | None) -> Stream:
    """The stream of a call: None shows in notebooks and is silent elsewhere."""
    if wanted is False:
        return Silent()
    shell = notebook_shell()
    if shell is not None:
        return Displayed(shell)
    return Printed() if wanted else Silent()


def notebook_shell() -> Any | None:
    """IPython's shell when this is a Jupyter kernel. Imports nothing: without IPython loaded there is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if shell is not None and getattr(shell, "kernel", None) is not None else None


def status_line(first: Delta, now: Delta) -> str:
    """Tokens, tokens/s since the first, cached prompt tokens and accepted drafts, as far as there are any."""
    parts = [f"{now.tokens} tokens"]
    if now.at > first.at:
        parts.append(f"{(now.tokens - first.tokens) / (now.at - first.at):.1f} tok/s")
    if now.cached:
        parts.append(f"{now.cached} prompt tokens cached")
    if now.drafted:
        parts.append(f"{now.accepted} of {now.drafted} drafts accepted")
    return " · ".join(parts)


def _bundle(text: str, status: str) -> dict[str, Any]:
    html = (
        f'<div dir="auto" class="{NO_MATH}" style="white-space:pre-wrap;overflow-wrap:anywhere">{escape(text)}</div>'
        f'<div style="opacity:0.7;font-variant-numeric:tabular-nums">{escape(status)}</div>'
    )
    return {"text/plain": f"{text}\n[{status}]", "text/html": html}


def _hide_repeats(shell: Any) -> None:
    """Teach the shell that a run already shown in a cell needs no second output there."""

    def already(run: Run) -> None:
        if getattr(run, _SHOWN_IN, None) != shell.execution_count:
            raise NotImplementedError  # IPython's way to say: format it as ever

    shell.display_formatter.ipython_display_formatter.for_type_by_name("power_lab.run", "Run", already)
