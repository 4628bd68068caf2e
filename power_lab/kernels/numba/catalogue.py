"""The compiled entry points, their exact argument types, and the on-disk cache they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numba
from numba import types

from power_lab.kernels.numba import rows, sample, team, work
from power_lab.kernels.quants import QuantType

WHOLE = types.int64


def _array(element: types.Type, dims: int) -> types.Array:
    return types.Array(element, dims, "C")


f1, f2, f3 = (_array(types.float32, dims) for dims in (1, 2, 3))
i1, i2 = (_array(types.int32, dims) for dims in (1, 2))
l1, l2 = (_array(types.int64, dims) for dims in (1, 2))
d2 = _array(types.float64, 2)

ENTRIES: dict[str, tuple[Any, tuple[types.Type, ...]]] = {
    "run": (team.run, (l1, l2, WHOLE)),
    "sample": (sample.sample, (l1, f2, f2, l2, i1, l2, i1, f1, i1, f3, i2, l2, d2)),
}
"""name -> (kernel, argument types)."""


_COMPILING = Lock()
"""Compiled kernels belong to the process: of two tables made at once, one compiles and the other waits and finds them."""


def compile_all(folder: Path | None, progress: Callable[[int, int, str], None] | None) -> tuple[Any, Any]:
    """Everything, from the cache in `folder` where there is one; returns the team's loop and its dispatcher."""
    with _COMPILING:
        functions = compile_work(folder)
        if progress is not None:
            progress(1, len(ENTRIES) + 1, "all operations")
        compile_entries(progress)
        return functions


def compile_entries(progress: Callable[[int, int, str], None] | None) -> None:
    """Compile each entry, or load it, for its argument types only: a call with others is then an error, not a silent misreading."""
    for done, (name, (kernel, signature)) in enumerate(ENTRIES.items(), start=2):
        if signature not in kernel.overloads:
            kernel.compile(signature)
            kernel.disable_compile()
        if progress is not None:
            progress(done, len(ENTRIES) + 1, name)


def compile_type(type: QuantType, folder: Path | None) -> rows.RowFunctions:
    """The functions of one storage type, from the cache in `folder` where there is one."""
    with _COMPILING:
        return rows.functions(type, folder)


@cache
def compile_work(folder: Path | None) -> tuple[Any, Any]:
    """The team's loop and its dispatcher as C functions, from the cache in `folder` where there is one; made once a process."""
    loop = numba.cfunc(types.void(WHOLE, WHOLE), nopython=True, cache=folder is not None)
    dispatcher = numba.cfunc(types.void(WHOLE, WHOLE, WHOLE), nopython=True, cache=folder is not None)
    with cache_at(folder) if folder is not None else nullcontext():
        return loop(work.participate), dispatcher(work.execute)


@contextmanager
def cache_at(folder: Path) -> Iterator[None]:
    """Let kernels that enable caching inside the block use `folder`."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def open_cache(folder: Path) -> str:
    """Point every entry at `folder`; return "" or the reason why kernels will be compiled anew in each process.

    Numba notices changes of an entry's own file only, so the caller puts the digest of all sources into the folder's name.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
    except OSError as error:
        return f"the kernel cache {folder} cannot be written: {error}"
    with cache_at(folder):
        for kernel, signature in ENTRIES.values():
            if signature not in kernel.overloads:
                kernel.enable_caching()
    return ""
