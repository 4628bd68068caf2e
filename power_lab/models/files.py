"""Which files make a model: one .gguf file, the parts of a sharded one, or a folder in Hugging Face's layout.

Names and sizes alone are looked at here, and a shard index, which is read within a bound. What the files hold is for `facts`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from power_lab.engine.weights.filenames import COMPANIONS, CONFIG, INDEX, SINGLE, part_name
from power_lab.engine.weights.mapped import is_plain_name, read_bounded
from power_lab.errors import ModelFileError

_MAX_INDEX_BYTES = 1 << 25  # the largest have 9 MB
_MAX_PARTS = 4096


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model.

    Attributes:
        path: what is opened: the .gguf file, of a sharded one its first part, or the folder.
        format: `gguf`, `safetensors`, or `pickle` for PyTorch's old files, which are never opened.
        files: every file that makes the model; problem: what is missing or wrong, "" when nothing is.
    """

    path: Path
    format: str
    files: tuple[Path, ...]
    problem: str = ""

    @property
    def remedy(self) -> str:
        """What to do about the problem."""
        if self.format == "pickle":
            return "Convert it to SafeTensors: pickles can run any code when they are read."
        if self.problem.startswith("unsupported"):
            return "Name the .gguf file, or move away what is not meant."
        return "Fetch it again with the program that it comes from."

    @property
    def lone(self) -> bool:
        """Whether it is one .gguf file."""
        return self.format == "gguf" and len(self.files) == 1

    @property
    def folder(self) -> Path:
        return self.path if self.format != "gguf" else self.path.parent

    @property
    def stem(self) -> str:
        """The short name that its place gives it."""
        if self.format != "gguf":
            return self.path.name
        part = part_name(self.path.name)
        return part[0] if part else self.path.name.removesuffix(".gguf")

    def size(self) -> int:
        """Bytes on disk; of a model with a problem, of what there is. Raises OSError when a file has gone meanwhile."""
        return sum(file.stat().st_size for file in self.files if not self.problem or is_file(file))

    def marks(self) -> list[list[int]]:
        """Size, time and inode of every file: while they stay, so do the bytes. Raises OSError."""
        return [[s.st_size, s.st_mtime_ns, s.st_ino] for s in (file.stat() for file in self.files)]


def gguf_models(folder: Path, names: Iterable[str]) -> list[ModelFiles]:
    """The models among the .gguf files of a folder; the parts of one are one model."""
    found: list[ModelFiles] = []
    sharded: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names):
        part = part_name(name)
        if part is None:
            found.append(_checked(ModelFiles(folder / name, "gguf", (folder / name,))))
        else:
            stem, _, count = part
            sharded.setdefault((stem, count), []).append(name)
    found += [_sharded(folder, count, parts) for (_, count), parts in sharded.items()]
    return sorted(found, key=lambda model: model.path.name)


def _sharded(folder: Path, count: int, names: list[str]) -> ModelFiles:
    files = tuple(folder / name for name in names)
    if not 1 <= count <= _MAX_PARTS:
        return ModelFiles(files[0], "gguf", files, f"damaged: its name says that it has {count} parts")
    there = {part[1] for name in names if (part := part_name(name))}
    missing = [number + 1 for number in range(count) if number not in there]
    problem = f"incomplete: missing part {_listed(missing)} of {count}" if missing else ""
    return _checked(ModelFiles(files[0], "gguf", files, problem))


