"""Where the handlers hang."""

from __future__ import annotations

from typing import Any

from jupyter_server.utils import url_path_join

from power_lab.engine.config import Paths, announce_pages
from power_lab.engine.host.place import Place
from power_lab.server.handlers import BokehHandler, StatusHandler, bokeh_folder
from power_lab.server.hub import Hub
from power_lab.server.live import LiveHandler

SCRIPTS = r"(js/bokeh(?:-api|-gl|-mathjax|-tables|-widgets)?(?:\.min)?\.js)"
"""The files that a page may have."""


def install(server: Any) -> None:
    """Add our handlers to a ServerApp."""
    app = server.web_app
    base = url_path_join(app.settings["base_url"], "power-lab")
    paths = Paths.default()
    hub = Hub(lambda: Place.of(paths), server.log)
    routes: list[tuple[Any, ...]] = [
        (url_path_join(base, "api", "status"), StatusHandler, {"hub": hub}),
        (url_path_join(base, "api", "live"), LiveHandler, {"hub": hub}),
    ]
    if (folder := bokeh_folder()) is not None:
        routes.append((url_path_join(base, "bokeh", SCRIPTS), BokehHandler, {"path": str(folder)}))
        announce_pages()
    app.add_handlers(".*$", routes)
