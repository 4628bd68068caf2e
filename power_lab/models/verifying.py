"""Reading every byte of models and comparing with what is known of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from power_lab.engine.config import Paths
from power_lab.errors import DownloadError, ModelFileError
from power_lab.hashes import Hashes
from power_lab.models.catalogue import CATALOGUE, Packaged
from power_lab.models.download import how_to_get
from power_lab.models.facts import read_facts
from power_lab.models.files import ModelFiles, real_path
from power_lab.models.identity import identity
from power_lab.models.listing import catalogue_entry, named
from power_lab.models.places import OWN, find
from power_lab.models.progress import Report, reporting
from power_lab.models.store import deciding, find_model

_STEP = 1 << 20


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What reading every byte of a model found.

    Attributes:
        status: `ok`, all files with a known digest have it; `new`, no digest was known, they are remembered now; `damaged`.
        against: what the bytes were compared with; detail: what is wrong; sha256: the model's identity, "" where it has none.
    """

    name: str
    path: Path
    status: Literal["ok", "new", "damaged"]
    size: int
    sha256: str = ""
    against: str = ""
    detail: str = ""


def verify(
    names: Iterable[str], paths: Paths, progress: Report | bool = False, catalogue: dict[str, Packaged] = CATALOGUE
) -> list[Verified]:
    """Read every byte of the named models, or of all in our own store, and compare with every digest that is known:
    the catalogue's, the one that Hugging Face's cache keeps as the file's name, the one of the first reading.

    Raises ConfigError for an unknown name, DownloadError for a catalogue model that is not here. Damage is a result, not an error.
    """
    asked = [_meant(name, paths, catalogue) for name in names] or _own(paths, catalogue)
    with reporting(progress) as report:
        return [_verified(name, files, catalogue.get(name), paths, report) for name, files in asked]


def _meant(name: str, paths: Paths, catalogue: dict[str, Packaged]) -> tuple[str, ModelFiles]:
    packaged = catalogue.get(name)
    if packaged is None:
        return name, find_model(name, paths, catalogue).files
    entry = catalogue_entry(packaged, paths)
    if not entry.present:
        raise DownloadError(f"Model {name!r} is not on this machine.", how_to_get(packaged, paths))
    return name, ModelFiles(entry.path, "gguf", (entry.path,))


def _own(paths: Paths, catalogue: dict[str, Packaged]) -> list[tuple[str, ModelFiles]]:
    here = [
        _meant(model.name, paths, catalogue) for model in catalogue.values() if catalogue_entry(model, paths).present
    ]
    found = named(find(paths)[0], paths, catalogue)
    return [*here, *((name, model.files) for name, model in found if model.source == OWN)]


def _verified(name: str, files: ModelFiles, packaged: Packaged | None, paths: Paths, report: Report) -> Verified:
    try:
        problem = files.problem or (read_facts(files.path).problem if packaged is None else "")
        members = deciding(files)[0] if not problem else files.files
        return _read(name, files.path, problem, members, packaged, paths, report)
    except (OSError, ModelFileError) as error:
        return Verified(name=name, path=files.path, status="damaged", size=0, detail=f"cannot be read: {error}")


def _read(
    name: str,
    path: Path,
    problem: str,
    members: tuple[Path, ...],
    packaged: Packaged | None,
    paths: Paths,
    report: Report,
) -> Verified:
    hashes, total, before = Hashes(paths.models), sum(file.stat().st_size for file in members), 0
    wrong = [problem] if problem and not problem.startswith("unsupported") else []
    digests: dict[str, tuple[int, str]] = {}
    sources: dict[str, None] = {}
    for file in members:

        def step(done: int, before: int = before) -> None:
            report(f"verifying: {name}", before + done, total)

        real = real_path(file)
        size = real.stat().st_size
        digest, first = hashes.check(real, step)
        known = {"catalogue": packaged.sha256 if packaged else "", **_blob(real), "first reading": first}
        for source, expected in known.items():
            if not expected:
                continue
            sources[source] = None
            found = digest if len(expected) == 64 else _git_digest(real, size)
            if found != expected:
                wrong.append(f"{file.name} has {found}, but the {source} says {expected}")
        digests[file.name] = size, digest
        before += size
    return Verified(
        name=name,
        path=path,
        status="damaged" if wrong else "ok" if sources else "new",
        size=total,
        sha256=identity(digests) if digests else "",
        against=", ".join(sources),
        detail="; ".join(wrong),
    )


def _blob(real: Path) -> dict[str, str]:
    """What Hugging Face's cache calls a file's bytes: their SHA-256, or for small files Git's own SHA-1."""
    hub = real.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", real.name)
    return {"Hugging Face cache": real.name} if hub else {}


def _git_digest(path: Path, size: int) -> str:
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_STEP):
            digest.update(block)
    return digest.hexdigest()
