"""Where models lie: our own store, the caches of Hugging Face and llama.cpp, and folders that the user names.

Everything here is bounded: how deep and how much of a folder is looked at, and how often a link is followed. What was left out is
said. Nothing is ever written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from power_lab.engine.config import Paths
from power_lab.engine.weights.mapped import read_bounded
from power_lab.errors import ModelFileError
from power_lab.models.files import ModelFiles, folder_model, gguf_models, is_gguf, real_path

MAX_DEPTH = 6
MAX_ENTRIES = 50_000  # of one place, files and folders together
_MAX_REFERENCE_BYTES = 200
_REVISION = 8  # letters of a commit that are shown

OWN, HUB, LLAMA_CPP = "power-lab", "Hugging Face cache", "llama.cpp cache"


@dataclass(frozen=True, slots=True)
class Found:
    """A model that lies somewhere.

    Attributes:
        names: what it may be called, the best first; the last one is its path, which no other model has.
        source: whose folder it lies in; files: what it consists of.
    """

    names: tuple[str, ...]
    source: str
    files: ModelFiles


@dataclass(slots=True)
class _Walk:
    """One bounded walk below a folder. `notes` says what was not looked at."""

    root: Path
    depth: int = MAX_DEPTH
    entries: int = MAX_ENTRIES
    notes: list[str] = field(default_factory=list)
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def models(self) -> Iterator[ModelFiles]:
        yield from self._below(self.root, self.depth)

    def _below(self, folder: Path, depth: int) -> Iterator[ModelFiles]:
        files, folders = self._listed(folder)
        if (model := folder_model(folder, files)) is not None:
            yield model
        yield from gguf_models(folder, [name for name in files if is_gguf(name)])
        if folders and not depth:
            self._note(f"{self.root}: folders more than {self.depth} deep were not looked at")
        elif self.entries > 0:
            for name in folders:
                yield from self._below(folder / name, depth - 1)

    def _listed(self, folder: Path) -> tuple[list[str], list[str]]:
        """Names of files and of folders. A folder that was seen before, through whatever link, is empty."""
        files: list[str] = []
        folders: list[str] = []
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in self._seen:
                return [], []
            self._seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as listing:
                for entry in listing:
                    self.entries -= 1
                    if self.entries < 0:
                        self._note(f"{self.root}: only the first {MAX_ENTRIES:,} files and folders were looked at")
                        break
                    if not entry.name.startswith("."):
                        (folders if _is_folder(entry) else files).append(entry.name)
        except OSError as error:
            self._note(f"{folder}: {error.strerror}")
        return files, sorted(folders)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle
        return False


def find(paths: Paths, extra: tuple[Path, ...] = ()) -> tuple[list[Found], list[str]]:
    """Every model that lies in a known place or in `extra` folders, and notes on what could not be looked at.

    Reads names and sizes, and shard indexes; opens no model.
    """
    notes: list[str] = []
    found = [*_own(paths.models, notes), *_hub(paths.others.hub, notes), *_llama_cpp(paths.others.llama_cpp, notes)]
    for folder in dict.fromkeys((*paths.others.extra, *extra)):
        found += _given(folder, notes)
    return _once(found), notes


def _once(found: list[Found]) -> list[Found]:
    """Each model from the first place that has it: places overlap, and links lead to the same files."""
    seen: set[Path] = set()
    kept: list[Found] = []
    for model in found:
        place = real_path(model.files.path)
        if place not in seen:
            seen.add(place)
            kept.append(model)
    return kept


def _own(folder: Path, notes: list[str]) -> Iterator[Found]:
    if not _is_dir(folder):
        return
    walk = _Walk(folder, depth=1, notes=notes)
    for files in walk.models():
        yield Found((files.stem, str(files.path)), OWN, files)


def _given(folder: Path, notes: list[str]) -> Iterator[Found]:
    if not _is_dir(folder):
        notes.append(f"{folder}: no such folder")
        return
    for files in _Walk(folder, notes=notes).models():
        yield Found((files.stem, str(files.path)), f"folder {folder}", files)


def _hub(hub: Path | None, notes: list[str]) -> Iterator[Found]:
    """`models--org--name/snapshots/<commit>/...`, the files being links to `blobs`; `refs/main` holds the current commit."""
    if hub is None or not _is_dir(hub):
        return
    left = MAX_ENTRIES
    for folder in sorted(hub.glob("models--*")):
        commits = _folders(folder / "snapshots")
        main = _reference(folder / "refs" / "main")
        found = False
        for snapshot in sorted(commits, key=lambda path: path.name != main):
            name = hub_name(snapshot)
            if len(commits) == 1:
                name = name.partition("@")[0] if main in ("", snapshot.name) else name
            walk = _Walk(snapshot, depth=3, entries=left, notes=notes)
            models = list(_in_snapshot(walk, name))
            found = found or bool(models)
            yield from models
            left = max(walk.entries, 0)
        if not found and any(name.endswith(".incomplete") for name in _names(folder / "blobs")):
            files = ModelFiles(folder, "", (), "incomplete: its download is unfinished")
            yield Found((hub_name(folder / "snapshots" / "none"), str(folder)), HUB, files)


def _in_snapshot(walk: _Walk, name: str) -> Iterator[Found]:
    for files in walk.models():
        below = files.path.relative_to(walk.root).as_posix()
        if files.format != "gguf":
            whole = name if below == "." else f"{name}/{below}"
            yield Found((whole, str(files.path)), HUB, files)
        else:
            inner = f"{below[: -len(files.path.name)]}{files.stem}"
            short = () if "@" in name else (files.stem,)
            yield Found((*short, f"{name}/{inner}", str(files.path)), HUB, files)


def hub_name(path: Path) -> str:
    """`org/name`, or `org/name@commit` where that is not the current one, of a path in a snapshot; "" for any other path."""
    for snapshot in (path, *path.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and repository.name.startswith("models--"):
            name = repository.name.removeprefix("models--").replace("--", "/", 1)
            main = _reference(repository / "refs" / "main")
            return name if main in ("", snapshot.name) else f"{name}@{snapshot.name[:_REVISION]}"
    return ""


def _reference(path: Path) -> str:
    with suppress(ModelFileError):  # a FIFO, a folder, a novel
        return read_bounded(path, _MAX_REFERENCE_BYTES).decode("ascii", "replace").strip()
    return ""


def _folders(folder: Path) -> list[Path]:
    return [folder / name for name in _names(folder) if _is_dir(folder / name)]


def _is_dir(path: Path) -> bool:
    """Path.is_dir that also answers where looking is forbidden."""
    return os.path.isdir(path)  # noqa: PTH112


def _names(folder: Path) -> list[str]:
    with suppress(OSError), os.scandir(folder) as listing:
        return sorted(entry.name for entry in islice(listing, MAX_ENTRIES))
    return []


def _llama_cpp(folder: Path | None, notes: list[str]) -> Iterator[Found]:
    """Flat files `<org>_<repository>_<file>.gguf`; a manifest `manifest=org=repository=tag.json` tells where the file's name begins."""
    if folder is None or not _is_dir(folder):
        return
    names = _names(folder)
    manifests = [name.split("=") for name in names if name.startswith("manifest=")]
    prefixes = [f"{words[1]}_{words[2]}_" for words in manifests if len(words) == 4]
    for files in gguf_models(folder, [name for name in names if is_gguf(name)]):
        prefix = max((one for one in prefixes if files.stem.startswith(one)), key=len, default="")
        short = (files.stem.removeprefix(prefix), files.stem) if prefix else (files.stem,)
        yield Found((*short, str(files.path)), LLAMA_CPP, files)
    for name in names:
        if name.endswith((".gguf.downloadInProgress", ".gguf.partial")):
            path = folder / name
            files = ModelFiles(path, "gguf", (path,), "incomplete: its download is unfinished")
            yield Found((str(path),), LLAMA_CPP, files)
