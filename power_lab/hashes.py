"""SHA-256 of large files, remembered so that an unchanged file is read once."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_STEP = 1 << 20
_MANY = 1000  # remembered files from which on the gone ones are dropped


def digest_of(source: IO[bytes], size: int, report: Callable[[int], None], target: IO[bytes] | None = None) -> str:
    """Hex SHA-256 of what is read, which goes to `target` too; `report(done bytes)` is called on the way.

    Reads at most `size` + 1 bytes, so that a source longer than it said cannot give the right digest, nor fill a disk.
    """
    digest = hashlib.sha256()
    feed(digest, source, size, report, target)
    return digest.hexdigest()


def feed(
    digest: hashlib._Hash,
    source: IO[bytes],
    size: int,
    report: Callable[[int], None],
    target: IO[bytes] | None = None,
) -> int:
    """Add what is read, at most `size` + 1 bytes, to a digest and to `target`. Returns how many bytes came."""
    done = 0
    while done <= size and (block := source.read(min(_STEP, size + 1 - done))):
        digest.update(block)
        if target is not None:
            target.write(block)
        done += len(block)
        report(min(done, size))
    return done


class Hashes:
    """A small JSON file in `folder`: path -> [size, modification time in ns, inode, sha256].

    A fifth item is the digest that the file had before its bytes changed under an unchanged mark, which is damage. It is a cache:
    what is missing, damaged or cannot be written costs time, never an error.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "sha256.json"

    def of(self, path: Path, report: Callable[[int], None]) -> str:
        """Hex SHA-256 of a file, read only if it is unknown or has changed."""
        if known := self.recall(path):
            return known
        before = _mark(path)
        digest = _read(path, report)
        if _mark(path) == before:  # a file that changes under the reader is not remembered
            self.remember(path, digest)
        return digest

    def check(self, path: Path, report: Callable[[int], None]) -> tuple[str, str]:
        """Read every byte: the digest, and the one of the file's first reading, "" where that is unknown or it was written since."""
        first = (self._entry(path) or [""])[-1]
        digest = _read(path, report)
        self.remember(path, digest, first if first != digest else "")
        return digest, first

    def recall(self, path: Path) -> str:
        """The remembered digest of an unchanged file, or ""."""
        entry = self._entry(path)
        return entry[3] if entry else ""

    def remember(self, path: Path, digest: str, first: str = "") -> None:
        entry = [*_mark(path), digest, *([first] if first else [])]
        self._write(self._read() | {str(path.absolute()): entry})

    def _entry(self, path: Path) -> list[Any] | None:
        """What is remembered of a file that has the same mark still."""
        entry = self._read().get(str(path.absolute()))
        if not isinstance(entry, list) or len(entry) not in (4, 5) or entry[:3] != _mark(path):
            return None
        return entry if all(isinstance(item, str) for item in entry[3:]) else None

    def forget(self, path: Path) -> None:
        known = self._read()
        if known.pop(str(path.absolute()), None) is not None:
            self._write(known)

    def _read(self) -> dict[str, object]:
        try:
            known = json.loads(self._file.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return known if isinstance(known, dict) else {}

    def _write(self, known: dict[str, object]) -> None:
        if len(known) > _MANY:  # what is gone is forgotten
            known = {path: entry for path, entry in known.items() if os.path.exists(path)}  # noqa: PTH110 - keys are strings
        with suppress(OSError):
            replace_file(self._file, json.dumps(known, indent=1).encode())


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file whole or not at all; the folder is made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _read(path: Path, report: Callable[[int], None]) -> str:
    with path.open("rb") as file:
        return digest_of(file, path.stat().st_size, report)


def _mark(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]
