"""Numba's threading layer: which one, why, and what it asks of its users."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from threading import Lock
from typing import Any

import numba

LAYERS = {
    "omp": ("omppool", "GNU or LLVM OpenMP was found"),
    "tbb": ("tbbpool", "OpenMP was not found, TBB was"),
    "workqueue": ("workqueue", "neither OpenMP nor TBB was found; parallel kernels take turns, as this layer allows one caller at a time"),
}

_WORKQUEUE_TURN = Lock()
"""Guards the one resource of the whole process that it belongs to: concurrent use of Numba's workqueue pool aborts the process."""


def choose_layer() -> tuple[str, str]:
    """Set Numba's threading layer to the best that loads; return its name and the reason.

    A layer that Numba has already started stays: a process has only one. After `omp` has run, the process must not fork.
    """
    try:
        running = numba.threading_layer()
    except ValueError:  # nothing parallel has run yet
        running = None
    if running is not None:
        return running, "it was already running in this process"
    for name, (module, reason) in LAYERS.items():
        try:
            import_module(f"numba.np.ufunc.{module}")
        except ImportError:
            continue
        numba.config.THREADING_LAYER = name
        return name, reason
    raise ImportError("Numba was built without any threading layer")


def guarded(kernel: Callable[..., Any], layer: str) -> Callable[..., Any]:
    """`kernel`, one caller at a time where the layer needs that."""
    if layer != "workqueue":
        return kernel

    @wraps(kernel)
    def take_turn(*args: Any) -> Any:
        with _WORKQUEUE_TURN:
            return kernel(*args)

    return take_turn
