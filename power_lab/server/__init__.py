"""The Jupyter Server extension: what pages are told of the engine host, with or without a kernel, and BokehJS from this package.

Below `<base_url>power-lab/`: `api/status` (JSON), `api/live` (websocket, see live.py) and `bokeh/` (files). Access control is the
server's own: its token or cookie, its check of origins, its authorizer (resource `power_lab`).
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "power_lab.server"}]


def _load_jupyter_server_extension(server: Any) -> None:
    """Called by Jupyter Server at its start. Nothing is connected before a page asks."""
    from power_lab.server.app import install

    install(server)
