"""SHA-256 of large files, remembered so that an unchanged file is read once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

_STEP = 1 << 20


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

    It is a cache: what is missing, damaged or cannot be written costs time, never an error.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "sha256.json"

    def of(self, path: Path, report: Callable[[int], None]) -> str:
        """Hex SHA-256 of a file, read only if it is unknown or has changed."""
        if known := self.recall(path):
            return known
        before = _mark(path)
        with path.open("rb") as file:
            digest = digest_of(file, path.stat().st_size, report)
        if _mark(path) == before:  # a file that changes under the reader is not remembered
            self.remember(path, digest)
        return digest

    def recall(self, path: Path) -> str:
        """The remembered digest of an unchanged file, or ""."""
        entry = self._read().get(str(path.absolute()))
        if not isinstance(entry, list) or len(entry) != 4 or entry[:3] != _mark(path):
            return ""
        return entry[3] if isinstance(entry[3], str) else ""

    def remember(self, path: Path, digest: str) -> None:
        self._write(self._read() | {str(path.absolute()): [*_mark(path), digest]})

    def forget(self, path: Path) -> None:
        known = self._read()
        if known.pop(str(path.absolute()), None) is not None:
            self._write(known)

    def _read(self) -> dict[str, object]:
        try:
            known = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _write(self, known: dict[str, object]) -> None:
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._file.with_name(f".{self._file.name}.{os.getpid()}")
            fresh.write_text(json.dumps(known, indent=1))
            fresh.replace(self._file)


def _mark(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]
