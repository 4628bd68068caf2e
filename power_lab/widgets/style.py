"""The one style sheet of inspectors and figures; every saved output carries it, since an output must stand alone."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from power_lab.widgets.palette import variables


@cache
def style() -> str:
    """CSS, all of it below `.power-lab`."""
    return variables() + (files("power_lab.widgets") / "static" / "view.css").read_text(encoding="utf-8")