def folder_model(folder: Path, names: Iterable[str]) -> ModelFiles | None:
    """The model that a folder in Hugging Face's layout is, or None where it has no config.json or nothing like weights."""
    here = frozenset(names)
    if CONFIG not in here:
        return None
    beside = [folder / name for name in (CONFIG, *COMPANIONS) if name in here]
    weights = [SINGLE] if SINGLE in here else sorted(name for name in here if name.endswith(".safetensors"))
    other = next((name for name in sorted(here) if is_gguf(name)), INDEX if SINGLE in here and INDEX in here else "")
    if weights and other:  # which one is meant cannot be told
        files = tuple(sorted([*beside, *(folder / name for name in weights)]))
        return ModelFiles(folder, "safetensors", files, f"unsupported: {weights[0]} and {other} in one folder")
    try:
        if INDEX in here:
            beside.append(folder / INDEX)
            weights = _indexed(folder / INDEX)
    except ModelFileError as error:
        return ModelFiles(folder, "safetensors", tuple(sorted(beside)), f"damaged: {error.message}")
    if not weights:
        pickled = [folder / name for name in here if name.startswith("pytorch_model")]
        files = tuple(sorted(beside + pickled))
        return ModelFiles(folder, "pickle", files, "unsupported: PyTorch pickle files") if pickled else None
    missing = [name for name in weights if name not in here]
    files = tuple(sorted(beside + [folder / name for name in weights if name in here]))
    problem = f"incomplete: missing {_listed(missing)}" if missing else ""
    return _checked(ModelFiles(folder, "safetensors", files, problem))


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


def _indexed(path: Path) -> list[str]:
    """The weight files that an index names. Raises ModelFileError when it is malformed or leaves the folder."""
    try:
        raw = read_bounded(path, _MAX_INDEX_BYTES)
        names = sorted(set(msgspec.json.decode(raw, type=_ShardIndex).weight_map.values()))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path.name} cannot be read: {error}.") from error
    for name in names:
        if not is_plain_name(name):
            raise ModelFileError(f"{path.name} names {name!r}, which leaves the folder.")
    if len(names) > _MAX_PARTS:
        raise ModelFileError(f"{path.name} names {len(names)} files.")
    return names


def _checked(model: ModelFiles) -> ModelFiles:
    """The model, with links that lead nowhere as its problem."""
    if model.problem:
        return model
    gone = [file.name for file in model.files if not is_file(file)]
    if not gone:
        return model
    return ModelFiles(model.path, model.format, model.files, f"incomplete: missing {_listed(gone)}")


def _listed(items: list[int] | list[str]) -> str:
    shown = ", ".join(map(str, items[:3]))
    return shown + (f" and {len(items) - 3} more" if len(items) > 3 else "")


def model_at(path: Path) -> ModelFiles:
    """The model that a user's path means: a .gguf file, any part of a sharded one, or a folder.

    Raises ModelFileError for a folder that is no model, or that holds several.
    """
    if not path.is_dir():
        return _whole(path)
    names = [entry.name for entry in path.iterdir()]
    if model := folder_model(path, names):
        return model
    found = gguf_models(path, [name for name in names if is_gguf(name)])
    if len(found) == 1:
        return found[0]
    listed = f"; it holds {_listed([model.path.name for model in found])}" if found else ""
    raise ModelFileError(
        f"{path} is not a model: it has neither config.json nor one .gguf file{listed}.",
        "Name one of its .gguf files." if found else "Name a .gguf file or a folder in Hugging Face's layout.",
    )


def _whole(path: Path) -> ModelFiles:
    part = part_name(path.name)
    if part is None:
        return _checked(ModelFiles(path, "gguf", (path,)))
    stem, _, count = part
    names = [entry.name for entry in path.parent.iterdir()]
    alike = [name for name in names if (other := part_name(name)) and (other[0], other[2]) == (stem, count)]
    return _sharded(path.parent, count, sorted(alike))


def real_path(path: Path) -> Path:
    """The path with links followed. Unlike Path.resolve it also gives one for links in a circle."""
    return Path(os.path.realpath(path))


def settled(path: Path) -> Path:
    """The path with links followed, as far as the name keeps its kind: the Hugging Face cache keeps bytes under their digest alone."""
    real = real_path(path)
    return real if real.suffix == path.suffix else real_path(path.parent) / path.name


def is_file(path: Path) -> bool:
    """Path.is_file that also answers where looking is forbidden."""
    return os.path.isfile(path)  # noqa: PTH113


def is_gguf(name: str) -> bool:
    return name.endswith(".gguf")
