"""Pictures of every page and state, light and dark, for README and for whoever changes how something looks: `make pictures`.

    python -m bench.pictures                    all of them, into docs/img
    python -m bench.pictures panel tour -o /tmp some scenes, elsewhere

A real JupyterLab, kernel, engine and model, except where a state is hard to bring about: there the server's words are played to the
panel. Texts, seeds and sizes are fixed; speeds and times are those of the machine. Look at each picture before you keep it.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tests.browser import lab
from tests.browser.lab import THEMES, LabPage
from tests.browser.test_labextension import GPU, PANEL, STATUS, Played, busy, engine
from tests.homes import own_home

ROOT = Path(__file__).parents[1]
WINDOW, LONG = {"width": 1400, "height": 900}, {"width": 1160, "height": 1700}
GAP = 16  # pixels between the parts of a sheet

TOUR = {
    "acceptance": "lab.inspect.acceptance",
    "lens": "lab.inspect.lens",
    "watch": "lab.watch",
    "blocks": "lab.inspect.blocks",
    "prefixes": "lab.inspect.prefixes",
    "timeline": "lab.inspect.timeline",
    "shapes": "lab.inspect.shapes",
    "receipt": "again = lab.generate",
    "explain": "lab.explain",
}
"""Picture -> how the cell of the tour begins that shows it."""

INSPECTORS = [f"lab.inspect.{name}()" for name in ("blocks", "prefixes", "timeline", "shapes")]


class Album:
    """Where pictures go: as WebP without loss, which keeps a page at some 50 kB and its colours as they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, name: str, *parts: bytes, columns: int = 1) -> None:
        """One picture, or several in `columns` on a sheet."""
        image = _sheet([Image.open(io.BytesIO(part)).convert("RGB") for part in parts], columns)
        path = self.folder / f"{name}.webp"
        image.save(path, lossless=True, quality=100, method=6)
        print(f"{path.name:34} {image.width} x {image.height} {path.stat().st_size / 1000:6.0f} kB", flush=True)


def _sheet(images: Sequence[Image.Image], columns: int) -> Image.Image:
    if len(images) == 1:
        return images[0]
    rows = [images[at : at + columns] for at in range(0, len(images), columns)]
    width = max(sum(one.width + GAP for one in row) for row in rows) + GAP
    height = sum(max(one.height for one in row) + GAP for row in rows) + GAP
    whole = Image.new("RGB", (width, height), images[0].getpixel((1, 1)))
    y = GAP
    for row in rows:
        x = GAP
        for one in row:
            whole.paste(one, (x, y))
            x += one.width + GAP
        y += max(one.height for one in row) + GAP
    return whole


def both(page: LabPage, take: Callable[[str], None]) -> None:
    """`take("light")` and `take("dark")`, each in its theme."""
    for theme in THEMES:
        page.theme(theme)
        page.page.wait_for_timeout(300)
        take(theme.lower())


def output(page: LabPage, source: str) -> bytes:
    """The output of the cell that begins with `source`."""
    place = page.show(source)
    page.page.mouse.move(2, 2)
    place.locator(".pl-detail, .pl-watching, .jp-RenderedHTMLCommon, .jp-PowerLab-receipt").first.wait_for(
        state="attached"
    )
    if place.locator(".pl-watch .pl-spark").count():
        # What moves, not the picture from when the cell ran.
        place.locator(".pl-spark canvas").first.wait_for(state="attached")
    page.page.wait_for_timeout(400)
    return place.screenshot()


# What `show` made the active cell is not the empty one at the end.
_BELOW = """() => { const content = window.jupyterapp.shell.currentWidget.content;
  content.activeCellIndex = content.widgets.length - 1; }"""


# --- scenes ---------------------------------------------------------------------------------------------------------------------


def tour(page: LabPage, album: Album) -> None:
    """The tour, run: each inspector, and the whole window with the panel beside it."""
    page.open("tour.ipynb")
    page.command("power-lab:layout")
    page.run_all(300)
    page.show(TOUR["acceptance"])
    both(page, lambda theme: album.keep(f"lab-{theme}", page.page.screenshot()))
    both(page, lambda theme: album.keep(f"status-{theme}", page.page.locator(STATUS).screenshot()))
    _bare(page)
    for name, source in TOUR.items():
        both(page, lambda theme, name=name, source=source: album.keep(f"{name}-{theme}", output(page, source)))


