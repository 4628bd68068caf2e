"""Work on daemon threads, awaited from the event loop. Unlike an executor's threads they never hold up the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def on_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Start `work` on a new daemon thread; the future has its result or its error."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:  # noqa: BLE001 - it is the caller's
            error = caught
        except BaseException as caught:  # noqa: BLE001 - SystemExit in a loader must not end the host, nor vanish
            error = RuntimeError(f"{type(caught).__name__}: {caught}")
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop is closed: the process is ending

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
