"""A model on disk, whatever its form: one GGUF file, the parts of one, or a SafeTensors folder in Hugging Face layout."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from power_lab.engine.weights.config_json import JsonConfig
from power_lab.engine.weights.filenames import COMPANIONS, CONFIG, INDEX, SINGLE, part_name
from power_lab.engine.weights.gguf_model import GgufModel
from power_lab.engine.weights.mapped import member, read_bounded
from power_lab.engine.weights.safetensors import SafeTensorsModel
from power_lab.engine.weights.source import FileSource
from power_lab.errors import ModelFileError

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_CONVERT = "Convert it to SafeTensors: pickles can run any code when they are read."
_README_BYTES = 1 << 20
_LICENSE = re.compile(r"license:[ \t]*[\"']?([\w.+ -]{1,64}?)[\"']?[ \t]*")


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An open model. Made by `open_checkpoint`; use it as a context manager or `close` it.

    Attributes:
        path: what was opened: a file or a folder.
        format: "gguf" or "safetensors".
        architecture: GGUF's `general.architecture` or the config's `model_type`, as stated.
        metadata: typed values: GGUF's of the first file, or config.json's.
        source: the tensors under the file's own names.
        files: all files that decide what the model says, for hashing; size: their bytes.
        license: as stated in the metadata or the model card, mostly SPDX; "" where it is not.
    """

    path: Path
    format: Literal["gguf", "safetensors"]
    architecture: str
    metadata: GgufModel | JsonConfig
    source: FileSource
    files: tuple[Path, ...]
    size: int
    license: str
    _model: GgufModel | SafeTensorsModel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; arrays handed out earlier stay valid."""
        self._model.close()

    def bytes_by_type(self) -> dict[str, int]:
        """Storage type -> bytes of all tensors stored so, also of types without arithmetic; the largest first."""
        total = Counter[str]()
        for tensor in self._model.tensors.values():
            total[tensor.kind] += tensor.stored.nbytes
        return dict(total.most_common())


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a .gguf file, any part of a split one, or a folder that holds one model.

    Headers are checked whole; tensors are mapped, not read. Raises ModelFileError naming what is missing, not sound, in a form that
    is not supported, or more than one model; nothing stays open.
    """
    path = Path(path)
    try:
        folder = stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be opened: {getattr(error, 'strerror', None) or error}.") from error
    if folder:
        return _open_folder(path)
    if path.suffix in (".safetensors", ".json"):
        raise ModelFileError(f"{path}: is a part of a model.", f"Open its folder, with {CONFIG} and weights in it.")
    if path.suffix in _PICKLES:
        raise ModelFileError(f"{path}: is a pickle.", _CONVERT)
    return _open_gguf(path, path)


def _open_gguf(path: Path, file: Path) -> Checkpoint:
    model = GgufModel.open(file)
    try:
        architecture = model.require("general.architecture", str)
    except ModelFileError:
        model.close()
        raise
    stated = model.metadata.get("general.license")
    return Checkpoint(
        path=path,
        format="gguf",
        architecture=architecture,
        metadata=model,
        source=FileSource(model),
        files=model.files,
        size=model.size,
        license=_plain(stated) if isinstance(stated, str) else "",
        _model=model,
    )


def _open_folder(path: Path) -> Checkpoint:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}.") from error
    ggufs = [name for name in names if name.endswith(".gguf")]
    tensors = [name for name in names if name in (SINGLE, INDEX)]
    if ggufs and tensors:
        raise ModelFileError(f"{path}: holds {ggufs[0]!r} and {tensors[0]!r}.", "Name the .gguf file, or move it away.")
    if ggufs:
        return _open_gguf(path, member(path, _only(path, ggufs)))
    if tensors and CONFIG in names:
        return _open_safetensors(path)
    raise _no_model(path, names, tensors)


def _only(path: Path, ggufs: list[str]) -> str:
    """The one GGUF model among the names, by its first part."""
    models: dict[object, str] = {}
    for name in ggufs:
        part = part_name(name)
        models.setdefault((part[0], part[2]) if part else name, name)
    if len(models) > 1:
        choice = ", ".join(repr(name) for name in list(models.values())[:8])
        raise ModelFileError(f"{path}: holds {len(models)} models: {choice}.", "Name one of the files.")
    return ggufs[0]


def _open_safetensors(path: Path) -> Checkpoint:
    config = JsonConfig.open(member(path, CONFIG))
    architecture = config.require("model_type", str)
    companions = tuple(member(path, name) for name in COMPANIONS if os.path.lexists(path / name))
    license = _model_card_license(path)
    model = SafeTensorsModel.open(path)
    files = (path / CONFIG, *model.files, *companions)
    return Checkpoint(
        path=path,
        format="safetensors",
        architecture=architecture,
        metadata=config,
        source=FileSource(model),
        files=files,
        size=sum(file.stat().st_size for file in files),
        license=license,
        _model=model,
    )


def _no_model(path: Path, names: list[str], tensors: list[str]) -> ModelFileError:
    """Why a folder cannot be opened, in its most helpful form."""
    if tensors:
        return ModelFileError(f"{path}: {CONFIG} is missing beside {tensors[0]!r}.", "Fetch the whole model folder.")
    if "adapter_config.json" in names:
        return ModelFileError(f"{path}: holds an adapter, not a model.", "Merge it into its base model first.")
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        return ModelFileError(f"{path}: {pickles[0]!r} is a pickle, and there is no {SINGLE}.", _CONVERT)
    if strays := [name for name in names if name.endswith(".safetensors")]:
        return ModelFileError(
            f"{path}: holds {strays[0]!r}, but neither {SINGLE} nor {INDEX}.", "Fetch the whole folder."
        )
    found = "is empty" if not names else "holds no model"
    return ModelFileError(f"{path}: {found}.", f"A model is a .gguf file, or {CONFIG} with {SINGLE}.")


def _model_card_license(path: Path) -> str:
    """What the front matter of README.md states."""
    with suppress(ModelFileError):  # a model without a readable card has no stated licence, but works
        text = read_bounded(member(path, "README.md"), _README_BYTES).decode(errors="replace")
        lines = text.splitlines()[:200]
        if lines and lines[0].strip() == "---":
            front = lines[1 : lines.index("---", 1)] if "---" in lines[1:] else []
            for match in filter(None, map(_LICENSE.fullmatch, front)):
                return match[1]
    return ""


def _plain(text: str) -> str:
    """A licence as one short printable line: it is shown in terminals."""
    return "".join(sign for sign in text[:64] if sign.isprintable())
