"""Progress bars for notebooks and terminals (tqdm). They are gone when the work is done: a saved notebook keeps its results only."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tqdm import tqdm


def make_bar(**options: Any) -> tqdm[Any]:
    """A bar of the kind that fits this front end, which disappears at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm warns where ipywidgets is missing, and then draws text
        from tqdm.auto import tqdm

        return tqdm(leave=False, dynamic_ncols=True, **options)


def count_bar(total: int, wanted: bool) -> AbstractContextManager[tqdm[Any]]:
    """A bar over `total` requests."""
    return make_bar(total=total, unit="run", disable=not wanted)


class LoadBar:
    """The stages of loading, one bar each; a stage `kernels: rope` is a step of the stage `kernels`. Nothing when nothing loads."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        name, _, step = stage.partition(": ")
        if self._bar is None or name != self._stage:
            self._close()
            large = total > 1 << 20  # only bytes come in such numbers
            self._bar = make_bar(desc=name, total=total or None, unit="B" if large else "", unit_scale=large)
            self._stage = name
        self._bar.total = total or None
        self._bar.set_postfix_str(step, refresh=False)
        self._bar.update(done - self._bar.n)

    def _close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
