"""Progress of loading and of many runs: a bar while it lasts. In a notebook one line of the outcome is left, in a terminal nothing."""

from __future__ import annotations

import time
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from tqdm import tqdm

REFRESH_S = 0.1


class Bar(Protocol):
    """Something that shows `done` of `total` (0 where unknown) of a stage."""

    def show(self, stage: str, note: str, done: int, total: int) -> None: ...
    def close(self, outcome: str) -> None: ...


class TerminalBar:
    """tqdm on stderr, one bar a stage."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._bar: tqdm[Any] | None = None
        self._stage = ""

    def show(self, stage: str, note: str, done: int, total: int) -> None:
        if self._bar is None or stage != self._stage:
            self.close("")
            from tqdm import tqdm

            large = total > 1 << 20  # only bytes come in such numbers
            unit = "B" if large else self._unit
            self._bar = tqdm(
                desc=stage, total=total or None, unit=unit, unit_scale=large, leave=False, dynamic_ncols=True
            )
            self._stage = stage
        self._bar.total = total or None
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self, outcome: str) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


class NotebookBar:
    """One display without widgets, at most ten updates a second. A saved notebook keeps the outcome line alone."""

    def __init__(self) -> None:
        from IPython.display import DisplayHandle

        self._handle = DisplayHandle()
        self._drawn = 0.0

    def show(self, stage: str, note: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._drawn < REFRESH_S:
            return
        share = f' value="{done}" max="{total}"' if total else ""
        percent = f" {100 * done // total} %" if total else ""
        words = " ".join(part for part in (stage, note) if part)
        html = f'<progress{share} aria-label="{escape(words)}"></progress> {escape(words)}{percent}'
        self._put(f"{words}{percent}", html)
        self._drawn = now

    def close(self, outcome: str) -> None:
        self._put(outcome, f'<span style="opacity:0.7">{escape(outcome)}</span>')

    def _put(self, text: str, html: str) -> None:
        bundle = {"text/plain": text, "text/html": html}
        if self._drawn:
            self._handle.update(bundle, raw=True)
        else:
            self._handle.display(bundle, raw=True)


def make_bar(unit: str = "") -> Bar:
    """The bar that fits this front end."""
    from power_lab.display import notebook_shell

    return NotebookBar() if notebook_shell() is not None else TerminalBar(unit)


class LoadBar:
    """Called as (stage, done, total); a stage `kernels: rope` is a step of the stage `kernels`. Shows nothing when nothing loads."""

    def __init__(self, done: str = "Loaded") -> None:
        """`done` is the word of the outcome."""
        self._done = done
        self._bar: Bar | None = None
        self._since = time.monotonic()
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._stage, _, step = stage.partition(": ")
        self._bar = self._bar or make_bar()
        self._bar.show(self._stage, step, done, total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            seconds = time.monotonic() - self._since
            self._bar.close(self._outcome(kind, seconds))

    def _outcome(self, kind: type[BaseException] | None, seconds: float) -> str:
        if kind is None:
            return f"{self._done} in {seconds:.1f} s"
        if issubclass(kind, Exception):
            return f"Not {self._done.lower()}"  # why is the error's to say
        return f"Stopped after {seconds:.1f} s: {self._stage}"


class CountBar:
    """Counts finished runs. `kept` names where they are found when not all of them came."""

    def __init__(self, total: int, wanted: bool, kept: str) -> None:
        self._total, self._kept = total, kept
        self._done = 0
        self._since = time.monotonic()
        self._bar = make_bar("run") if wanted and total > 1 else None

    def update(self) -> None:
        """One more."""
        self._done += 1
        if self._bar is not None:
            self._bar.show("", f"{self._done} of {self._total} runs", self._done, self._total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            where = "" if kind is None else f"; {self._kept} has what there is"
            self._bar.close(f"{self._done} of {self._total} runs in {time.monotonic() - self._since:.1f} s{where}")
