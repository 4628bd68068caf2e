"""What a model is called in receipts and cache keys: the SHA-256 of its bytes, also when they lie in several files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from power_lab.hashes import Hashes
from power_lab.models.files import real_path
from power_lab.models.progress import Report

_TAG = b"power-lab model files v1\0"


def file_digests(files: tuple[Path, ...], hashes: Hashes, report: Report) -> dict[str, tuple[int, str]]:
    """Name -> (size, hex SHA-256) of files of one folder. Digests are remembered while a file stays as it is."""
    total, before = sum(file.stat().st_size for file in files), 0
    found: dict[str, tuple[int, str]] = {}
    for file in files:

        def step(done: int, before: int = before) -> None:
            report("checking SHA-256", before + done, total)

        size = file.stat().st_size
        found[file.name] = size, hashes.of(real_path(file), step)
        before += size
    return found


def identity(digests: Mapping[str, tuple[int, str]]) -> str:
    """One SHA-256, in hex: of a model in one file the file's own, else a tagged one over names, sizes and digests in order.

    Args:
        digests: file name -> (size, hex SHA-256).
    """
    if len(digests) == 1:
        return next(iter(digests.values()))[1]
    hasher = hashlib.sha256(_TAG)
    for raw, size, digest in sorted((name.encode(errors="surrogateescape"), *rest) for name, rest in digests.items()):
        hasher.update(b"%d %s\0%d %s\0" % (len(raw), raw, size, digest.encode()))
    return hasher.hexdigest()
