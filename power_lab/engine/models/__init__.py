"""Model families: one file each, data and wiring."""

from __future__ import annotations

from types import ModuleType

from power_lab.engine.models import llama
from power_lab.errors import ModelFileError

FAMILIES: dict[str, ModuleType] = {"llama": llama}
"""`general.architecture` of a file -> its family."""


def family(architecture: str) -> ModuleType:
    """The family of a file's stated architecture. Raises ModelFileError naming it."""
    if architecture not in FAMILIES:
        raise ModelFileError(
            f"general.architecture: {architecture!r} is not supported.", f"Supported: {', '.join(FAMILIES)}."
        )
    return FAMILIES[architecture]