def states(page: LabPage, album: Album) -> None:
    """What views show before there is anything, and when the engine is gone."""
    lab.write_notebook(page.server.root / "states.ipynb", [""])
    page.open("states.ipynb")
    _bare(page)
    page.run("lab.watch()")
    none = dict.fromkeys(("light", "dark"), b"")
    both(page, lambda theme: none.update({theme: output(page, "lab.watch()")}))
    page.page.evaluate(_BELOW)
    page.run('lab.load("smollm2")')
    for source in INSPECTORS:
        page.run(source)
    both(page, lambda theme: album.keep(f"empty-{theme}", none[theme], *(output(page, one) for one in INSPECTORS)))
    page.page.evaluate(_BELOW)
    page.run('run = lab.generate("Name three colours.", max_tokens=40)')
    page.run("lab.watch()")
    page.run("lab.disconnect()")
    _no_engine(page)
    page.page.locator(".pl-status", has_text="the last numbers").last.wait_for()  # a moment later than "Disconnected"
    place = page.page.locator(".power-lab", has=page.page.locator(".pl-status.pl-bad")).last
    both(page, lambda theme: album.keep(f"disconnected-{theme}", place.screenshot()))


def panel(page: LabPage, album: Album) -> None:
    """The side panel in each of its states, and the launcher's section."""
    played = Played(page.page)
    page.start_lab()
    page.command("power-lab:open-panel")
    place = page.page.locator(PANEL)
    place.wait_for()

    def at_work() -> None:
        for tick in range(160):
            wave = 10 * ((tick // 20) % 3)
            other = engine(engine="key-2", model="a/very-long-model-name-of-some-hub-Q4_K_M.gguf")
            played.vitals(busy(tick / 2 + wave / 30), other, at=1000 + tick / 2, device=GPU)

    brought: dict[str, tuple[Callable[[], None], str]] = {
        "empty": (lambda: played.say("nohost", at=1.0), "No engine is running"),
        "loading": (lambda: played.vitals(engine(state="loading", stage="compiling kernels, 4 of 9")), "compiling"),
        "running": (at_work, "tokens/s"),
        "error": (
            lambda: played.say(
                "error", message="The engine host is of another version.", remedy="Run lab.replace_host()."
            ),
            "of another version",
        ),
        "disconnected": (lambda: played.vitals(busy(90), at=1090.0), "Disconnected"),
    }

    def shot(state: str) -> bytes:
        bring, words = brought[state]
        bring()
        place.get_by_text(words).first.wait_for()
        return place.screenshot()

    parts: dict[str, list[bytes]] = {}
    # First: once there was an engine, its absence is told otherwise.
    both(page, lambda theme: parts.update({theme: [shot("empty")]}))
    both(page, lambda theme: parts[theme].extend(shot(state) for state in brought if state != "empty"))
    for theme, shots in parts.items():
        album.keep(f"panel-{theme}", *shots, columns=len(shots))
    page.page.evaluate("() => void window.jupyterapp.commands.execute('launcher:create')")
    launcher = page.page.locator(".jp-Launcher:visible")
    both(page, lambda theme: album.keep(f"launcher-{theme}", launcher.screenshot()))


def pages(page: LabPage, album: Album) -> None:
    """Lessons and the tuner's page as they are saved, from their beginnings."""
    for path in sorted((page.server.root).glob("**/*.ipynb")):
        if path.name in ("tour.ipynb", "states.ipynb") or ".ipynb_checkpoints" in path.parts:  # which saving leaves
            continue
        page.page.goto(page.server.page(str(path.relative_to(page.server.root))))
        page.page.locator(".jp-Notebook:visible .jp-Cell").first.wait_for()
        page.page.wait_for_timeout(1000)
        page.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
        both(page, lambda theme, path=path: album.keep(f"page-{path.stem}-{theme}", page.page.screenshot()))


SCENES = {scene.__name__: scene for scene in (states, panel, tour, pages)}  # the first begins without an engine


def _bare(page: LabPage) -> None:
    """The notebook alone, in a window that is high enough for its outputs."""
    page.page.evaluate("() => { window.jupyterapp.shell.collapseRight(); window.jupyterapp.shell.collapseLeft(); }")
    page.page.set_viewport_size(LONG)


def _no_engine(page: LabPage) -> None:
    from power_lab.engine.config import Paths
    from power_lab.lab import Lab

    home = page.server.home
    Lab(paths=Paths(home / "cache", home / "run", home / "state")).replace_host()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("scenes", nargs="*", choices=[[], *SCENES], help="all of them if none is named")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "img")
    chosen = parser.parse_args()
    from playwright.sync_api import sync_playwright

    album = Album(chosen.output)
    with tempfile.TemporaryDirectory() as folder, own_home(Path(folder)) as home, sync_playwright() as driver:
        shutil.copytree(ROOT / "notebooks", home / "notebooks")
        (home / "jupyter").mkdir()
        browser: Any = driver.chromium.launch(executable_path=lab.chromium(), args=lab.FLAGS)
        with lab.serve(home / "notebooks", home / "jupyter", home) as server:
            for name in [name for name in SCENES if name in (chosen.scenes or SCENES)]:
                context = browser.new_context(viewport=WINDOW, reduced_motion="reduce")
                context.set_default_timeout(120_000)  # a busy machine makes pictures, too
                SCENES[name](LabPage(context.new_page(), server, album.folder), album)
                context.close()
        browser.close()


if __name__ == "__main__":
    main()
