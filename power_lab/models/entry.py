"""A model as the user sees it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from power_lab.models.fit import Fit


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be loaded, or fetched first.

    Attributes:
        name: what `lab.load` takes; path: where the file or folder is or will be; present: whether it is there.
        source: whose it is or where it comes from; size: bytes on disk.
        sha256: the model's identity in hex, "" where its bytes were never looked at.
        license: SPDX where one is stated, else "".
        status: `ready`, `not here`, or what speaks against loading it, after `unsupported:`, `incomplete:` or `damaged:`;
            "" where nobody looked.
        format: `gguf`, `safetensors` or `pickle`; architecture, parameters, quantisation, context: as its headers state.
        draft_layers, draft_parameters: of layers for multi-token prediction that it has besides, which are not among `parameters`.
        bytes_by_type: storage type -> bytes; fit: how it would sit in this machine's memory now.
    """

    name: str
    path: Path
    present: bool
    source: str
    size: int
    sha256: str = ""
    license: str = ""
    status: str = ""
    format: str = ""
    architecture: str = ""
    parameters: int = 0
    draft_layers: int = 0
    draft_parameters: int = 0
    quantisation: str = ""
    bytes_by_type: dict[str, int] = {}
    context: int = 0
    fit: Fit | None = None


class Listing(msgspec.Struct, frozen=True):
    """All models of this machine. `notes` says what could not be looked at."""

    models: tuple[ModelEntry, ...]
    notes: tuple[str, ...] = ()
