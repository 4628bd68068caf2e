"""The drafters that come with the package: power_lab/drafters/<first 12 digits of the target's sha256>/<name>.safetensors."""

from __future__ import annotations

from pathlib import Path

from power_lab.engine.weights.mapped import read_bounded

ROOT = Path(__file__).parents[4] / "drafters"
DEFAULT = "default"  # a file with the name of the one that `draft="auto"` takes


def folder(sha256: str, root: Path = ROOT) -> Path:
    """Where the drafters of a model lie, if there are any."""
    return root / sha256[:12]


def names(sha256: str, root: Path = ROOT) -> tuple[str, ...]:
    """Of the drafters that a model has."""
    return tuple(sorted(path.stem for path in folder(sha256, root).glob("*.safetensors")))


def default(sha256: str, root: Path = ROOT) -> str:
    """The one that is taken where none is asked for, or nothing."""
    stated = folder(sha256, root) / DEFAULT
    return read_bounded(stated, 256).decode().strip() if stated.is_file() else ""


def path_of(name: str, sha256: str, root: Path = ROOT) -> Path:
    return folder(sha256, root) / f"{name}.safetensors"
