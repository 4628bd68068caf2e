"""Files opened with care: only regular ones, mapped or read whole within a bound, and nothing outside a model's own folder."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Self

from power_lab.errors import ModelFileError

_HASH_STEP = 1 << 22


class MappedFile:
    """A file mapped read-only. Subclasses read its header in `__init__`; made by `open`.

    The mapping stays valid while any view of it is alive, also after `close()`. The file must not be shortened while it
    is mapped.

    Attributes:
        path: the file.
        size: its bytes.
    """

    FORMAT: ClassVar[str] = ""
    LEAST: ClassVar[int] = 1

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.size = len(mapped)
        self._mapped: mmap.mmap | None = mapped

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map the file and check its whole header. Raises ModelFileError when it is not a sound file of its format."""
        path = Path(path)
        descriptor, size = _opened(path)
        try:
            if size < cls.LEAST:
                raise ModelFileError(f"{path}: {size} bytes are too few for a {cls.FORMAT} header.", "Fetch it again.")
            try:
                mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:  # no address space, or the file was emptied meanwhile
                raise ModelFileError(f"{path}: cannot be mapped: {error}.") from error
        finally:
            os.close(descriptor)
        return cls(path, mapped)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file. Views handed out earlier stay valid; the last of them to die unmaps the memory."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            with suppress(BufferError):  # views are alive: unmapping now would crash their readers
                mapped.close()

    def sha256(self, progress: Callable[[int, int], None] | None = None) -> str:
        """Hex SHA-256 of the whole file; `progress(done, total)` in bytes is called as it goes."""
        if self._mapped is None:
            raise ModelFileError(f"{self.path}: the file was closed.")
        digest = hashlib.sha256()
        with memoryview(self._mapped) as view:
            for start in range(0, self.size, _HASH_STEP):
                digest.update(view[start : start + _HASH_STEP])
                if progress is not None:
                    progress(min(start + _HASH_STEP, self.size), self.size)
        return digest.hexdigest()


def read_bounded(path: Path, most: int) -> bytes:
    """The whole content of a small regular file. Raises ModelFileError when it cannot be read or exceeds `most` bytes."""
    descriptor, _ = _opened(path)
    with open(descriptor, "rb") as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}.") from error
    if len(content) > most:
        raise ModelFileError(f"{path}: is longer than the {most} bytes that such a file may have.")
    return content


def member(folder: Path, name: str) -> Path:
    """The file `name` of a model folder, after links were followed and found to stay inside.

    Links may lead elsewhere inside the folder or, from a snapshot in Hugging Face's cache layout
    (`models--*/snapshots/<revision>/`), to that model's own `blobs`. Raises ModelFileError for a name that is more than a
    file name, a link that leaves the folder, or what is not a regular file.
    """
    if not is_plain_name(name):
        raise ModelFileError(f"{folder}: {name!r} is not the name of a file inside the folder.")
    path = folder / name
    try:
        base, target = (Path(os.path.realpath(place, strict=True)) for place in (folder, path))
        regular = stat.S_ISREG(target.stat().st_mode)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be opened: {error.strerror}.") from error
    if not any(target.is_relative_to(root) for root in (base, *_blobs(base))):
        raise ModelFileError(
            f"{path}: is a link that leaves the model's folder, to {target}.", "Open the folder that holds the files."
        )
    if not regular:
        raise ModelFileError(f"{path}: is not a regular file.")
    return path


def is_plain_name(name: str) -> bool:
    """Whether `name` can only mean a file directly in the folder that it is looked up in."""
    return 0 < len(name) <= 255 and name not in (".", "..") and not any(sign in name for sign in "/\\\0")


def _blobs(folder: Path) -> list[Path]:
    """Where the snapshot that `folder` is, or lies in, keeps its bytes."""
    places = [place for place in (folder, *folder.parents) if place.parent.name == "snapshots"]
    caches = [place.parent.parent for place in places]
    return [cache / "blobs" for cache in caches if cache.name.startswith("models--")]


def _opened(path: Path) -> tuple[int, int]:
    """Descriptor and size of a regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # non-blocking: a FIFO must not hang
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ModelFileError(f"{path}: cannot be opened: {getattr(error, 'strerror', error)}.") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ModelFileError(f"{path}: is not a regular file.")
    return descriptor, status.st_size
