"""Targets that do what no target may, for the runner's own test: one case in ten."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.fuzz.targets import Case


def _one_in_ten(act: Callable[[], object]) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        def case(seed: int) -> str:
            print("chatter")  # must not pass for a report
            if seed % 10 == 7:
                act()
            return "fine"

        return case

    return make


TARGETS: Mapping[str, Callable[[Path], Case]] = {
    "raises": _one_in_ten(lambda: {}["key"]),
    "hangs": _one_in_ten(lambda: time.sleep(60)),
    "dies": _one_in_ten(lambda: os.kill(os.getpid(), signal.SIGSEGV)),
    "eats": _one_in_ten(lambda: bytes(1 << 30)),
}
