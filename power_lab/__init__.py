"""Power Lab: a Jupyter-first laboratory for exact language-model inference.

Importing this package is cheap on purpose: no torch, numba, xarray or bokeh is loaded until a name that needs it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from power_lab.engine.config import EngineConfig
    from power_lab.engine.engine import Engine
    from power_lab.engine.request import SamplingParams
    from power_lab.lab import Lab, connect

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "Lab", "SamplingParams", "__version__", "connect"]

_HOMES = {
    "Engine": "power_lab.engine.engine",
    "EngineConfig": "power_lab.engine.config",
    "Lab": "power_lab.lab",
    "SamplingParams": "power_lab.engine.request",
    "connect": "power_lab.lab",
}


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """Where the built JupyterLab extension lies; JupyterLab's own tools ask for it by this name."""
    return [{"src": "labextension", "dest": "power-lab"}]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
