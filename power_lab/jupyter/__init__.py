"""The Jupyter side: the Power Lab kernel, and `%load_ext power_lab.jupyter` for any other IPython kernel."""

from __future__ import annotations

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Add `lab`, `%%generate` and `%lab` to an IPython shell. A variable `lab` that is already there stays."""
    from power_lab.jupyter.magics import install

    install(shell)
