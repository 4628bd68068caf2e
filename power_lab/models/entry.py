"""What is known of a model on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
