"""Progress of long work on stderr: a bar on a terminal, one line per stage anywhere else, nothing when quiet."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from tqdm import tqdm


class Progress:
    """Called as (stage, done, total); a stage `kernels: rope` counts as a step of the stage `kernels`.

    Args:
        quiet: show nothing.
        unit: what is counted when a stage counts anything but bytes.
    """

    def __init__(self, *, quiet: bool = False, unit: str = "") -> None:
        self._quiet = quiet
        self._unit = unit
        self._terminal = sys.stderr.isatty()
        self._stage = ""
        self._since = 0.0
        self._bar: tqdm | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._quiet:
            return
        name, _, step = stage.partition(": ")
        if name != self._stage:
            self._close()
            self._stage, self._since = name, time.monotonic()
            self._open(name, total)
        if self._bar is not None:
            self._bar.total = total or None
            self._bar.set_postfix_str(step, refresh=False)
            self._bar.update(done - self._bar.n)

    def _open(self, name: str, total: int) -> None:
        if not self._terminal:
            print(f"{name} ...", file=sys.stderr, flush=True)
            return
        from tqdm import tqdm

        large = total > 1 << 20  # only bytes come in such numbers
        self._bar = tqdm(
            desc=name,
            total=total or None,
            unit="B" if large else self._unit,
            unit_scale=large,
            file=sys.stderr,
            leave=False,
        )

    def _close(self) -> None:
        if not self._stage:
            return
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            print(f"{self._stage}: {time.monotonic() - self._since:.1f} s", file=sys.stderr)
        self._stage = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
