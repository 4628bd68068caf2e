"""Changing and checking the store: `power-lab models add | remove | verify`.

Only our own folder is ever written or deleted from. What is added appears whole or not at all; what is removed goes in one step.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from power_lab.engine.config import Paths
from power_lab.errors import ConfigError, DownloadError, ModelFileError
from power_lab.hashes import Hashes, digest_of
from power_lab.models.catalogue import CATALOGUE, Packaged
from power_lab.models.entry import ModelEntry
from power_lab.models.facts import read_facts
from power_lab.models.files import ModelFiles
from power_lab.models.listing import catalogue_entry
from power_lab.models.places import OWN, Found
from power_lab.models.progress import Report, locked, reporting
from power_lab.models.store import deciding, fetch, find_model, resolve

_SLACK = 16 << 20
_BESIDE = ("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.md", "NOTICE.txt", "USE_POLICY.md")
_MAX_BESIDE_BYTES = 1 << 20
_STAGING = ".staging-"


def add(
    model: str,
    paths: Paths,
    progress: Report | bool = True,
    catalogue: dict[str, Packaged] = CATALOGUE,
    *,
    link: bool = False,
    accept_license: bool = False,
) -> ModelEntry:
    """Bring a model into our store: a catalogue model by download, any other by its path or name, as a copy or as a link.

    Args:
        model: a name of the catalogue, a .gguf file, any part of a sharded one, a folder, or another name of the list.
        link: keep only a symbolic link; the files stay where they are.
        accept_license: as in `fetch`.

    Raises:
        ConfigError for an unknown name, or where another model of that name is there; ModelFileError for files that are not
        sound; DownloadError when the disk is full or cannot be written, or when a download fails.
    """
    if model in catalogue:
        return fetch(model, paths, progress, catalogue, accept_license=accept_license)
    found = find_model(model, paths, catalogue)
    files = found.files
    problem = files.problem or read_facts(files.path).problem
    if problem and not problem.startswith("unsupported"):
        raise ModelFileError(f"{files.path}: {problem}.", "Fetch it again where it comes from.")
    if files.path.is_relative_to(paths.models):
        return resolve(str(files.path), paths, progress, catalogue)
    target = paths.models / _stored_name(found)
    try:
        paths.models.mkdir(parents=True, exist_ok=True)
        with reporting(progress) as report, _changing(paths, report) as staging:
            if target.is_symlink() and not target.exists():
                target.unlink()  # what it led to is gone
            if os.path.lexists(target):
                return _same(found, target, paths, report, catalogue)
            (_link if link else _copy)(files, staging / "model", target, paths, report)
    except OSError as error:
        where = error.filename or paths.models
        raise DownloadError(f"{files.path} cannot be added: {error.strerror or error} ({where}).") from error
    return resolve(str(target), paths, progress, catalogue)


def remove(model: str, paths: Paths, catalogue: dict[str, Packaged] = CATALOGUE) -> ModelEntry:
    """Delete a model from our store, of a linked one the link alone. Returns what was removed.

    Raises ConfigError for a model that is not here or that lies in another program's folder, which is never touched.
    """
    entry, doomed = _doomed(model, paths, catalogue)
    try:
        with _changing(paths, lambda *_: None) as staging:
            staging.mkdir(exist_ok=True)
            for path in doomed:
                with suppress(FileNotFoundError):  # two processes remove it at once
                    path.rename(staging / path.name)
            folder = entry.path.parent
            if folder != paths.models and folder.is_relative_to(paths.models):
                with suppress(OSError):  # something else is in there
                    folder.rmdir()
    except OSError as error:
        raise ConfigError("model", f"{entry.path} cannot be removed: {error.strerror or error}") from error
    return entry


def removable(model: str, paths: Paths, catalogue: dict[str, Packaged] = CATALOGUE) -> ModelEntry:
    """What `remove` would delete; raises what it raises."""
    return _doomed(model, paths, catalogue)[0]


def _doomed(model: str, paths: Paths, catalogue: dict[str, Packaged]) -> tuple[ModelEntry, list[Path]]:
    """What would be removed, and every path of it that is in the store."""
    packaged = catalogue.get(model)
    if packaged is not None:
        entry = catalogue_entry(packaged, paths)
        if not os.path.lexists(entry.path):
            raise ConfigError("model", f"{model!r} is not on this machine")
        terms = [] if packaged.terms is None else [paths.models / packaged.terms.file]
        return entry, [entry.path, *terms]
    found = find_model(model, paths, catalogue)
    files = found.files
    if not files.path.is_relative_to(paths.models):
        raise ConfigError(
            "model",
            f"{model!r} lies in {files.folder} ({found.source}), not in Power Lab's own store",
            "Remove it with the program that it belongs to.",
        )
    entry = ModelEntry(name=model, path=files.path, present=True, source=OWN, size=files.size(), format=files.format)
    return entry, [files.path] if files.format != "gguf" else list(files.files)


def _stored_name(found: Found) -> str:
    """The name in the store: a lone file keeps its own, everything else becomes a folder."""
    files = found.files
    if files.lone:
        return files.path.name
    name = files.stem if files.format == "gguf" else found.names[0].rpartition("/")[2]
    return name.partition("@")[0].lstrip(".") or "model"


def _same(found: Found, target: Path, paths: Paths, report: Report, catalogue: dict[str, Packaged]) -> ModelEntry:
    """The model that is there already, if it is the one that was to be added."""
    there = resolve(str(target), paths, report, catalogue)
    if there.sha256 != resolve(str(found.files.path), paths, report, catalogue).sha256:
        raise ConfigError(
            "model",
            f"{target} holds another model of that name",
            f"Remove it first: power-lab models remove {there.name}",
        )
    return there


def _link(files: ModelFiles, staged: Path, target: Path, paths: Paths, report: Report) -> None:
    if files.format == "gguf" and len(files.files) > 1:
        raise ConfigError(
            "link",
            f"{files.stem!r} has {len(files.files)} files, which a link cannot hold together",
            f"Copy it, or put its folder into POWER_LAB_MODEL_PATH: {files.folder}",
        )
    staged.symlink_to(files.path.absolute(), target_is_directory=files.path.is_dir())
    staged.rename(target)


def _copy(files: ModelFiles, staged: Path, target: Path, paths: Paths, report: Report) -> None:
    """Copy, hash and flush every file to disk, then give the whole its name."""
    members, _ = deciding(files)
    beside = [files.folder / name for name in _BESIDE if files.format != "gguf"]
    members = (*members, *(path for path in beside if path.is_file() and path.stat().st_size <= _MAX_BESIDE_BYTES))
    total, before = sum(path.stat().st_size for path in members), 0
    free = shutil.disk_usage(paths.models).free
    if free < total + _SLACK:
        raise DownloadError(
            f"{files.path} has {total >> 20} MiB, but {paths.models} has {free >> 20} MiB left.",
            "Free some space, or add it with --link.",
        )
    alone = not target.is_dir() and files.format == "gguf" and len(members) == 1
    if not alone:
        staged.mkdir()
    digests: dict[str, str] = {}
    for path in members:

        def copied(done: int, before: int = before) -> None:
            report("copying", before + done, total)

        size = path.stat().st_size
        digests[path.name] = _copied(path, staged if alone else staged / path.name, size, copied)
        before += size
    staged.rename(target)
    hashes = Hashes(paths.models)
    for name, digest in digests.items():
        hashes.remember(target if alone else target / name, digest)


def _copied(path: Path, target: Path, size: int, report: Callable[[int], None]) -> str:
    with path.open("rb") as source, target.open("xb") as copy:
        digest = digest_of(source, size, report, copy)
        copy.flush()
        os.fsync(copy.fileno())
    if target.stat().st_size != size:
        raise ModelFileError(f"{path}: changed while it was copied.", "Try again when nothing writes to it.")
    return digest


@contextmanager
def _changing(paths: Paths, report: Report) -> Iterator[Path]:
    """A staging folder in the store, for one process at a time; it goes with all that is left in it, also what a killed process left."""
    with locked(paths.models / ".store.lock", report):
        for left in paths.models.glob(f"{_STAGING}*"):
            shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=paths.models))
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
