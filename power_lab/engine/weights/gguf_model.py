"""A model in GGUF: one file, or all parts of a split one (source: llama.cpp's gguf-split, names and `split.*` keys)."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, Self

import numpy as np

from power_lab.engine.weights.filenames import part_name
from power_lab.engine.weights.gguf import GgufFile, Split
from power_lab.engine.weights.mapped import member
from power_lab.engine.weights.tensor import TensorInfo
from power_lab.engine.weights.values import TypedValues
from power_lab.errors import ModelFileError

_OWN_KEYS = frozenset({"split.no", "general.alignment"})  # what parts may state each for itself


class GgufModel(TypedValues):
    """All files of one model, open and checked together. Made by `GgufModel.open`.

    Attributes:
        path: the first file, which holds the metadata; files: all of them, in order.
        size: bytes of all files.
        metadata: of the first file; tensors: of all files, name -> TensorInfo, in file order.
    """

    def __init__(self, parts: list[GgufFile]) -> None:
        self.path = parts[0].path
        self.files = tuple(part.path for part in parts)
        self.size = sum(part.size for part in parts)
        self.metadata: dict[str, Any] = parts[0].metadata
        self.tensors: dict[str, TensorInfo] = _joined(parts)
        self._parts = parts

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a model by its file, or by any one of its parts: the others lie in the same folder under their own names.

        Raises ModelFileError naming the file that is missing, not sound or not of this model; nothing stays open.
        """
        with ExitStack() as opened:
            first = opened.enter_context(GgufFile.open(path))
            split = first.split()
            parts = [first] if split is None else _siblings(first, split, opened)
            if split is not None:
                _refuse_foreign(parts, split)
            model = cls(parts)
            opened.pop_all()
        return model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; views handed out earlier stay valid."""
        self.tensors = {}
        for part in self._parts:
            part.close()

    def _value(self, key: str) -> Any:
        return self.metadata.get(key)


def _siblings(one: GgufFile, split: Split, opened: ExitStack) -> list[GgufFile]:
    """All parts in order; `one` is any of them."""
    named = part_name(one.path.name)
    if named is None or named[1:] != (split.number, split.count):
        raise ModelFileError(
            f"{one.path}: is part {split.number + 1} of {split.count} (keys 'split.no' and 'split.count'), but is not named so.",
            f"Name it NAME-{split.number + 1:05d}-of-{split.count:05d}.gguf and keep its parts beside it.",
        )
    parts = []
    for number in range(split.count):
        if number == split.number:
            parts.append(one)
            continue
        name = f"{named[0]}-{number + 1:05d}-of-{split.count:05d}.gguf"
        if not os.path.lexists(one.path.parent / name):
            raise ModelFileError(
                f"{one.path.parent / name}: part {number + 1} of {split.count} is missing.", "Fetch all parts."
            )
        parts.append(opened.enter_context(GgufFile.open(member(one.path.parent, name))))
    return parts


def _refuse_foreign(parts: list[GgufFile], split: Split) -> None:
    """Every part must say what its name says, and nothing that the first one does not say."""
    for number, part in enumerate(parts):
        stated = part.split()
        if stated is None or (stated.number, stated.count) != (number, split.count):
            says = "is a whole model" if stated is None else f"says part {stated.number + 1} of {stated.count}"
            raise ModelFileError(
                f"{part.path}: {says} (keys 'split.no' and 'split.count'), but part {number + 1} of {split.count} belongs there.",
                "Fetch this part again.",
            )
        for key in part.metadata.keys() - _OWN_KEYS:
            if not _equal(part.metadata[key], parts[0].metadata.get(key)):
                raise ModelFileError(
                    f"{part.path}: key {key!r} differs from that of {parts[0].path.name}: it is a part of another model.",
                    "Fetch all parts of one model.",
                )
    if sum(len(part.tensors) for part in parts) != split.tensors:
        raise ModelFileError(
            f"{parts[0].path}: key 'split.tensors.count' is {split.tensors}, but the parts hold "
            f"{sum(len(part.tensors) for part in parts)} tensors.",
            "Fetch all parts again.",
        )


def _joined(parts: list[GgufFile]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelFileError(
                    f"{part.path}: tensor {name!r} is in an earlier part too.", "Fetch the parts again."
                )
            tensors[name] = tensor
    return tensors


def _equal(one: object, other: object) -> bool:
    """Same type and same value; arrays bit for bit."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return type(one) is type(other) and (one == other or (one != one and other != other))
