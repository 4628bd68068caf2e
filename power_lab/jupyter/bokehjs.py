"""BokehJS from our Jupyter Server extension: a notebook then holds a small loader and no copy of the library, and nothing comes from a CDN.

`bokeh.io.output_notebook()` without resources of its own takes this way, in kernels whose server said that it serves the files. Nothing
is imported for it: the change is made when the notebook imports `bokeh.io`.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "bokeh.io.notebook"
SCRIPTS = ("bokeh", "bokeh-gl", "bokeh-widgets", "bokeh-tables")

_LOADER = """(() => {
  const version = VERSION, scripts = SCRIPTS;
  if (window.Bokeh?.version === version) return;
  let base = '/';
  try { base = JSON.parse(document.getElementById('jupyter-config-data').textContent).baseUrl ?? base; } catch {}
  window.powerLabBokeh ??= scripts.reduce((before, name) => before.then(() => new Promise((done, failed) => {
    const script = document.createElement('script');
    script.src = `${base}power-lab/bokeh/js/${name}.min.js?v=${version}`;
    script.onload = done;
    script.onerror = () => failed(new Error(`${script.src} cannot be loaded`));
    document.head.append(script);
  })), Promise.resolve());
  return window.powerLabBokeh.catch(error => { delete window.powerLabBokeh; element.append(error.message); });
})()"""


def loader(version: str) -> str:
    """JavaScript that loads BokehJS once, below whatever base URL the page has."""
    return _LOADER.replace("VERSION", json.dumps(version)).replace("SCRIPTS", json.dumps(SCRIPTS))


def serve_from_server() -> None:
    """Change `bokeh.io` in this process when it is imported; where it is already, it stays as it is."""
    if MODULE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _change(notebook: ModuleType) -> None:
    load_as_ever = notebook.load_notebook

    def load(resources: Any = None, verbose: bool = False, hide_banner: bool = False, load_timeout: int = 5000) -> None:
        if resources is not None:
            load_as_ever(resources, verbose, hide_banner, load_timeout)
            return
        import bokeh
        from IPython.display import publish_display_data

        said = f"BokehJS {bokeh.__version__} from this Jupyter server"
        publish_display_data({"application/javascript": loader(bokeh.__version__), "text/plain": said})

    setattr(notebook, "load_notebook", load)  # noqa: B010 - to a type checker a module has no such name


class _Finder(importlib.abc.MetaPathFinder):
    """Finds MODULE as Python does, and changes it once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        _change(module)
