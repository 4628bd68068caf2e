"""What a view answers to a page. Some questions it works on beside the others, so the answer comes later."""

from __future__ import annotations

import threading
from typing import Any

from power_lab.widgets.view import WORKER, View
from tests.hosting import HANG_S


def asked(view: View, message: Any) -> None:
    """Ask what a page asks, and wait for what is sent."""
    view._answer(view, message, [])
    settle()


def settle() -> None:
    """Wait for all work of all views."""
    for thread in threading.enumerate():
        if thread.name.startswith(WORKER):
            thread.join(HANG_S)
            assert not thread.is_alive(), "a view still works"
